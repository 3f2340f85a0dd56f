"""Dispatch of requests to engines: by this actor ("direct"), or by SGLang's router ("sglang-router", router.py)."""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, TypeVar

MAX_IMBALANCE: Final = 1.5  # of the mean load: an engine with more keeps no prompt
FEW: Final = 8  # samples that an engine may hold in any case before its prompts go elsewhere
KEPT: Final = 65_536  # prompts whose engine is remembered


class Candidate(Protocol):
    """An engine that may get a request, as far as its choice depends on it."""

    name: str
    num_open: int  # samples of requests that were sent to it by name
    room: float  # share of the most samples that it may have


E = TypeVar("E", bound=Candidate)


class Dispatch(Protocol):
    """Decides where requests go, and registers engines where that is necessary."""

    first_url: str | None  # where requests without an engine go at the start; None: unknown yet
    waits_for: str  # what requests wait for while that is unknown, for people

    async def answers(self, router: str) -> bool:
        """Whether requests can be sent."""
        ...

    async def has(self, router: str, engine: str) -> bool:
        """Whether an engine is registered; registers it if it is not."""
        ...

    async def lacks(self, router: str, engine: str) -> bool:
        """Whether it is known that an engine is not registered."""
        ...

    async def free_of(self, router: str, engine: str | None) -> bool:
        """Whether an engine, or any engine if None, is not registered; unregisters those that are."""
        ...

    def engine_of(self, named: str, label: str) -> str:
        """Return the name of the engine that has a request; empty: unknown.

        Args:
            named: the engine that it was sent to; empty: to the router.
            label: newest weight label of its tokens; empty: it has none.
        """
        ...

    def may_hold(self, engine: str, engines: Mapping[str, E]) -> list[E]:
        """Return the engines that may hold a request.

        Args:
            engine: the engine that it was sent to, or that answers; empty: unknown.
            engines: all engines, by name.
        """
        ...

    def may_send(self, versions: Sequence[int], oldest: int, min_version: int) -> bool:
        """Whether a request that needs a weight version may be sent.

        Args:
            versions: of the engines that accept requests.
            oldest: the oldest version of an engine that may get a request; 0: none does.
            min_version: of the request, at least 1.
        """
        ...

    def choose(self, engines: Sequence[E], prompt: str, *, failed: str | None, by_name: bool) -> E | None:
        """Choose the engine of a request; None: the router chooses.

        Args:
            engines: those that accept requests and hold its weight version.
            prompt: identifies its prompt, or its conversation.
            failed: name of the engine that failed to answer it; empty: unknown. None: none did.
            by_name: the router cannot pass it on.
        """
        ...


class Direct:
    """Sends each request to an engine: the one of its prompt, or the least loaded one. Needs no router."""

    first_url: str | None = ""
    waits_for = ""

    def __init__(self, most: float = math.inf) -> None:
        """Choose nothing yet; `most` is the number of samples that an engine may have."""
        self._most = most
        self._num_chosen = 0
        self._of_prompt: OrderedDict[str, str] = OrderedDict()  # newest last

    async def answers(self, router: str) -> bool:
        return True

    async def has(self, router: str, engine: str) -> bool:
        return True

    async def lacks(self, router: str, engine: str) -> bool:
        return False

    async def free_of(self, router: str, engine: str | None) -> bool:
        return True

    def engine_of(self, named: str, label: str) -> str:
        return named

    def may_hold(self, engine: str, engines: Mapping[str, E]) -> list[E]:
        return [engines[engine]] if engine in engines else list(engines.values())

    def may_send(self, versions: Sequence[int], oldest: int, min_version: int) -> bool:
        return max(versions, default=0) >= min_version

    def choose(self, engines: Sequence[E], prompt: str, *, failed: str | None, by_name: bool) -> E | None:
        others = [engine for engine in engines if engine.name != failed] or engines
        by_engine = {engine.name: engine for engine in others}
        loads = {name: engine.num_open / engine.room for name, engine in by_engine.items()}
        if not loads:
            return None
        self._num_chosen += 1
        name = choose_engine(loads, self._of_prompt.get(prompt), self._num_chosen, self._most)
        self._of_prompt[prompt] = name
        self._of_prompt.move_to_end(prompt)
        if len(self._of_prompt) > KEPT:
            self._of_prompt.popitem(last=False)
        return by_engine[name]


def choose_engine(loads: Mapping[str, float], before: str | None, turn: int, most: float = math.inf) -> str:
    """Return the engine of a request. Pure.

    It is the one that its prompt had before, whose cache holds the prefix, unless that has more than MAX_IMBALANCE of
    the mean load, or the most that it may have: slots of others would be idle. Otherwise it is the least loaded one; of
    several they are taken in turn.

    Args:
        loads: samples in flight by engine, at least one engine. Those of an engine that may have fewer count more.
        before: engine of the prompt's last request; None: it had none.
        turn: number of this choice.
        most: samples that an engine may have.
    """
    mean = sum(loads.values()) / len(loads)
    load = math.inf if before is None else loads.get(before, math.inf)
    if before is not None and load <= max(FEW, MAX_IMBALANCE * mean) and load < most:
        return before
    least = min(loads.values())
    candidates = [name for name, load in loads.items() if load == least]
    return candidates[turn % len(candidates)]
