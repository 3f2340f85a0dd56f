"""One call of a rollout function of slime: its samples stay open until it returns, and get what it returned of them."""

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import anyio
from anyio.abc import TaskGroup
from anyio.from_thread import BlockingPortal

from actors.rollout.samples.conversation import Conversation
from actors.rollout.samples.rollout_function import KEY, PromptGroup
from actors.rollout.sglang.errors import EngineError
from actors.rollout.sglang.served_model import ServedModel
from actors.rollout.slime.generate import EngineRouter, Tokenizer, args_of, params_of, settle
from runtime.bus.errors import BusError
from runtime.compat.slime.functions import PAGE, Args, Sample, router_of_function
from runtime.compat.slime.rollouts import DataBuffer, RolloutFnEvalOutput, flat, id_of, samples_in
from runtime.settings.derived import over_sampling_batch_size
from runtime.settings.tables.rollout import RolloutConfig
from runtime.util.tracebacks import shown_error

LEFT_OUT: Final = "the function returned without it"
CONTEXT_LENS: Final = ("rollout_max_context_len", "eval_max_context_len")  # of `args`, for one sample
NOT_SET: Final = (
    "custom_generate_function_path",  # generate_and_rm calls that of the recipe
    "dynamic_sampling_filter_path",
    "rollout_sample_filter_path",
    "rollout_all_samples_process_path",
    "eval_reward_key",
)  # of `args`: these are settings, applied by the framework

Function = Callable[..., Any]


class SampleEnded(Exception):
    """A sample ended while the function generated it."""


@dataclass(frozen=True)
class CallSettings:
    """What all calls of a function have in common."""

    generate: Function  # generates a sample, as slime's generate functions do
    model: ServedModel
    config: RolloutConfig
    group_rm: bool  # the grader grades whole groups
    sees_rewards: bool  # whether generate_and_rm grades; otherwise the grader does it after the call


def cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel all tasks of a loop."""
    for task in asyncio.all_tasks(loop):
        task.cancel()


class Call:
    """One call of the function: its groups, and what its thread asks of the engines."""

    def __init__(
        self,
        settings: CallSettings,
        groups: list[PromptGroup],
        loop: asyncio.AbstractEventLoop,
        portal: BlockingPortal,
        samples: TaskGroup,
    ) -> None:
        self.groups, self.loop = groups, loop
        self.is_over = self.has_returned = False
        self._settings, self._portal, self._samples = settings, portal, samples
        self._held = [
            _HeldSample(number, index, group)
            for number, group in enumerate(groups)
            for index in range(group.num_samples)
        ]
        self._of_id = {id_of(held.sample): held for held in self._held}
        self.refused: Exception | None = None  # what the function did that no call can do
        handed_out = [[each.sample for each in self._held if each.group is group] for group in groups]
        self.buffer = DataBuffer(handed_out, self._refuse)
        task, config = groups[0].task, settings.config
        self.tokenizer, self.sampling_params = Tokenizer(settings.model), params_of(task.sampling)
        self.args = Args(
            **args_of(settings.model, task.sampling, max(each.context_len for each in self._held)),
            rollout_batch_size=min(config.rollout_batch_size, len(groups)),
            over_sampling_batch_size=min(over_sampling_batch_size(config), len(groups)),
            n_samples_per_prompt=groups[0].num_samples,
            rollout_global_dataset=True,
            rollout_skip_special_tokens=task.sampling.skip_special_tokens,
            rollout_seed=config.seed,
            group_rm=settings.group_rm,
            sglang_server_concurrency=len(self._held),
            mask_offpolicy_in_partial_rollout=False,
            **dict.fromkeys(NOT_SET),
        )

    # In the thread of the call

    def close(self) -> None:
        """End the call: its function gets nothing more."""
        self.is_over = True
        self.buffer.close()

    def cancel(self) -> None:
        """End the function at its next wait."""
        self.close()
        self.loop.call_soon_threadsafe(self._cancel_tasks)

    def _cancel_tasks(self) -> None:
        if not self.has_returned:
            cancel_all(self.loop)

    def _refuse(self, error: Exception) -> None:
        self.refused = self.refused or error
        self.cancel()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end."""
        if self.is_over:
            raise RuntimeError(f"run: the call of the rollout function is over: {PAGE}")
        return self.loop.run_until_complete(coroutine)

    async def generate(self, args: Any, sample: Any, sampling_params: Mapping[str, Any], *, evaluation: bool) -> Any:
        """Generate a sample with the generate function of the recipe, and grade it."""
        held = self._find(sample)
        if sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
            return sample
        held.is_generated = True
        own = Args(**vars(args) | dict.fromkeys(CONTEXT_LENS, held.context_len))
        router, function = _SampleRouter(self, held), self._settings.generate
        more = {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
        token = router_of_function.set(router)
        try:
            returned = await function(own, sample, dict(sampling_params), **more)
            if self._settings.sees_rewards:
                await _grade(router, flat([returned]))
        except Exception as error:  # noqa: BLE001 - of the user's function, or because the sample ended
            held.reason = f"generate: {shown_error(error)}"
            sample.status, returned = Sample.Status.FAILED, sample
        finally:
            router_of_function.reset(token)
        return returned

    async def evaluate(self, args: Any) -> RolloutFnEvalOutput:
        """Generate and grade all samples of an evaluation."""
        own = [self.generate(args, each.sample, self.sampling_params, evaluation=True) for each in self._held]
        samples = flat(await asyncio.gather(*own))
        rewards = [each.reward for each in samples]
        truncated = [each.status is Sample.Status.TRUNCATED for each in samples]
        found = {"rewards": rewards, "truncated": truncated, "samples": samples}
        return RolloutFnEvalOutput({self.groups[0].task.eval_set or "": found})

    async def answer(self, payload: Any) -> dict[str, Any]:
        """Answer a request that the function posts itself. Its prompt tells of which sample it is."""
        return await self.ask(None, "answer", payload)

    async def grade(self, sample: Any) -> float:
        """Return the reward of a sample, from the grader of its row."""
        return await self.ask(self._find(sample), "grade", sample)

    async def ask(self, held: "_HeldSample | None", name: str, argument: Any) -> Any:
        """Let the router of a sample answer in the event loop of the actor. None: the request tells of which."""
        return await asyncio.wrap_future(self._portal.start_task_soon(self._ask, held, name, argument))

    # In the event loop of the actor

    async def _ask(self, held: "_HeldSample | None", name: str, argument: Any) -> Any:
        if held is None:
            held = self._held_of(argument)
        elif name == "grade":
            held = self._posted(held, argument) or held
        if not held.is_begun:
            held.is_begun = True
            self._samples.start_soon(held.run)
        await held.opened.wait()
        return await held.ask(name, argument)

    def _held_of(self, payload: Any) -> "_HeldSample":
        """Return the sample of a request that the function posts itself.

        Raises:
            ValueError: it is of none.
        """
        fields = cast("dict[str, Any]", payload) if isinstance(payload, dict) else {}
        request = cast("str | list[int] | None", fields.get("input_ids") or fields.get("text"))
        if isinstance(request, str | list):
            for held in self._held:
                if held.is_posted and held.router is not None and held.router.continues(request):
                    return held
            for held in self._held:
                if not (held.is_posted or held.is_generated) and request in (held.sample.prompt, held.prompt_ids):
                    held.is_posted = True
                    return held
        raise ValueError(
            "post: the prompt is not that of a sample of this call which is not generated yet, and continues none; "
            f"for another prompt, let generate_and_rm call a generate function: {PAGE}"
        )

    def settle(self, returned: Any) -> None:
        """Give each sample what the function returned of it. Those that it left out fail.

        Raises:
            TypeError, ValueError: it returned something else than groups of samples of this call.
        """
        for samples in samples_in(returned):
            held = self._find(samples[0])
            held = self._posted(held, samples[0]) or held
            if held.returned is not None:
                raise ValueError(f"the function returned sample {samples[0].index} of its call twice")
            held.returned = samples
        for held in self._held:
            if held.is_begun:
                held.done.set()
            elif held.reason:
                held.group.give_up(held.index, f"{KEY}: {held.reason}")
            else:
                held.group.leave_out(held.index, f"{KEY}: {LEFT_OUT}")

    def _posted(self, held: "_HeldSample", sample: Any) -> "_HeldSample | None":
        """Return the sample of the group whose turns the function posted itself, if it has these tokens."""
        if held.is_generated:
            return None
        tokens = [int(token) for token in sample.tokens]
        same = [each for each in self._held if each.group is held.group and each.is_posted and each.returned is None]
        return next((each for each in same if each.router is not None and each.router.holds(tokens)), None)

    def _find(self, sample: Any) -> "_HeldSample":
        held = self._of_id.get(id_of(sample)) if isinstance(sample, Sample) else None
        if held is None:
            raise ValueError(f"{sample!r:.100} is not a sample that get_samples handed out in this call: {PAGE}")
        return held


class _SampleRouter:
    """Answers what the generate function of one sample posts."""

    def __init__(self, call: Call, held: "_HeldSample") -> None:
        self.tokenizer, self.sampling_params = call.tokenizer, call.sampling_params
        self._call, self._held = call, held

    async def answer(self, payload: Any) -> dict[str, Any]:
        """Answer a request to `/generate`."""
        return await self._call.ask(self._held, "answer", payload)

    async def grade(self, sample: Any) -> float:
        """Return the reward of a sample, from the grader of its row."""
        return await self._call.ask(self._held, "grade", sample)


async def _grade(router: _SampleRouter, samples: Sequence[Sample]) -> None:
    """Set the rewards that are missing. What the grader does not grade is graded again at the end, by its rules."""
    if any(each.status is Sample.Status.ABORTED for each in samples):
        return
    for each in samples:
        if each.reward is None and each.status is not Sample.Status.FAILED:
            with contextlib.suppress(ValueError):
                each.reward = await router.grade(each)


class _HeldSample:
    """A sample whose conversation stays open until the function returns."""

    def __init__(self, number: int, index: int, group: PromptGroup) -> None:
        self.group, self.index = group, index
        self.prompt_ids = group.task.prompt.prompt_ids.tolist()
        self.context_len = len(self.prompt_ids) + group.task.sampling.max_new_tokens
        self.sample = Sample(
            group_index=group.task.group_id,
            index=number * group.num_samples + index,
            prompt=group.prompt,
            label=group.label,
            metadata=dict(group.metadata),
        )
        self.is_begun = self.is_generated = self.is_posted = False
        self.opened, self.done = anyio.Event(), anyio.Event()
        self.router: EngineRouter | None = None
        self.returned: list[Sample] | None = None
        self.reason = ""  # why it failed, if the function did not say so itself
        self._tasks: TaskGroup | None = None
        self._error: Exception | None = None

    async def run(self) -> None:
        """Generate the sample; returns once it has ended, after the function."""
        try:
            await self.group.sample(self.index, self._hold)
        except ValueError as error:
            self.group.fail(error)
        finally:
            self.opened.set()

    async def ask(self, name: str, argument: Any) -> Any:
        """Let the router answer, as part of the conversation."""
        if self._tasks is None or self.router is None:
            raise SampleEnded(self.reason or "the sample has ended")
        request = _Request()
        self._tasks.start_soon(self._serve, request, name, argument)
        await request.ended.wait()
        if request.error is not None:
            raise request.error
        return request.answer

    async def _hold(self, conversation: Conversation) -> None:
        if self.router is not None:  # the function has gone on, and cannot begin again
            conversation.end("failed", "the function did something else when it ran again")
            return
        self.router = EngineRouter(conversation)
        try:
            with conversation.kept_open(), self.group.resting():
                async with anyio.create_task_group() as self._tasks:
                    self.opened.set()
                    await self.done.wait()
                    self._tasks.cancel_scope.cancel()
        finally:
            self._tasks = None
        if self._error is not None:
            raise self._error
        if self.returned is None:
            conversation.end("failed", self.reason or LEFT_OUT)
        elif self.reason and all(each.status is Sample.Status.FAILED for each in self.returned):
            conversation.end("failed", self.reason)
        else:
            settle(conversation, self.router, self.returned)

    async def _serve(self, request: "_Request", name: str, argument: Any) -> None:
        answer = cast("Callable[[Any], Awaitable[Any]]", getattr(self.router, name))
        try:
            if name == "answer":
                async with self.group.working():
                    request.answer = await answer(argument)
            else:
                with self.group.waiting():
                    request.answer = await answer(argument)
        except (BusError, EngineError) as error:  # of this project: the group's to handle
            request.error = self._error = error
            self.done.set()
        except Exception as error:  # noqa: BLE001 - the function that posted gets it
            request.error = error
        except BaseException:
            request.error = SampleEnded("the sample has ended")
            raise
        finally:
            request.ended.set()


class _Request:
    def __init__(self) -> None:
        self.answer: Any = None
        self.error: Exception | None = None
        self.ended = anyio.Event()
