"""Tries users' graders without a run: at each start on one row per data source, and for bin/try on given samples."""

import resource
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import anyio
import msgspec

from actors.reward.graders.builtin import INSTRUCTIONS, find_grader
from actors.reward.graders.calling import grade_of
from actors.reward.graders.code.running import NOT_ISOLATED
from actors.reward.graders.instructions.package import add_data
from actors.reward.grades import MAX_FRAME_BYTES, Grade, Graded, GraderSpec, Hello
from actors.reward.gradings import summed
from actors.reward.judging.keys import KeyProblem, remote_variables
from actors.reward.pool import PoolSettings, open_pool
from actors.reward.process import GraderProcess, GraderProcessError, GraderUnusableError
from actors.reward.recipe import graders_of, named_graders
from actors.reward.samples import GradedSample, Turn
from actors.reward.sandbox import sandbox_of
from actors.reward.trial_answers import answers_to, failure_of, is_own_failure, place_of
from messages import Prompt
from runtime.data.dumps import DumpedGroup
from runtime.functions.child import START_S, UserProcessError
from runtime.functions.frames import FrameError, framed
from runtime.functions.load import is_plugin
from runtime.functions.sandbox import Sandbox
from runtime.node.checks.context import CheckContext, SourceRows
from runtime.process.actor import InputError
from runtime.settings.reading.config import Problem
from runtime.settings.rules.graders import REMOTE_RM, unmet_need
from runtime.settings.tables.reward import RewardConfig, SampleField
from runtime.settings.topology import (
    Topology,
    answers_are_recorded,
    judge_pools,
    own_graders,
    sample_fields,
    takes_list,
)
from runtime.util.errors import flatten

if TYPE_CHECKING:
    from actors.reward.judging.judges import Judges

SLACK_S = 10.0  # time for a process to end
PROGRAMS: Final = {"code": "pass", "boxed_code": r"\boxed{pass}"}  # responses whose grading runs a program, by grader
EMPTY: Final[Mapping[SampleField, tuple[str, Any]]] = {  # fields of an empty answer
    "prompt_ids": ("packed_prompt_ids", b""),
    "tokens": ("packed_tokens", b""),
    "log_probs": ("packed_log_probs", b""),
    "turns": ("turn_spans", ()),
}


def label_problem(source: SourceRows, prompts: Sequence[Prompt], reward: RewardConfig) -> Problem | None:
    """Problem of the first prompt whose built-in grader does not exist, or cannot compare with its label.

    Also of one whose built-in grader returns a dict without the reward that `reward.reward_key` names.
    """
    known = named_graders(reward)
    for prompt in prompts:
        for name in reward.sums.get(prompt.rm_type or "", (prompt.rm_type,)):
            if name is None or name in known or is_plugin(name):
                continue
            if (problem := _problem_of_label(source, prompt, name, reward)) is not None:
                return problem
    return None


def _problem_of_label(source: SourceRows, prompt: Prompt, name: str, reward: RewardConfig) -> Problem | None:
    """Problem of one prompt with one built-in grader."""
    try:
        grader = find_grader(name)
    except ValueError as error:
        return Problem.of(source.place_key, source.place, f"row {prompt.row}: {error}")
    if (need := unmet_need(name, reward)) is not None:
        return Problem.of(source.place_key, source.place, f"row {prompt.row}: the grader {name} {need}")
    if name == REMOTE_RM:
        return None
    if name in INSTRUCTIONS and reward.nltk_data is not None:
        add_data(reward.nltk_data)
    try:
        answer = grader(GradedSample(prompt=prompt.text, label=prompt.label, metadata=prompt.metadata))
    except ValueError as error:
        if name in INSTRUCTIONS:
            return Problem(key=f"{source.key}.metadata_key", message=f"row {prompt.row} of {source.place}: {error}")
        if prompt.label is None:
            wrong = f"has no label to compare with, which the grader {name} needs"
        else:
            wrong = f"has a label that the grader {name} cannot compare with: {error}"
        message = f"row {prompt.row} of {source.place} {wrong}"
        return Problem(key=f"{source.key}.label_key", message=message)
    if (error := grade_of(answer, reward.reward_key).error) is not None:
        return Problem.of("reward.reward_key", reward.reward_key, f"the grader {name} of {source.place} {error}")
    return None


