"""The budget of a judge: requests and tokens of a run, counted across restarts of the reward actor."""

from collections.abc import Mapping
from typing import Final

import anyio
import msgspec
import structlog

from actors.reward.judging.requests import JudgeAnswer, JudgeError
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.settings.tables.reward import JudgeConfig

log = structlog.get_logger()

STORE_S: Final = 1.0  # a crash forgets the requests of at most this time
STORE_AT_END_S: Final = 3.0


class Spent(msgspec.Struct, kw_only=True):
    """What a judge has used."""

    requests: int = 0
    tokens: int = 0  # of prompts and answers, as the server reports them


class Budget:
    """What one reward actor may use of a judge. Requests in flight may exceed the tokens."""

    def __init__(self, judge: str, config: JudgeConfig, num_actors: int, spent: Spent | None = None) -> None:
        """Share the budget of a run.

        Args:
            judge: its name.
            config: its settings.
            num_actors: reward actors that share the budget.
            spent: used so far by this actor.
        """
        self._judge = judge
        self._limits = {
            "requests": _share(config.budget_requests, num_actors),
            "tokens": _share(config.budget_tokens, num_actors),
        }
        self.spent = spent or Spent()

    def begin(self) -> None:
        """Count a request.

        Raises:
            JudgeError: the budget is spent.
        """
        for name, limit in self._limits.items():
            if limit is not None and getattr(self.spent, name) >= limit:
                setting = f"reward.judges.{self._judge}.budget_{name}"
                raise JudgeError("refused", f"the budget of {limit} {name} is spent ({setting}, per reward actor)")
        self.spent.requests += 1

    def end(self, answer: JudgeAnswer) -> None:
        """Count the tokens of an answer."""
        self.spent.tokens += answer.num_tokens


async def open_budgets(configs: Mapping[str, JudgeConfig], bus: Bus, num_actors: int) -> dict[str, Budget]:
    """Read what the judges have used so far in this run."""
    found: dict[str, Budget] = {}
    for name, config in configs.items():
        entry = await bus.kv.get(_key(name, bus), Spent)
        found[name] = Budget(name, config, num_actors, None if entry is None else entry.value)
    return found


async def store_spent(budgets: Mapping[str, Budget], bus: Bus) -> None:
    """Store what the judges use, until cancelled."""
    stored = {name: msgspec.structs.replace(budget.spent) for name, budget in budgets.items()}

    async def store() -> None:
        for name, budget in budgets.items():
            if budget.spent == stored[name]:
                continue
            spent = msgspec.structs.replace(budget.spent)
            try:
                await bus.kv.put(_key(name, bus), spent)
            except BusError as error:
                log.warning("judge_budget_not_stored", error=str(error))
            else:
                stored[name] = spent

    try:
        while True:
            await anyio.sleep(STORE_S)
            await store()
    finally:
        with anyio.move_on_after(STORE_AT_END_S, shield=True):
            await store()


def _key(name: str, bus: Bus) -> str:
    return f"reward.spent.{name}.{bus.name}"


def _share(limit: int | None, num_actors: int) -> int | None:
    return None if limit is None else max(1, limit // num_actors)
