"""The budget of a judge: requests and tokens of a run, counted across restarts of the reward actor."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, Protocol

import anyio
import msgspec
import structlog

from actors.reward.judging.requests import JudgeAnswer, JudgeError
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.settings.tables.reward import JudgeConfig

log = structlog.get_logger()

SHARE: Final = 100  # a crash costs a hundredth of the budget
BLOCKS: Final = {"requests": 1000, "tokens": 1_000_000}  # without a limit
STORE_AT_END_S: Final = 3.0


class Spent(msgspec.Struct, kw_only=True):
    """What a judge has used."""

    requests: int = 0
    tokens: int = 0  # of prompts and answers, as the server reports them


class Store(Protocol):
    """Stores what is used, and what is used next, for the next start of the actor."""

    async def __call__(self, spent: Spent) -> None: ...


async def store_nothing(spent: Spent) -> None:
    """Keep the count in this process alone."""


class Budget:
    """What one reward actor may use of a judge. Requests in flight may exceed the tokens.

    It stores what it has used and a block more, before a request would exceed the stored number. So a crash of the
    actor never forgets a request; it counts the rest of the block as used.
    """

    def __init__(
        self,
        judge: str,
        config: JudgeConfig,
        num_actors: int,
        spent: Spent | None = None,
        store: Store = store_nothing,
    ) -> None:
        """Share the budget of a run.

        Args:
            judge: its name.
            config: its settings.
            num_actors: reward actors that share the budget.
            spent: used so far by this actor.
            store: keeps the number for the next start.
        """
        self._judge = judge
        self._limits = {
            "requests": _share(config.budget_requests, num_actors),
            "tokens": _share(config.budget_tokens, num_actors),
        }
        self.spent = spent or Spent()
        self._stored = msgspec.structs.replace(self.spent)
        self._store = store
        self._storing = anyio.Lock()

    async def begin(self) -> None:
        """Count a request.

        Raises:
            JudgeError: the budget is spent.
        """
        for name, limit in self._limits.items():
            if limit is not None and getattr(self.spent, name) >= limit:
                setting = f"reward.judges.{self._judge}.budget_{name}"
                raise JudgeError("refused", f"the budget of {limit} {name} is spent ({setting}, per reward actor)")
        self.spent.requests += 1
        while not self._is_stored:
            async with self._storing:
                if not self._is_stored:
                    await self._put(Spent(**{name: self._next(name) for name in self._limits}))

    def end(self, answer: JudgeAnswer) -> None:
        """Count the tokens of an answer."""
        self.spent.tokens += answer.num_tokens

    def give_back(self) -> None:
        """Count a request no longer, because the server refused it: it costs nothing there."""
        self.spent.requests -= 1

    async def close(self) -> None:
        """Store what was used."""
        if self.spent != self._stored:
            await self._put(msgspec.structs.replace(self.spent))

    @property
    def _is_stored(self) -> bool:
        return self.spent.requests <= self._stored.requests and self.spent.tokens <= self._stored.tokens

    def _next(self, name: str) -> int:
        """Return what is used, and a block more; at most the budget, unless more is used."""
        used, limit = getattr(self.spent, name), self._limits[name]
        if limit is None:
            return used + BLOCKS[name]
        return max(used, min(limit, used + limit // SHARE))

    async def _put(self, spent: Spent) -> None:
        try:
            await self._store(spent)
        except BusError as error:  # a restart before the next block would forget the requests of this one
            log.warning("judge_budget_not_stored", judge=self._judge, error=str(error))
        self._stored = spent


@asynccontextmanager
async def open_budgets(
    configs: Mapping[str, JudgeConfig], bus: Bus | None, num_actors: int
) -> AsyncGenerator[dict[str, Budget]]:
    """Read what the judges have used so far in this run, and store it at the end; without a bus there is no run."""
    if bus is None:
        yield {name: Budget(name, config, num_actors) for name, config in configs.items()}
        return
    found: dict[str, Budget] = {}
    for name, config in configs.items():
        key = f"reward.spent.{name}.{bus.name}"
        entry = await bus.kv.get(key, Spent)
        found[name] = Budget(name, config, num_actors, entry and entry.value, partial(_store, bus, key))
    try:
        yield found
    finally:
        with anyio.move_on_after(STORE_AT_END_S, shield=True):
            for budget in found.values():
                await budget.close()


async def _store(bus: Bus, key: str, spent: Spent) -> None:
    await bus.kv.put(key, spent)


def _share(limit: int | None, num_actors: int) -> int | None:
    return None if limit is None else max(1, limit // num_actors)