class SampleRow(NamedTuple):
    """A row of a data source, on which its grader is tried."""

    prompt: Prompt
    group: bool  # whether its grader takes whole groups
    others: tuple[Prompt, ...] = ()  # further rows, on which the grader is tried if it fails on the first


def check_rows(context: CheckContext, sources: Iterable[SourceRows]) -> Iterator[Problem]:
    """Try users' graders on a row of each source, if the settings of rewards are usable."""
    group = context.topology.reward.group_rm
    rows = {
        source.key: SampleRow(source.first, group and source.key.startswith("data"), tuple(source.others))
        for source in sources
        if source.first is not None and not context.has(f"{source.key}.rm_type")
    }
    is_usable = not any(problem.key.startswith("reward.") for problem in context.problems)
    if is_usable and not answers_are_recorded(context.topology):
        yield from check_graders(context, rows)


def check_graders(context: CheckContext, rows: Mapping[str, SampleRow]) -> Iterator[Problem]:
    """Call users' graders once per data source, and `code` with a program that does nothing.

    A failure adds only a note, since other responses may be gradable, unless further rows and answers fail in the same
    way by the function's own doing.

    Args:
        context: of the pre-start checks; receives activities and notes.
        rows: a row each, by the settings key of their data source ("data.0"). Rows with other built-in graders are
            skipped: another check tries every row on those.

    Yields:
        A problem if a grader process does not start, this machine cannot isolate a program within one, or a grader
        fails on every row and answer in the same way.
    """
    topology = context.topology
    names, sums = own_graders(topology), topology.reward.sums
    tried = [(key, row, part) for key, row in rows.items() for part in sums.get(row.prompt.rm_type or "", (None,))]
    loaded = graders_of(topology)  # by the first process, as by those of a run; each further one loads only its grader
    for key, row, part in tried:
        rm_type = part or row.prompt.rm_type
        name = names.get(rm_type or "", "")
        if program := PROGRAMS.get(name or rm_type or "", ""):
            name = name or rm_type or ""
        elif not is_plugin(name) or topology.reward.judges:  # the function may call a judge, which does not run yet
            continue
        limit_s = START_S + 2 * topology.reward.timeout_s + SLACK_S
        answer = "a program" if program else "an empty answer"
        context.doing(f"{key}.rm_type", name, f"grading {answer}", limit_s=limit_s)
        try:
            group = row.group or (takes_list(topology.reward, rm_type) and not topology.reward.group_rm)
            spec = GraderSpec(name=name, group=group)
            failure = anyio.run(_failure_of, topology, spec, row, program, loaded or (spec,))
            loaded = ()
        except GraderProcessError as refusal:
            yield Problem.of(f"{key}.rm_type", name, f"a grader process does not start with this grader: {refusal}")
            return
        if failure is not None and NOT_ISOLATED in failure.error:
            yield Problem.of(f"{key}.rm_type", name, f"{failure.error}; allowed: another grader, or a machine that can")
            return
        if failure is not None and failure.is_certain:
            yield Problem.of(f"{key}.rm_type", name, failure.refusal)
        elif failure is not None:
            failed = f"the grader {name} failed on row {row.prompt.row} with {answer}: {failure}"
            context.notes.append(f"{key}.rm_type: {failed}")


class Failure(NamedTuple):
    """A grader failed on a sample that the check made."""

    error: str
    place: str = ""  # file and line
    rows: tuple[int, ...] = ()  # those that fail in the same way, whatever the answer; empty: not all that were tried

    @property
    def is_certain(self) -> bool:
        """Whether the grader fails on everything that was tried."""
        return bool(self.rows)

    @property
    def refusal(self) -> str:
        """Why a start is refused, and what to do."""
        return (
            f"it cannot grade any sample: {self}. It failed in this way on row{'s' if self.rows[1:] else ''} "
            f"{', '.join(map(str, self.rows))} with every answer tried. Return a reward, also for answers that it "
            "cannot read, or set a reward for such failures in reward.failures"
        )

    def __str__(self) -> str:
        return f"{self.error} ({self.place})" if self.place else self.error


