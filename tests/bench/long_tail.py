"""Long-tailed rollout, simulated: what an ideal run of the buffer's rules makes of an engine's slots. Pure.

Nothing but token steps and train steps takes time: no messages, no scores, no weight updates, no prefill. An engine
step takes a + b n seconds for n running samples and gives each of them a token; a sample that waits gets a free slot at
the next step. Groups are issued, halted, put in batches and trained by the rules of the ledger.
"""

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Lengths:
    """Response lengths by prompt and sample: lognormal, at least 1 and at most `cap`. The same in every run."""

    mean: float  # tokens, before the cap
    sigma: float  # of the log
    cap: int
    seed: int = 0

    def of(self, prompt: int, index: int) -> int:
        drawn = random.Random(f"{self.seed}/{prompt}/{index}").lognormvariate(
            math.log(self.mean) - self.sigma**2 / 2, self.sigma
        )
        return max(1, min(self.cap, round(drawn)))


@dataclass(frozen=True)
class Clock:
    """How long a step of the engine takes."""

    base_s: float  # a
    per_sample_s: float  # b
    slots: int

    def step_s(self, num_running: int) -> float:
        return self.base_s + self.per_sample_s * num_running


@dataclass(frozen=True)
class Mode:
    """What of the recipe differs between the runs that are compared."""

    over_sampling: int  # groups issued at a time, in batches
    on_halt: Literal["resume", "drop"] = "resume"
    max_staleness: int = 0


@dataclass(frozen=True)
class Work:
    """What all runs have in common."""

    num_steps: int
    num_groups: int  # per train step
    num_samples: int  # per group
    train_s: float  # per train step


@dataclass
class Group:
    """A live group: tokens that are left, by member."""

    num_tokens: int
    left: list[int]

    @property
    def complete(self) -> bool:
        return not any(self.left)


@dataclass
class Trained:
    """One train step: when it ended, and the response tokens that it trained."""

    ended_s: float
    num_tokens: int


@dataclass
class Simulation:
    """A run, token step by token step."""

    work: Work
    mode: Mode
    clock: Clock
    lengths: Lengths
    now_s: float = 0.0
    trained: list[Trained] = field(default_factory=list[Trained])
    _num_issued: int = 0
    _round: int = 0
    _pooled: list[Group] = field(default_factory=list[Group])
    _live: list[Group] = field(default_factory=list[Group])  # of the open round, in order of issue
    _ready: deque[Group] = field(default_factory=deque[Group])
    _batches: deque[int] = field(default_factory=deque[int])  # tokens of each batch that waits or is being trained
    _trained_at_s: float | None = None  # end of the train step under way

    def run(self) -> list[Trained]:
        while len(self.trained) < self.work.num_steps:
            self._decide()
            if self._batches and self._trained_at_s is None:
                self._trained_at_s = self.now_s + self.work.train_s
            self._step_engine()
            if self._trained_at_s is not None and self._trained_at_s <= self.now_s:
                self.trained.append(Trained(self._trained_at_s, self._batches.popleft()))
                self._trained_at_s = None
        return self.trained

    def _decide(self) -> None:
        size = self.work.num_groups
        while self._round < self.work.num_steps and len(self.trained) >= self._round - self.mode.max_staleness:
            if len(self._ready) >= size:
                self._batches.append(sum(self._ready.popleft().num_tokens for _ in range(size)))
                self._round += 1
                self._pooled += self._live if self.mode.on_halt == "resume" else []
                self._live = []
            elif len(self._live) + len(self._ready) < size:
                self._issue(size * self.mode.over_sampling)
            else:
                return

    def _issue(self, number: int) -> None:
        self._live += self._pooled[:number]
        del self._pooled[:number]
        while len(self._live) < number:
            left = [self.lengths.of(self._num_issued, index) for index in range(self.work.num_samples)]
            self._live.append(Group(sum(left), left))
            self._num_issued += 1

    def _step_engine(self) -> None:
        running = self._running()
        if not running:
            assert self._trained_at_s is not None, "nothing generates and nothing trains"
            self.now_s = max(self.now_s, self._trained_at_s)
            return
        self.now_s += self.clock.step_s(len(running))
        for group, index in running:
            group.left[index] -= 1
        self._ready += [group for group in self._live if group.complete]
        self._live = [group for group in self._live if not group.complete]

    def _running(self) -> Sequence[tuple[Group, int]]:
        unfinished = [(group, index) for group in self._live for index, left in enumerate(group.left) if left]
        return unfinished[: self.clock.slots]


def tokens_per_s(trained: Sequence[Trained], num_warm_up: int) -> float:
    """Trained response tokens per second, from the end of the last step of the warm-up."""
    begin = trained[num_warm_up - 1].ended_s if num_warm_up else 0.0
    return sum(step.num_tokens for step in trained[num_warm_up:]) / (trained[-1].ended_s - begin)
