"""Runs a user's rollout or evaluation function without a run, against a tiny engine of its own. For bin/try."""

import resource
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import aiohttp
import anyio
import msgspec

from actors.rollout.samples.conversation import FunctionRaised, GenerateFunction
from actors.rollout.samples.evaluation_function import SetEvaluation
from actors.rollout.samples.generate_function import KEY as GENERATE_KEY
from actors.rollout.samples.generate_function import KeyedFunction
from actors.rollout.samples.rollout_function import KEY as ROLLOUT_KEY
from actors.rollout.samples.rollout_function import PromptGroup, RolloutCalls, one_turn, rollout_function_of
from actors.rollout.samples.sample import OpenSample, fresh_samples
from actors.rollout.samples.slots import GroupSlots, Slots
from actors.rollout.samples.tasks import GroupTask
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineError
from actors.rollout.sglang.served_model import ServedModel
from actors.rollout.trial import GenerateRow, Trial, prompt_of, tiny_engine
from messages import Prompt, SampleStatus
from runtime.bus.background import in_background
from runtime.functions.load import load
from runtime.functions.table import EVALUATION
from runtime.settings.derived import eval_sampling, rollout_sampling, sampling_params
from runtime.settings.topology import Topology
from runtime.util.tracebacks import user_frames, user_traceback

GATHER_S: Final = 0.1  # all groups are there at once
GradeText = Callable[[Prompt, int, str, str], Awaitable[float]]  # of a sample: prompt, index, response, status


@dataclass
class FunctionTrial:
    """What the calls of a function did."""

    prompts: Sequence[Prompt]
    samples: list[list[OpenSample]] = field(default_factory=list[list[OpenSample]])  # by prompt
    left_out: dict[int, set[int]] = field(default_factory=dict[int, set[int]])  # by prompt: indices
    errors: dict[int, str] = field(default_factory=dict[int, str])  # by prompt
    error: str = ""  # of the whole evaluation
    trace: str | None = None  # of the function's own exception
    took_s: float = 0.0
    blocked_s: float = 0.0  # longest time in which nothing else could run
    peak_bytes: int = 0  # of this process


async def try_rollout(rows: Sequence[GenerateRow | Prompt], topology: Topology, grade: GradeText) -> FunctionTrial:
    """Call `rollout.custom_rollout` of a topology for a group of samples of each row.

    Raises:
        PluginError: the function cannot be used.
        EngineNotStartedError: the engine does not serve.
    """
    config = topology.rollout
    default = _first_named((GENERATE_KEY, config.custom_generate))
    number, limit_s = config.n_samples_per_prompt, config.custom_generate_timeout_s
    async with _trying(rows, topology, grade) as (trial, run):
        function = rollout_function_of(topology, run.model)
        calls = RolloutCalls(config.custom_rollout_prompts, limit_s=limit_s, gather_s=GATHER_S)
        slots = Slots(number * len(trial.prompts))
        trial.samples = [fresh_samples(number, prompt.prompt_ids) for prompt in trial.prompts]

        async def run_group(place: int, own: GroupSlots) -> None:
            async def run_sample(sample: OpenSample, generate: GenerateFunction | None) -> None:
                await own.take()
                try:
                    own_function = default if generate is None else KeyedFunction(ROLLOUT_KEY, generate)
                    await run.sample(place, sample, own_function)
                finally:
                    own.give_back()

            task = _task_of(place, trial.prompts[place], topology)
            group = PromptGroup(trial.samples[place], run_sample, slots=own, task=task)
            trial.left_out[place] = group.left_out
            try:
                await calls.run(function, group, 0)
            except (ValueError, EngineError) as error:
                trial.errors[place] = str(error)
                trial.trace = trial.trace or _trace_of(error)

        async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
            for place in range(len(trial.prompts)):
                tasks.start_soon(run_group, place, await stack.enter_async_context(slots.reserve(number)))
    return trial