async def _failure_of(
    topology: Topology, spec: GraderSpec, row: SampleRow, response: str, loaded: tuple[GraderSpec, ...]
) -> Failure | None:
    """Grade a response to a row in a process that loads these graders; return the failure, or None if it succeeds.

    Raises:
        GraderProcessError: the grader process does not start.
    """
    config = topology.reward
    hello = Hello(graders=loaded, reward_key=config.reward_key, cpu_s=config.cpu_s or 2 * config.timeout_s)
    process = await GraderProcess.start(hello, sandbox_of(topology))
    try:
        async with process.forwarding():
            return await _tried(process, topology, spec, row, response)
    except (UserProcessError, FrameError) as error:
        return Failure(str(error))
    finally:
        await process.kill()


async def _tried(
    process: GraderProcess, topology: Topology, spec: GraderSpec, row: SampleRow, response: str
) -> Failure | None:
    """Grade a response to a row, and if that fails by the grader's own doing, further rows and answers."""
    timeout_s, grades = topology.reward.timeout_s, list[Graded]()
    with anyio.move_on_after(timeout_s):
        grades = await _grades(process, spec, _samples(topology, row, row.prompt, (response,)))
    if not grades:
        return Failure(f"no grade within {timeout_s:g} s (reward.timeout_s)")
    failed = next((graded for graded in grades if graded.error is not None), None)
    if failed is None or failed.error is None:
        return None
    first = Failure(failed.error, place_of(failed, spec) if is_plugin(spec.name) else "")
    if not is_plugin(spec.name) or not is_own_failure(failed, topology):
        return first
    expected, prompts = failure_of([failed], topology), (row.prompt, *row.others)
    with anyio.move_on_after(timeout_s):
        for prompt in prompts:
            samples = _samples(topology, row, prompt, answers_to(prompt))
            if failure_of(await _grades(process, spec, samples), topology) != expected:
                return first
        return first._replace(rows=tuple(prompt.row for prompt in prompts))
    return first


async def _grades(process: GraderProcess, spec: GraderSpec, samples: tuple[GradedSample, ...]) -> list[Graded]:
    await process.send(framed(msgspec.msgpack.encode(Grade(grader=spec, samples=samples)), MAX_FRAME_BYTES))
    await process.receive(len(samples))
    return process.take(len(samples))


def _samples(topology: Topology, row: SampleRow, prompt: Prompt, answers: Sequence[str]) -> tuple[GradedSample, ...]:
    """The samples with these answers to a prompt; of a prompt group as many as in the run."""
    config = topology.reward
    number = topology.rollout.n_samples_per_prompt if row.group else len(answers)
    fields: dict[str, Any] = {EMPTY[field][0]: EMPTY[field][1] for field in sample_fields(config)}
    fields |= {"prompt": prompt.text, "label": prompt.label, "metadata": prompt.metadata, "per": config.per}
    return tuple(
        GradedSample(index=index, response=answer, response_len=len(answer), **fields)
        for index, answer in enumerate(islice(cycle(answers), number))
    )


