"""Runs a user's generate function for one sample: its conversations, its end, and what it does again after a halt.

A function runs again if its sample was halted or its actor crashed. The conversations are then replayed: finished
turns are returned as they were, without an engine, and the input between them is kept. A function that does something
else than before has a mismatch, and its sample is not trained as it is.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Final

from actors.rollout.samples.arguments import checked_ids, checked_text, shown_ids
from actors.rollout.samples.context import Context
from actors.rollout.samples.function_run import NO_POOLS, Ask, AskPool, FunctionRun, Keep
from actors.rollout.samples.generate_function import KEY, WrongCall, call_async
from actors.rollout.samples.must_end import GiveUp, gives_up_nothing, must_end
from actors.rollout.samples.sample import FINISHED, OpenSample, tokens_left
from actors.rollout.samples.scoring import NotGraded
from actors.rollout.sglang.errors import EngineError
from actors.rollout.sglang.served_model import ServedModel
from messages import Int32Array, Prompt, SampleStatus, SampleSummary, SamplingParams
from runtime.bus.errors import BusError
from runtime.util.errors import flatten
from runtime.util.stacks import place_in
from runtime.util.tracebacks import shown_error, user_frames, user_traceback

GenerateFunction = Callable[["Conversation"], Awaitable[None]]
Grade = Callable[[str, str | None], Awaitable[float]]

MAX_OPENED: Final = 64  # further conversations of one sample
ENDS: Final = {
    "completed": SampleStatus.COMPLETED,
    "truncated": SampleStatus.TRUNCATED,
    "aborted": SampleStatus.ABORTED,
    "failed": SampleStatus.FAILED,
}


class FunctionFailed(ValueError):
    """A user's function did not do what it should, or took too long.

    Attributes:
        stopped_at: traceback of its own code where it was ended; empty: unknown.
        is_own: whether the fault is the function's, and not that of a grader that it called.
    """

    stopped_at: str = ""
    is_own: bool = True


class FunctionUnusable(FunctionFailed):
    """What should generate a sample is no async function, or returned something: each sample would fail so."""


class FunctionRaised(FunctionFailed):
    """A user's function raised; its exception is the cause of this one."""


def of_this_project(error: BaseException) -> EngineError | BusError | None:
    """The error of this project that a user's function passed on, also as another one or in a group; None: none.

    What a function raised because an engine was lost is not its own fault.
    """
    return next((each for each in _behind(error) if isinstance(each, EngineError | BusError)), None)


def _behind(error: BaseException) -> Iterator[BaseException]:
    """An exception, those in its group, and those that led to it."""
    seen, waiting = set[int](), [error]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += flatten(each)
        waiting += filter(None, (each.__cause__, None if each.__suppress_context__ else each.__context__))


def is_cancelled(error: BaseException) -> bool:
    """Whether an exception ends this task from outside, unlike one that the user's function raised."""
    task = asyncio.current_task()
    return isinstance(error, GeneratorExit) or (
        isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
    )


async def grade_nothing(_text: str, _prompt: str | None) -> float:
    """Refuse to grade: there are no graders, as in bin/try."""
    raise ValueError("there is no grader here")


async def keep_nothing(_sample: OpenSample) -> None:
    """Keep no tokens of a service, for functions that use none."""


