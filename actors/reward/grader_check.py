"""Tries users' graders without a run: at each start on one row per data source, and for bin/try on given samples."""

import resource
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import anyio
import msgspec

from actors.reward.frames import FrameError, Grade, Graded, GraderSpec, Hello, encode_frame
from actors.reward.graders.code.running import NOT_ISOLATED
from actors.reward.judging.keys import KeyProblem, remote_variables
from actors.reward.pool import PoolSettings, open_pool
from actors.reward.process import START_TIMEOUT_S, GraderProcess, GraderProcessError, GraderUnusableError
from actors.reward.recipe import graders_of
from actors.reward.samples import GradedSample, Turn
from actors.reward.sandbox import Sandbox, sandbox_of
from messages import Prompt
from runtime.bus.background import in_background
from runtime.data.dumps import DumpedGroup
from runtime.node.checks.apart import Doing
from runtime.settings.plugins import is_plugin
from runtime.settings.reading.config import Problem
from runtime.settings.tables.reward import RewardConfig, SampleField
from runtime.settings.topology import Topology, own_graders, sample_fields, takes_list

SLACK_S = 10.0  # time for a process to end
PROGRAMS: Final = {"code": "pass", "boxed_code": r"\boxed{pass}"}  # responses whose grading runs a program, by grader
EMPTY: Final[Mapping[SampleField, tuple[str, Any]]] = {  # fields of an empty answer
    "prompt_ids": ("packed_prompt_ids", b""),
    "tokens": ("packed_tokens", b""),
    "log_probs": ("packed_log_probs", b""),
    "turns": ("turn_spans", ()),
}


class SampleRow(NamedTuple):
    """One row of a data source, on which its grader is tried."""

    prompt: Prompt
    group: bool  # whether its grader takes whole groups


def check_graders(
    topology: Topology, rows: Mapping[str, SampleRow], doing: Doing, notes: list[str]
) -> Iterator[Problem]:
    """Call users' graders once per data source, and `code` with a program that does nothing.

    A failure adds only a note, since other responses may be gradable.

    Args:
        topology: names the graders and configures their sandbox.
        rows: one row each, by the settings key of their data source ("data.0"). Rows with other built-in graders are
            skipped: another check tries every row on those.
        doing: called before each call with the key, the value and a description.
        notes: list that receives the notes.

    Yields:
        A problem if a grader process does not start, or this machine cannot isolate a program within one.
    """
    names = own_graders(topology)
    sums = topology.reward.sums
    tried = [(key, row, part) for key, row in rows.items() for part in sums.get(row.prompt.rm_type or "", (None,))]
    loaded = graders_of(topology)  # by the first process, as by those of a run; each further one loads only its grader
    for key, row, part in tried:
        rm_type = part or row.prompt.rm_type
        name = names.get(rm_type or "", "")
        if program := PROGRAMS.get(name or rm_type or "", ""):
            name = name or rm_type or ""
        elif not is_plugin(name) or topology.reward.judges:  # the function may call a judge, which does not run yet
            continue
        limit_s = START_TIMEOUT_S + topology.reward.timeout_s + SLACK_S
        doing(f"{key}.rm_type", name, f"grading {'a program' if program else 'an empty answer'}", limit_s=limit_s)
        try:
            group = row.group or (takes_list(topology.reward, rm_type) and not topology.reward.group_rm)
            spec = GraderSpec(name=name, group=group)
            error = anyio.run(_error_of, topology, spec, row, program, loaded or (spec,))
            loaded = ()
        except GraderProcessError as refusal:
            yield Problem.of(f"{key}.rm_type", name, f"a grader process does not start with this grader: {refusal}")
            return
        if error is not None and NOT_ISOLATED in error:
            yield Problem.of(f"{key}.rm_type", name, f"{error}; allowed: another grader, or a machine that can")
            return
        if error is not None:
            answer = "a program" if program else "an empty answer"
            notes.append(f"{key}.rm_type: the grader {name} failed on row {row.prompt.row} with {answer}: {error}")


async def _error_of(
    topology: Topology, spec: GraderSpec, row: SampleRow, response: str, loaded: tuple[GraderSpec, ...]
) -> str | None:
    """Grade a response to a row in a process that loads these graders; return the error, or None if it succeeds.

    Raises:
        GraderProcessError: the grader process does not start.
    """
    config, prompt = topology.reward, row.prompt
    hello = Hello(graders=loaded, reward_key=config.reward_key, cpu_s=config.cpu_s or 2 * config.timeout_s)
    number = topology.rollout.n_samples_per_prompt if row.group else 1
    fields: dict[str, Any] = {EMPTY[field][0]: EMPTY[field][1] for field in sample_fields(config)}
    fields |= {"prompt": prompt.text, "label": prompt.label, "metadata": prompt.metadata, "per": config.per}
    fields["response"] = response
    samples = tuple(GradedSample(index=index, **fields) for index in range(number))
    process = await GraderProcess.start(hello, sandbox_of(topology))
    try:
        with anyio.move_on_after(config.timeout_s):
            async with in_background(process.show_printed):
                await process.send(encode_frame(Grade(grader=spec, samples=samples)))
                await process.receive(number)
        grades = process.take(process.num_received)
    except (GraderProcessError, FrameError) as error:
        return str(error)
    finally:
        await process.kill()
    if len(grades) < number:
        return f"no grade within {config.timeout_s:g} s (reward.timeout_s)"
    return next((graded.error for graded in grades if graded.error is not None), None)


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
    function: str, samples: Sequence[GradedSample], *, group: bool = False, topology: Topology | None = None
) -> Trial:
    """Grade samples in one grader process.

    Args:
        function: a built-in grader, "module:function" or "path/file.py:function".
        samples: the samples.
        group: call the function once, with all samples as one prompt group.
        topology: whose sandbox, limits and reward key apply; none: the defaults.

    Raises:
        GraderUnusableError: the function cannot be used; says why.
        GraderStartError: the process did not start.
    """
    spec = GraderSpec(name=function, group=group)
    async with open_grader(spec, topology) as grade:
        grades = await grade(samples)
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return Trial(grades=tuple(grades), peak_bytes=peak_kib << 10)


@asynccontextmanager
async def open_grader(
    spec: GraderSpec, topology: Topology | None = None
) -> AsyncGenerator[Callable[[Sequence[GradedSample]], Awaitable[list[Graded]]]]:
    """Start one grader process; yield what grades samples in it. Raises as `try_grader` does."""
    config = RewardConfig() if topology is None else topology.reward
    hello = Hello(graders=(spec,), reward_key=config.reward_key, cpu_s=config.cpu_s or 2 * config.timeout_s)
    settings = PoolSettings(
        hello=hello,
        sandbox=_sandbox_with_server(topology),
        num_processes=1,
        timeout_s=config.timeout_s,
        max_tries=1,
    )
    async with open_pool(settings) as pool:

        async def grade(samples: Sequence[GradedSample]) -> list[Graded]:
            return await pool.grade(spec, [msgspec.structs.replace(sample, per=config.per) for sample in samples])

        yield grade


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