def graded_sample(group: DumpedGroup, place: int) -> GradedSample:
    """Return a sample of a dump as a grader sees it, with all fields of `reward.sample_fields`."""
    sample, tokens, log_probs, turns = group.samples[place], bytearray(), bytearray(), list[Turn]()
    for segment in group.segments[place]:
        num_input = len(segment.prompt_ids) if turns else 0  # the first input is the prompt
        tokens += segment.prompt_ids.tobytes() if num_input else b""
        log_probs += bytes(4 * num_input)
        start = len(tokens) // 4
        tokens += segment.response_ids.tobytes()
        log_probs += segment.rollout_log_probs.tobytes()
        turn = Turn(start=start, end=start + len(segment.response_ids), text=segment.text)
        if turns and not num_input:  # the segment continues a turn
            turn = Turn(start=turns[-1].start, end=turn.end, text=turns.pop().text + turn.text)
        turns.append(turn)
    return GradedSample(
        index=sample.index,
        part=sample.part,
        prompt=sample.prompt,
        response=sample.response,
        status=str(sample.status),
        response_len=sample.response_len,
        label=sample.label,
        metadata=sample.metadata,
        sample_metadata=sample.sample_metadata,
        packed_prompt_ids=group.segments[place][0].prompt_ids.tobytes() if group.segments[place] else b"",
        packed_tokens=bytes(tokens),
        packed_log_probs=bytes(log_probs),
        turn_spans=tuple(turns),
    )


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The grades of samples, and the memory that they took."""

    grades: tuple[Graded, ...]  # one per sample, in order
    peak_bytes: int  # most memory of one process


async def try_grader(
    name: str, samples: Sequence[GradedSample], *, group: bool = False, topology: Topology | None = None
) -> Trial:
    """Grade samples in one grader process.

    Args:
        name: a built-in grader, "module:function", "path/file.py:function", or a grader, sum or judge of the topology.
        samples: the samples.
        group: call the function once, with all samples as one prompt group.
        topology: whose graders, judges, sandbox, limits and reward key apply; none: the defaults.

    Raises:
        GraderUnusableError: the grader cannot be used; says why.
        GraderStartError: the process did not start.
    """
    try:
        async with open_grader(name, topology, group=group) as grade:
            grades = await grade(samples)
    except ExceptionGroup as errors:
        raise flatten(errors)[0] from errors
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return Trial(grades=tuple(grades), peak_bytes=peak_kib << 10)


@asynccontextmanager
async def open_grader(
    name: str, topology: Topology | None = None, *, group: bool = False
) -> AsyncGenerator[Callable[[Sequence[GradedSample]], Awaitable[list[Graded]]]]:
    """Start one grader process; yield what grades samples in it. Raises as `try_grader` does, perhaps in a group."""
    config = RewardConfig() if topology is None else topology.reward
    weights = config.sums.get(name)
    specs = {part: _spec_of(part, config, group=group) for part in weights or (name,)}
    hello = Hello(
        graders=tuple(dict.fromkeys(specs.values())),
        reward_key=config.reward_key,
        cpu_s=config.cpu_s or 2 * config.timeout_s,
    )
    async with _open_judges(topology, specs) as judges:
        sandbox = _sandbox_with_server(topology)
        sandbox = msgspec.structs.replace(sandbox, also={**sandbox.also, **(judges.env if judges else {})})
        settings = PoolSettings(hello=hello, sandbox=sandbox, num_processes=1, timeout_s=config.timeout_s, max_tries=1)
        async with open_pool(settings) as pool:

            async def grade(samples: Sequence[GradedSample]) -> list[Graded]:
                shown = [msgspec.structs.replace(sample, per=config.per) for sample in samples]

                async def grade_by(part: str) -> list[Graded]:
                    if judges is not None and part in judges:
                        return await judges.grade(part, shown, pool)
                    return await pool.grade(specs[part], shown)

                return await (grade_by(name) if weights is None else summed(name, weights, grade_by))

            yield grade


def _spec_of(name: str, config: RewardConfig, *, group: bool) -> GraderSpec:
    """Return what a grader process loads for a name: the function that a topology calls so, or a judge's parser.

    Raises:
        GraderUnusableError: only a run can ask this grader.
    """
    if name in config.external:
        raise GraderUnusableError(f"{name} is the grader of external workers (reward.external), which need a run")
    if name in config.judges:
        return GraderSpec(name=config.judges[name].parser, parses=True)
    return GraderSpec(name=config.graders.get(name, name), group=group)


@asynccontextmanager
async def _open_judges(topology: Topology | None, names: Iterable[str]) -> AsyncGenerator["Judges | None"]:
    """Open the judges of a topology without a run, for these graders and for functions that call a judge.

    Raises:
        GraderUnusableError: a judge among the graders needs a run, or an API key cannot be read.
    """
    if topology is None or not topology.reward.judges:
        yield None
        return
    from actors.reward.judging.judges import answers_without_a_run, open_judges  # imports an HTTP client

    for name in names:
        if name in topology.reward.judges and not answers_without_a_run(topology, name):
            pool = f"engines.{judge_pools(topology)[name]}"
            remedy = f"name engines that run already, such as --set {pool}.urls='[\"http://127.0.0.1:30000\"]'"
            raise GraderUnusableError(f"the judge {name} has its engines in a run alone ({pool}): {remedy}")
    try:
        async with open_judges(topology, None) as judges:
            yield judges
    except* InputError as errors:
        raise GraderUnusableError(str(flatten(errors)[0])) from None


def _sandbox_with_server(topology: Topology | None) -> Sandbox:
    """The sandbox of a run's graders, whose processes know the server of `remote_rm`."""
    if topology is None:
        return Sandbox()
    sandbox = sandbox_of(topology)
    try:
        named = remote_variables(topology.reward)
    except KeyProblem as error:
        raise GraderUnusableError(f"reward.{error.setting} = {error.value!r}: {error}") from error
    return msgspec.structs.replace(sandbox, also={**sandbox.also, **named})