class Conversation(Context):
    """The first conversation of a sample, whose prompt is the row's; it may open further ones."""

    def __init__(
        self,
        prompt: Prompt,
        sample: OpenSample,
        *,
        params: SamplingParams,
        ask: Ask,
        model: ServedModel,
        keep: Keep = keep_nothing,
        trains_temperatures: bool = True,
        limit_s: float = 300.0,
        is_limit_of_all: bool = False,
        evaluation: bool = False,
        grade: Grade = grade_nothing,
        pools: Mapping[str, AskPool] = NO_POOLS,
        give_up: GiveUp = gives_up_nothing,
        key: str = KEY,
        running: "set[Conversation] | None" = None,
        group_id: int | None = None,
    ) -> None:
        if not sample.buffer.num_tokens:  # an earlier start of the function may have begun with another prompt
            sample.own_prompt, sample.prompt_len = None, len(prompt.prompt_ids)
        run = FunctionRun(prompt, params, ask, keep, model, trains_temperatures, limit_s, pools, is_limit_of_all)
        super().__init__(run, sample)
        self.model, self.index = model, sample.index
        self.sampling, self.evaluation = params, evaluation
        self.group_id = group_id
        self._grade, self._give_up = grade, give_up
        self._running_ones = set[Conversation]() if running is None else running  # holds it while its function runs
        self.starts_again = False  # the function asks for another start from the prompt
        self.reason, self.key = "", key  # why it failed, and the setting that brought the function
        self._end: SampleStatus | None = None  # that the function set
        self._opened: list[Context] = []
        self._has_begun = False
        self._stopped_at = ""  # traceback of the function where it was cancelled
        self._was_cancelled = False  # a cancellation reached the function, also if it caught that

    @property
    def _prompt_ids(self) -> Int32Array:
        """The prompt. A run of the function sees that of an earlier run once it has replaced the row's itself."""
        return super()._prompt_ids if self._has_begun else self._run.prompt.prompt_ids

    @property
    def all(self) -> tuple[Context, ...]:
        """This conversation, and those that it opened."""
        return (self, *self._opened)

    @property
    def is_waiting(self) -> bool:
        """Whether the function waits for an engine, of the policy or of another pool, or for a grader."""
        return self._run.is_waiting

    @property
    def mismatch(self) -> str | None:
        """What differs from an earlier run of the function; None: nothing."""
        return self._run.mismatch

    @property
    def has_recorded_turns(self) -> bool:
        """Whether an earlier run of the function has left tokens, which this one would have to replay."""
        return self._sample.buffer.num_tokens > 0

    @property
    def recorded_turns(self) -> Mapping[int, int]:
        """The number of finished turns that an earlier run of the function has left, by conversation."""
        return {part.part: part.num_turns for part in self._sample.parts}

    def recorded_prompt(self, part: int) -> list[int]:
        """Return the prompt that a conversation had in an earlier run of the function.

        Raises:
            ValueError: there was no such conversation.
        """
        found = next((each for each in self._sample.parts if each.part == part), None)
        if found is None:
            raise ValueError(f"the sample has no conversation {part}")
        return found.prompt_of(self._run.prompt.prompt_ids).tolist()

    def stored(self) -> tuple[SampleSummary, ...]:
        """Return what is stored of this conversation and of those that it opened."""
        return tuple(part.summary() for part in self._sample.parts if part.refs and part.stored)

    def add_times(self, own_s: float, waited_s: float) -> None:
        """Count the time of an earlier run of the function, which this one goes on with, in seconds."""
        self._run.let_work()
        self._run.own_s += own_s
        self._run.waited_s += waited_s
        self._run.let_work()

    @property
    def times_s(self) -> tuple[float, float]:
        """Seconds that the function took itself, and those for which it waited for turns and grades, until now."""
        self._run.let_work()
        return self._run.own_s, self._run.waited_s

    def begin(self, *pieces: str | Sequence[int]) -> None:
        """Replace the row's prompt by another one, before the first turn.

        Args:
            pieces: the prompt: texts, which are encoded, and token ids.

        Raises:
            ValueError: there was a turn, or the prompt leaves no room.
        """
        if self._has_begun or self.asking or self.num_turns:
            raise ValueError("a prompt is replaced once, before the first turn")
        ids, self._has_begun = Int32Array([token for piece in pieces for token in self._piece(piece)]), True
        if self._sample.buffer.num_tokens:  # of an earlier run of the function
            self._run.expect_prompt(0, super()._prompt_ids, ids)
        else:
            self._sample.own_prompt, self._sample.prompt_len = ids, len(ids)
        if self.room <= 0:
            raise ValueError(f"a prompt of {len(ids)} tokens leaves no room for a response")

    def open(self, *pieces: str | Sequence[int]) -> Context:
        """Begin a further conversation of this sample, with another context.

        It is trained as a sample of its own: it and its siblings share one vote. Without a reward of its own it has
        this conversation's. Its room is that of the first one, less what its prompt is longer.

        Args:
            pieces: its prompt: texts, which are encoded, and token ids, such as those of `turns`. None: the row's.

        Raises:
            ValueError: there are too many, or the prompt leaves no room.
        """
        run, sample = self._run, self._sample
        part = len(self._opened) + 1
        if part > MAX_OPENED:
            raise ValueError(f"a sample may open {MAX_OPENED} further conversations")
        given = [token for piece in pieces for token in self._piece(piece)] if pieces else run.prompt.prompt_ids
        ids = Int32Array(given)
        sibling = sample.siblings.get(part)
        if sibling is None:
            sibling = sample.open_sibling(part, ids)
        else:
            run.expect_prompt(part, sibling.prompt_of(ids), ids)
        opened = Context(run, sibling)
        if opened.room <= 0:
            raise ValueError(f"a prompt of {len(ids)} tokens leaves no room for a response")
        self._opened.append(opened)
        return opened

    async def grade(self, text: str, prompt: str | None = None) -> float:
        """Return the reward that the grader of the row gives a text, such as a draft. A replay asks again.

        Args:
            text: a response.
            prompt: that the grader sees; None: the row's.

        Raises:
            TypeError: the text or the prompt is not a str.
            ValueError: the grader gave no reward, or grades whole groups.
        """
        text = checked_text(text, "grade")
        prompt = None if prompt is None else checked_text(prompt, "grade: prompt")
        with self._run.waiting():
            return await self._run.over_bus(self._grade(text, prompt))

    def end(self, status: str, reason: str = "") -> None:
        """Say how the sample ends, before the function returns. Without a call: as its newest turn did.

        Args:
            status: "completed", "truncated", "failed" (it does not train; needs a reason), or "aborted" (it starts
                again from its prompt, a few times; then it has failed).
            reason: why it failed or was aborted.

        Raises:
            ValueError: the status is unknown, or a reason is missing.
        """
        if status not in ENDS:
            raise ValueError(f"status = {status!r}; allowed: {', '.join(ENDS)}")
        if status == "failed" and not reason:
            raise ValueError('a sample with status = "failed" needs a reason')
        self._end, self.reason = ENDS[status], checked_text(reason, "end")

    async def run(self, function: GenerateFunction) -> SampleStatus:
        """Run the function; return the sample's final status, ABORTED if it was halted or starts again.

        A reward that is not a finite number fails the sample. That of a sample without all its tokens is not looked at.

        Raises:
            FunctionFailed: the function raised, took too long, requested no turn, or set what no event can carry.
        """
        self._running_ones.add(self)
        try:
            return await self._run_to_its_end(function)
        finally:
            self._running_ones.discard(self)

    async def _run_to_its_end(self, function: GenerateFunction) -> SampleStatus:
        run = self._run
        run.let_work()
        failed: BaseException | None = None
        refused: WrongCall | None = None
        task = asyncio.current_task()
        assert task is not None
        num_cancellations = task.cancelling()
        with run.scope:
            try:
                is_halted, is_waiting = lambda: run.halted, lambda: run.is_waiting
                with must_end(self.key, run.scope, is_waiting, give_up=self._give_up, is_halted=is_halted):
                    await call_async(function, self, counts="what it does with its conversation counts")
            except WrongCall as error:
                refused = error
            except BaseException as error:
                if is_cancelled(error):
                    self._stopped_at = user_traceback(error) if user_frames(error) else ""
                    raise
                if (ours := of_this_project(error)) is not None:  # raised through the function
                    raise ours from None
                failed = error
            # a function that ends without a further wait after a halt was not cancelled, and is complete
            self._was_cancelled = task.cancelling() > num_cancellations
        if run.bus_error is not None:
            raise run.bus_error
        if self._was_ended:
            failed = refused = None  # it raised because it was ended, as clean-up may that is cancelled
        conversations = self.all
        try:
            for each in conversations:
                each.settle()
        except (TypeError, ValueError) as error:
            failed = failed or error
        if run.mismatch is None and refused is not None:
            raise FunctionUnusable(f"{self.key}: {refused}")
        if run.mismatch is None and failed is not None:
            raise failed if isinstance(failed, FunctionFailed) else self._failure(failed)
        self._check_end(conversations)
        if run.over is None and run.mismatch is None:
            run.mismatch = self._left_out(conversations)
        self.starts_again = run.mismatch is not None or (run.over is None and self._end is SampleStatus.ABORTED)
        status = SampleStatus.ABORTED if run.mismatch is not None else run.over or self._end or self._own_end()
        if status in FINISHED:
            try:
                for each in conversations:
                    each.settle_reward()
            except (TypeError, ValueError, OverflowError) as error:
                status, self.reason = SampleStatus.FAILED, str(error)
        for sibling in self._sample.siblings.values():
            sibling.status = status
        return status

    def _failure(self, raised: BaseException) -> FunctionRaised:
        place = place_in(user_traceback(raised)) if user_frames(raised) else ""
        failure = FunctionRaised(f"{self.key}: {shown_error(raised)}{f' ({place})' if place else ''}")
        failure.__cause__ = raised
        failure.is_own = not any(isinstance(each, NotGraded) for each in _behind(raised))
        return failure

    def kept_open(self) -> AbstractContextManager[None]:
        """Let no time of the function pass in this block: another function decides what its sample does next."""
        return self._run.waiting()

    def pause(self) -> None:
        """Copy what the function has done to the sample, whose group is given back while the function goes on."""
        for each in self.all:
            with suppress(TypeError, ValueError):  # what no event can carry fails the sample at the function's end
                each.settle()
        for part in self._sample.parts:
            part.status = SampleStatus.ABORTED

    def halt(self) -> None:
        """Halt the sample at its next wait. A running request ends first and keeps its tokens."""
        self._run.halted = True
        if not self._run.num_asking:
            self._run.scope.cancel()

    def _piece(self, piece: str | Sequence[int]) -> list[int]:
        model = self._run.model
        return model.encode(piece) if isinstance(piece, str) else checked_ids(model, piece)

    @property
    def _was_ended(self) -> bool:
        """Whether the function was cancelled by a halt, or for lack of room, also if it caught that."""
        run = self._run
        return self._was_cancelled and (run.halted or run.over is not None)

    def _own_end(self) -> SampleStatus:
        """Return the status if the function set none: truncated if the newest turn was cut off because the room ended.

        A replay does not know how a turn ended. One that fills the room was cut off then.
        """
        is_full = tokens_left(self._sample, self._limit) <= 0
        cut_off = is_full and self._sample.turn_status is not SampleStatus.COMPLETED
        return SampleStatus.TRUNCATED if cut_off else SampleStatus.COMPLETED

    def _check_end(self, conversations: Sequence[Context]) -> None:
        run, was_cancelled = self._run, self._run.scope.cancelled_caught or self._was_ended
        if run.mismatch is not None:
            return
        ended_early = self._end in (SampleStatus.ABORTED, SampleStatus.FAILED)
        cut_off = not ended_early and any(each.is_cut_off for each in conversations)
        if not was_cancelled and (cut_off or any(each.asking for each in conversations)):
            raise FunctionFailed(f"{self.key}: ended in the middle of a turn")
        if was_cancelled and run.halted:
            run.over = run.over or SampleStatus.ABORTED
        if was_cancelled and run.over is None:
            late = FunctionFailed(f"{self.key}: took more than {run.limit_s:g} s outside of generate and grade")
            late.stopped_at = self._stopped_at
            raise late
        if run.over is None and not ended_early and not any(each.num_turns for each in conversations):
            raise FunctionFailed(f"{self.key}: ended without a turn of the model: it never awaited generate")

    def _left_out(self, conversations: Sequence[Context]) -> str | None:
        """Return what an earlier run of the function did and this one did not; None: nothing."""
        if self._sample.own_prompt is not None and not self._has_begun:
            return f"prompt of conversation 0: {shown_ids(super()._prompt_ids)}, now the row's"
        for number, each in enumerate(conversations):
            if (less := each.left_out()) is not None:
                return f"conversation {number}: {less}"
        recorded = sum(sibling.buffer.num_tokens > 0 for sibling in self._sample.siblings.values())
        if recorded > len(self._opened):
            return f"{recorded} further conversations, now {len(self._opened)}"
        return None