async def try_evaluation(rows: Sequence[GenerateRow | Prompt], topology: Topology, grade: GradeText) -> FunctionTrial:
    """Call `custom_evaluation` of the first evaluation set of a topology, with the rows as its prompts.

    Raises:
        PluginError: the function cannot be used.
        EngineNotStartedError: the engine does not serve.
    """
    config, key = topology.eval[0], "eval.0.custom_evaluation"
    function = load(EVALUATION, key, config.custom_evaluation or "").function
    of_all = topology.rollout.custom_generate
    default = _first_named(("eval.0.custom_generate", config.custom_generate), (GENERATE_KEY, of_all))
    async with _trying(rows, topology, grade, evaluation=True) as (trial, run):
        trial.samples = [[] for _ in trial.prompts]

        async def run_sample(item: int, sample: OpenSample, generate: GenerateFunction | None) -> None:
            trial.samples[item].append(sample)
            try:
                await run.sample(item, sample, default if generate is None else KeyedFunction(key, generate))
            except ValueError as error:  # it costs this sample alone
                sample.give_up(str(error))
                trial.trace = trial.trace or _trace_of(error)

        evaluation = SetEvaluation(
            config.name,
            trial.prompts,
            run_sample,
            step=0,
            num_samples=config.n_samples_per_eval_prompt,
            key=key,
            limit_s=topology.rollout.custom_generate_timeout_s,
        )
        failed = await evaluation.run(function)
        trial.error, trial.trace = failed, evaluation.traceback or trial.trace
    return trial


def _first_named(*settings: tuple[str, str | None]) -> KeyedFunction:
    """Return the generate function of the first setting that names one; without any, a single turn."""
    for key, name in settings:
        if name is not None:
            return KeyedFunction.of(key, name)
    return KeyedFunction(GENERATE_KEY, one_turn)


class _Samples:
    """Generates and grades samples of the prompts of a trial."""

    def __init__(
        self,
        topology: Topology,
        model: ServedModel,
        prompts: Sequence[Prompt],
        grade: GradeText,
        open_trial: Callable[[], Trial],
        *,
        evaluation: bool,
    ) -> None:
        self.model = model
        self._prompts, self._grade, self._open_trial = prompts, grade, open_trial
        self._evaluation = evaluation
        self._sampling = eval_sampling(topology, topology.eval[0]) if evaluation else rollout_sampling(topology)

    async def sample(self, place: int, sample: OpenSample, own: KeyedFunction) -> None:
        """Generate a sample, and grade it if its function did not."""
        prompt = self._prompts[place]

        async def grade(text: str, other: str | None) -> float:
            return await self._grade(_with_text(prompt, other), sample.index, text, "completed")

        trial = self._open_trial()
        talk = trial.open(prompt, sample, self._sampling, evaluation=self._evaluation, grade=grade, key=own.key)
        status = await talk.run(own.function)
        if status is SampleStatus.FAILED or talk.starts_again:
            sample.give_up(f"{talk.key}: {talk.reason or 'aborted: in a run it starts again'}")
            return
        sample.status = status
        if sample.own_score is not None:
            sample.reward = sample.own_score.reward
            return
        try:
            sample.reward = await self._grade(prompt, sample.index, sample.text, str(sample.status))
        except ValueError as error:
            sample.reason = str(error)


@asynccontextmanager
async def _trying(
    rows: Sequence[GenerateRow | Prompt], topology: Topology, grade: GradeText, *, evaluation: bool = False
) -> AsyncGenerator[tuple[FunctionTrial, _Samples]]:
    """Run a tiny engine, and measure what happens in the block."""
    model = ServedModel.read(Path(topology.model.hf_checkpoint))
    prompts = [prompt_of(row, number, model) for number, row in enumerate(rows)]
    trial = FunctionTrial(prompts)
    async with aiohttp.ClientSession() as session, tiny_engine(topology, SglangClient(session)) as (client, url):
        watched = Trial(topology, model, client, url)
        opened = partial(Trial, topology, model, client, url)  # one for each sample
        samples = _Samples(topology, model, prompts, grade, opened, evaluation=evaluation)
        started = time.monotonic()
        async with in_background(watched.watch_loop):
            yield trial, samples
        trial.took_s, trial.blocked_s = time.monotonic() - started, watched.blocked_s
        trial.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _task_of(place: int, prompt: Prompt, topology: Topology) -> GroupTask:
    sampling = sampling_params(topology.rollout, rollout_sampling(topology), len(prompt.prompt_ids), trains=False)
    return GroupTask(
        source=("try", place),
        group_id=place,
        attempt=0,
        lease="try",
        round=0,
        min_version=0,
        prompt=prompt,
        sampling=sampling,
        store=False,
        group_rm=False,
    )


def _with_text(prompt: Prompt, text: str | None) -> Prompt:
    return prompt if text is None else msgspec.structs.replace(prompt, text=text)


def _trace_of(error: Exception) -> str | None:
    cause = error.__cause__
    return user_traceback(cause) if isinstance(error, FunctionRaised) and cause and user_frames(cause) else None
