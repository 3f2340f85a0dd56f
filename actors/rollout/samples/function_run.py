"""One run of a generate function: what all conversations of its sample share, and the function's time."""

import math
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Never, TypeVar

import anyio
import numpy as np

from actors.rollout.samples.arguments import shown_ids
from actors.rollout.samples.sample import OpenSample
from actors.rollout.sglang.served_model import ServedModel
from messages import Int32Array, Prompt, SampleStatus, SamplingParams
from runtime.bus.errors import BusError

Ask = Callable[[OpenSample, SamplingParams, int], Awaitable[bool]]
Keep = Callable[[OpenSample], Awaitable[None]]
AskPool = Callable[[OpenSample, list[int], SamplingParams, int], Awaitable[Any]]
NO_POOLS: Final[Mapping[str, AskPool]] = {}
Returned = TypeVar("Returned")


@dataclass(eq=False)
class FunctionRun:
    """What the conversations of one sample share, while its function runs."""

    prompt: Prompt
    params: SamplingParams  # of the sample, with the limit of each conversation's response
    ask: Ask
    keep: Keep
    model: ServedModel
    trains_temperatures: bool = True  # whether turns at other temperatures than the recipe's train
    limit_s: float = 300.0  # of the function, outside of `generate` and `grade`
    pools: Mapping[str, AskPool] = field(default_factory=lambda: NO_POOLS)  # that the function may choose, by name
    is_limit_of_all: bool = False  # the limit is for all of its time, not for that between two turns
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    requests: anyio.Lock = field(default_factory=anyio.Lock)  # a sample has one slot, so one request at a time
    own_s: float = 0.0  # of the function so far, until its newest turn began
    waited_s: float = 0.0  # for turns and grades so far
    since: float | None = None  # it works, or waits; None: it has not begun
    has_waited: bool = False  # since then
    num_asking: int = 0
    num_elsewhere: int = 0  # calls that wait for a pool or a grader; a halt does not wait for them
    halted: bool = False
    over: SampleStatus | None = None  # final status, if the sample ended before its function
    mismatch: str | None = None  # what a replay found to differ
    bus_error: BusError | None = None  # the actor's to handle, so the function does not see it

    def let_work(self) -> None:
        """Give the function its time until the next turn. A halted one ends at its next wait."""
        now = anyio.current_time()
        took_s = 0.0 if self.since is None else now - self.since
        if self.has_waited:
            self.waited_s += took_s
        else:
            self.own_s += took_s
        self.since, self.has_waited = now, self.is_waiting
        left_s = self.limit_s - self.own_s if self.is_limit_of_all else self.limit_s
        self.scope.deadline = math.inf if self.is_waiting else now + left_s
        if self.halted and not self.num_asking:
            self.scope.cancel()

    @property
    def is_waiting(self) -> bool:
        """Whether the function waits for an engine, a pool or a grader, so that its time does not pass."""
        return self.num_asking + self.num_elsewhere > 0

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Stop the function's time while a pool or a grader works."""
        self.num_elsewhere += 1
        self.let_work()
        try:
            yield
        finally:
            self.num_elsewhere -= 1
            self.let_work()

    async def in_pool(self, pool: str, sample: OpenSample, ids: list[int], params: SamplingParams, limit: int) -> Any:
        """Let an engine pool generate a turn."""
        if limit <= 0:
            await self.leave(SampleStatus.TRUNCATED)
        with self.waiting():
            return await self.pools[pool](sample, ids, params, limit)

    async def over_bus(self, call: Awaitable[Returned]) -> Returned:
        """Wait for a call that needs the bus. If the bus fails, the function ends: it cannot go on without it."""
        try:
            return await call
        except BusError as error:
            self.bus_error = error
        await self.leave()

    def expect_prompt(self, part: int, recorded: Int32Array, now: Int32Array) -> None:
        """End the function at its next wait if a conversation has another prompt than in an earlier run of it."""
        if not np.array_equal(recorded, now):
            self.mismatch = f"prompt of conversation {part}: {shown_ids(recorded)}, now {shown_ids(now)}"
            self.scope.cancel()

    async def leave(self, status: SampleStatus | None = None, *, mismatch: str | None = None) -> Never:
        """End the function, which is waiting in this call."""
        self.over, self.mismatch = self.over or status, self.mismatch or mismatch
        self.scope.cancel()
        await anyio.sleep_forever()
        raise AssertionError  # never reached
