"""Runs a user's evaluation function: it decides of which prompts of an evaluation set how many samples are generated.

It gets all prompts of the set, and sees each sample with its reward before it asks for the next one. Its samples are
those of an evaluation without a function: sampling, grader and seeds are the same. What it asked for counts at its end,
all of it at once. So a function whose actor died begins again, with the same seeds.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.lowlevel

from actors.rollout.samples.conversation import GenerateFunction, is_cancelled
from actors.rollout.samples.generate_function import WrongCall, call_async
from actors.rollout.samples.must_end import GiveUp, gives_up_nothing, must_end
from actors.rollout.samples.rollout_function import GeneratedSample
from actors.rollout.samples.sample import OpenSample
from messages import Prompt, SampleSummary
from runtime.util.errors import flatten
from runtime.util.tracebacks import shown_error, user_traceback

RunSample = Callable[[int, OpenSample, GenerateFunction | None], Awaitable[None]]
EvaluationFunction = Callable[["SetEvaluation"], Awaitable[None]]


@dataclass(frozen=True)
class EvalPrompt:
    """A prompt of an evaluation set."""

    prompt: str
    label: Any
    metadata: dict[str, Any]


@dataclass(frozen=True)
class GradedSample(GeneratedSample):
    """A sample that has ended and is graded, as an evaluation function sees it."""

    item: int  # number of its prompt
    reward: float | None  # None: it has no grade
    score: dict[str, Any] | None  # the grader's answer, if it was more than a number
    reason: str | None  # why it failed, or has no grade


class SetEvaluation:
    """One evaluation of a set, as its evaluation function gets it.

    Attributes:
        name: of the set.
        step: train steps that the weights contain.
        prompts: of the set, in the order of its rows.
        num_samples: of a prompt, that the function may ask for.
    """

    def __init__(
        self,
        name: str,
        prompts: Sequence[Prompt],
        run_sample: RunSample,
        *,
        step: int,
        num_samples: int,
        key: str,
        limit_s: float = 300.0,
        give_up: GiveUp = gives_up_nothing,
    ) -> None:
        self.name, self.step, self.num_samples = name, step, num_samples
        self.prompts = tuple(EvalPrompt(each.text, deepcopy(each.label), deepcopy(each.metadata)) for each in prompts)
        self._lengths = [len(each.prompt_ids) for each in prompts]
        self._run_sample, self._key = run_sample, key
        self._limit_s = limit_s  # without a sample that generates
        self._give_up = give_up
        self._scope = anyio.CancelScope()
        self._summaries: list[list[SampleSummary]] = [[] for _ in prompts]
        self._num_running = 0
        self._refused = ""  # the request that ended the function
        self._error: Exception | None = None  # of this project, raised through the function
        self._has_ended = False
        self.traceback: str | None = None  # of the function, if it raised

    @property
    def is_waiting(self) -> bool:
        """Whether the function waits for a sample."""
        return self._num_running > 0

    def samples(self, item: int) -> tuple[SampleSummary, ...]:
        """Return the samples of a prompt. One that was given up before its end is aborted."""
        return tuple(self._summaries[item])

    async def sample(self, item: int, function: GenerateFunction | None = None) -> GradedSample:
        """Generate a sample of a prompt, and return it once it is graded.

        Args:
            item: number of the prompt, from 0. Its first sample has the index 0, and so on, `num_samples` at most.
            function: generates it, as `custom_generate` does, which is the default. Without one: a single turn.

        Raises:
            ValueError: there is no such prompt, or it has all its samples. The function ends at its next wait.
        """
        await anyio.lowlevel.checkpoint()  # a function that goes on after its mistake ends here
        sample = self._begun(item)
        self._num_running += 1
        self._let_work()
        try:
            await self._run_sample(item, sample, function)
        except Exception as error:  # of the bus or of all engines; what a sample does wrong costs it alone
            self._error = self._error or error
            self._scope.cancel()
            raise
        finally:
            self._summaries[item][sample.index] = sample.summary()
            self._num_running -= 1
            self._let_work()
        return GradedSample(
            item=item,
            index=sample.index,
            status=sample.status,
            text=sample.buffer.text,
            ids=sample.buffer.ids.tolist(),
            sample_metadata=deepcopy(sample.metadata),
            reward=sample.reward,
            score=deepcopy(sample.details),
            reason=sample.reason,
        )

    async def run(self, function: EvaluationFunction) -> str:
        """Run the function. Return why it failed; empty: it did not."""
        reason = ""
        self._let_work()
        with self._scope:
            try:
                with must_end(self._key, self._scope, lambda: self.is_waiting, give_up=self._give_up):
                    await call_async(function, self, counts="the samples that it asked for count")
            except WrongCall as error:
                reason = str(error)
            except BaseException as error:
                if is_cancelled(error):
                    raise
                reason = "; ".join(map(shown_error, flatten(error)))
                self.traceback = user_traceback(error)
        self._has_ended = True
        if self._error is not None:
            raise self._error
        if self._refused:
            reason = self._refused
        elif self._scope.cancel_called:  # also if the function caught the cancellation
            reason = f"took more than {self._limit_s:g} s without generating a sample"
        elif not reason and not any(self._summaries):
            reason = "asked for no sample: it never awaited sample"
        return reason and f"{self._key}: {reason}"

    def _begun(self, item: int) -> OpenSample:
        """Begin the next sample of a prompt.

        Raises:
            ValueError: there is none.
        """
        refused = ""
        if self._has_ended:
            refused = f"a sample of prompt {item!r}, after the end of the function"
        elif type(item) is not int or not 0 <= item < len(self.prompts):
            refused = f"a sample of prompt {item!r:.100}: the set has the prompts 0 to {len(self.prompts) - 1}"
        elif len(self._summaries[item]) == self.num_samples:
            refused = f"another sample of prompt {item}: n_samples_per_eval_prompt allows {self.num_samples}"
        if refused:
            self._refused = self._refused or f"asked for {refused}"
            self._scope.cancel()
            raise ValueError(refused)
        summaries = self._summaries[item]
        sample = OpenSample(index=len(summaries), prompt_len=self._lengths[item])
        summaries.append(sample.summary())
        return sample

    def _let_work(self) -> None:
        """Give the function its time until it generates the next sample."""
        self._scope.deadline = math.inf if self._num_running else anyio.current_time() + self._limit_s
