"""Call a function of yours as a run does, and print what it gets, returns and costs."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from bin.entry import Screen, WrongInput, ended, override_hint, parser_of
from runtime.functions.table import ALL
from runtime.util.errors import flatten
from runtime.util.exit_codes import EXIT_FAILED, EXIT_OK
from runtime.util.formatting import count_of

if TYPE_CHECKING:
    from actors.buffer.prompts.source_process import SourceSettings
    from actors.reward.grades import Graded
    from actors.reward.samples import GradedSample
    from actors.rollout.group_trials import FunctionTrial
    from actors.rollout.trial import GenerateRow, GenerateTrial
    from messages import Prompt
    from runtime.data.dumps import DumpedGroup
    from runtime.settings.topology import Topology

SHOWN: Final = 200  # characters of a text
BLOCKED_S: Final = 0.5  # seconds without the event loop that are reported
EPILOG = """grader   Grade samples in a grader process, with the sandbox and the limits of a run. FILE has one JSON
         object per line: response, and optionally prompt, label and metadata. DUMP is a directory that
         run.dump_details wrote. The reward of the run is printed too. With --topology the name may be one of
         reward.graders, reward.sums or reward.judges; of a judge with a pool, engines in its urls answer.
generate Generate one sample for each line of FILE, against a tiny engine with the model of --topology. A line is a JSON
         object: prompt (as the model reads it), and optionally label and metadata. Without --on, for the prompts
         that a run of the topology issues first.
rollout  Call a rollout function for a group of samples of each line of FILE, as generate, in calls of
         rollout.custom_rollout_prompts. They are graded by the grader of the first data source.
evaluation
         Call an evaluation function once, with the lines of FILE as the prompts of the first evaluation set. Without
         --on, with those of the set.
filter   Judge the groups of a DUMP. The verdict of the run is printed too.
metrics  Compute metrics of an evaluation set from the samples of a DUMP: each group is a prompt of the set.
source   Call the function with the numbers 0, 1, 2 and so on. A class draws its rows in the process of a
         run, gets outcomes, and draws 100 rows twice, with a kill between, which must be the same.
others   Call the function in its process for each line of FILE, a JSON object: what the function gets.

The command reads only the samples of a dump, and imports no function that the dump names.

exit codes: 0 every call succeeded, 1 a call failed, 2 the function or the samples cannot be used"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args, unknown = _parser().parse_known_args(argv)
    if unknown:
        _parser().error("\n".join([f"unrecognized arguments: {' '.join(unknown)}", *override_hint(unknown)]))
    from actors.reward.process import GraderProcessError
    from actors.rollout.sglang.errors import EngineError
    from runtime.data.columns import DumpError
    from runtime.data.data_files import DataError
    from runtime.functions.load import PluginError
    from runtime.settings.reading.config import TopologyError

    work = _works()[args.kind]
    expected = (TopologyError, DumpError, DataError, PluginError, GraderProcessError, EngineError, ValueError)
    return ended(lambda: _show(work(args)), *expected)


def _works() -> dict[str, Callable[[argparse.Namespace], Iterator[tuple[str, bool]]]]:
    """Return how each kind is tried: those with a process of their own as it is called there, if not otherwise."""
    works = {"grader": _try_grader, "generate": _try_generate, "rollout": _try_groups, "evaluation": _try_groups}
    works |= {"filter": _try_filter, "metrics": _try_metrics, "source": _try_source}
    return {kind.name: _try_calls for kind in ALL if kind.answering} | works


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("try", __doc__, EPILOG)
    parser.add_argument(
        "kind",
        choices=list(_works()),
        metavar="KIND",
        help="What the function is: one of those below, or another kind with a process of its own.",
    )
    parser.add_argument(
        "function", help="MODULE:FUNCTION or FILE.py:FUNCTION; a grader may be a built-in one, or a name of --topology."
    )
    parser.add_argument("--on", type=Path, metavar="FILE|DUMP", help="Samples or prompts. Not for source.")
    parser.add_argument("--limit", type=int, default=8, metavar="N", help="Most samples, groups or rows; 8 by default.")
    parser.add_argument("--group", action="store_true", help="grader: one call per prompt group; a FILE is one group.")
    parser.add_argument("--file", action="append", default=[], metavar="NAME=FILE", help="source: rows for a class.")
    parser.add_argument(
        "--topology",
        type=Path,
        metavar="FILE",
        help="grader: its [reward]; generate, rollout, evaluation: model, sampling, grader.",
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="Override a key of it.")
    return parser


def _show(lines: Iterator[tuple[str, bool]]) -> int:
    """Print lines; return whether all calls succeeded, as an exit code."""
    screen, good = Screen(sys.stdout), True
    for line, succeeded in lines:
        screen.show(line)
        good = good and succeeded
    return EXIT_OK if good else EXIT_FAILED


def _try_grader(args: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    import anyio

    from actors.reward.grader_check import try_grader
    from runtime.settings.load import load_topology

    topology = None if args.topology is None else load_topology(args.topology, args.set).topology
    if args.set and topology is None:
        raise WrongInput("--set needs --topology")
    groups = list(_samples(args))
    shown = set[str | None]()  # tracebacks
    calls = groups if args.group else [[pair for group in groups for pair in group][: args.limit]]
    for pairs in calls:
        samples = [sample for sample, _ in pairs]
        trial = anyio.run(lambda: try_grader(args.function, samples, group=args.group, topology=topology))  # noqa: B023
        for (sample, before), graded in zip(pairs, trial.grades, strict=True):
            yield from _graded(sample, graded, before, trace=graded.trace not in shown)
            shown.add(graded.trace)
        total_s = sum(graded.took_s for graded in trial.grades)
        yield f"{len(samples)} samples in {total_s:.3f} s of the function; at most {trial.peak_bytes >> 20} MiB", True


def _samples(args: argparse.Namespace) -> Iterator[list[tuple["GradedSample", float | None]]]:
    """Yield groups of samples, with the reward that each had in the run."""
    from actors.reward.grader_check import graded_sample
    from actors.reward.samples import GradedSample

    if args.on is None:
        raise WrongInput("--on FILE or --on DUMP is needed")
    if args.on.is_dir():
        for group in _groups(args):
            yield [(graded_sample(group, place), sample.reward) for place, sample in enumerate(group.samples)]
        return
    rows = [_row(args.on, number, line) for number, line in _lines(args.on)]
    yield [
        (GradedSample(index=index, response_len=len(row["response"]), **row), None)
        for index, row in enumerate(rows[: args.limit])
    ]


def _lines(path: Path) -> list[tuple[int, str]]:
    """Read the lines of a file that are not empty, each with its number."""
    try:
        return [(number, line) for number, line in enumerate(path.read_text("utf-8").splitlines(), 1) if line]
    except OSError as error:
        raise WrongInput(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise WrongInput(f"{path}: not text in UTF-8: {error}") from None


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    """Read a line of a file of samples."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise WrongInput(f"{path}:{number}: {error}") from None
    columns = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
    if not isinstance(columns.get("response"), str):
        raise WrongInput(f"{path}:{number}: expected an object with the text `response`; also: prompt, label, metadata")
    return {key: columns[key] for key in ("prompt", "response", "label", "metadata") if key in columns}


def _groups(args: argparse.Namespace) -> Iterator["DumpedGroup"]:
    from itertools import islice

    from runtime.data.dumped_run import DumpedGroups

    if args.on is None or not args.on.is_dir():
        raise WrongInput("--on DUMP is needed: a directory that run.dump_details wrote")
    yield from islice(DumpedGroups(args.on), args.limit)


def _graded(
    sample: "GradedSample", graded: "Graded", before: float | None, *, trace: bool
) -> Iterator[tuple[str, bool]]:
    yield f"sample {sample.index}: label {_short(sample.label)}, response {_short(sample.response)}", True
    was = "" if before is None else f" (in the run {before:g})"
    if graded.error is None:
        details = "" if graded.details is None else f" {_short(graded.details)}"
        yield f"  reward {graded.reward:g}{was} in {graded.took_s:.4f} s{details}", True
        return
    yield f"  failed, {graded.cause}: {graded.error}{was}", False
    yield from ((f"  {line}", False) for line in (graded.trace or "" if trace else "").splitlines())


def _try_generate(args: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    import anyio

    from actors.rollout.trial import try_generate
    from messages import Prompt

    topology, rows = _prompts(args)

    async def trials() -> "list[GenerateTrial]":
        return [trial async for trial in try_generate(args.function, rows, topology)]

    for number, (row, trial) in enumerate(zip(rows, anyio.run(trials), strict=True)):
        yield f"prompt {number}: {_short(row.text if isinstance(row, Prompt) else row.prompt)}", True
        yield from _generated(trial)


def _prompts(args: argparse.Namespace, *overrides: str) -> tuple["Topology", Sequence["GenerateRow | Prompt"]]:
    """Read the topology, and the prompts to try a function on: those of a file, or of the topology's data."""
    from actors.buffer.prompts.source import first_of_evaluation, first_prompts
    from actors.rollout.trial import GenerateRow
    from runtime.settings.load import load_topology

    if args.topology is None or (args.on is not None and args.on.is_dir()):
        raise WrongInput("--topology FILE is needed, and perhaps --on FILE: the model, and a file of prompts")
    topology = load_topology(args.topology, [*args.set, *overrides]).topology
    if args.on is None:
        if args.kind == "evaluation":
            return topology, first_of_evaluation(topology, args.limit)
        if not topology.data:
            raise WrongInput(f"{args.topology}: has no [[data]] table; write one, or give --on FILE with prompts")
        return topology, first_prompts(topology, args.limit)
    rows = [_decoded(args.on, number, line, GenerateRow) for number, line in _lines(args.on)]
    if not rows:
        raise WrongInput(f"{args.on}: holds no prompt; expected a JSON object in each line")
    return topology, rows[: args.limit]


def _try_groups(args: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    """Try a rollout or an evaluation function, which generates several samples of several prompts."""
    import anyio

    from actors.reward.grader_check import open_grader
    from actors.reward.samples import GradedSample
    from actors.rollout.group_trials import try_evaluation, try_rollout
    from runtime.settings.derived import eval_data
    from runtime.settings.load import load_topology

    is_rollout = args.kind == "rollout"
    key = "rollout.custom_rollout" if is_rollout else "eval.0.custom_evaluation"
    if not is_rollout and args.topology is not None and not load_topology(args.topology, args.set).topology.eval:
        raise WrongInput(f"{args.topology}: has no [[eval]] table; write one, whose sampling and grader are used")
    topology, rows = _prompts(args, f"{key}={args.function}")
    data = topology.data[0] if is_rollout else eval_data(topology, topology.eval[0])

    async def trial() -> "FunctionTrial":
        async with open_grader(data.rm_type or "", topology) as grade:

            async def grade_text(prompt: "Prompt", index: int, response: str, status: str) -> float:
                sample = GradedSample(
                    index=index,
                    prompt=prompt.text,
                    response=response,
                    status=status,
                    label=prompt.label,
                    metadata=prompt.metadata,
                )
                (graded,) = await grade([sample])
                if graded.reward is None:
                    raise ValueError(f"no grade: {graded.error}")
                return graded.reward

            return await (try_rollout if is_rollout else try_evaluation)(rows, topology, grade_text)

    try:
        found = anyio.run(trial)
    except ExceptionGroup as errors:
        raise flatten(errors)[0] from errors
    yield from _generated_groups(found)


def _generated_groups(trial: "FunctionTrial") -> Iterator[tuple[str, bool]]:
    for number, (prompt, samples) in enumerate(zip(trial.prompts, trial.samples, strict=True)):
        yield f"prompt {number}: {_short(prompt.text)}", True
        for sample in samples:
            reward = "" if sample.reward is None else f", reward {sample.reward:g}"
            size = f"{sample.buffer.num_tokens} tokens"
            reason = "" if sample.reason is None else f": {sample.reason}"
            good = sample.status != "failed" or sample.index in trial.left_out.get(number, ())
            yield f"  sample {sample.index}: {_short(sample.text)}, {size}, {sample.status}{reward}{reason}", good
        if number in trial.errors:
            yield f"  failed: {trial.errors[number]}", False
    if trial.error:
        yield f"failed: {trial.error}", False
    yield from ((f"  {line}", False) for line in (trial.trace or "").splitlines())
    yield f"{trial.took_s:.3f} s; {trial.peak_bytes >> 20} MiB{_blocked(trial.blocked_s)}", True


def _blocked(blocked_s: float) -> str:
    return f"; it blocked the actor for {blocked_s:.1f} s at a time" if blocked_s >= BLOCKED_S else ""


def _generated(trial: "GenerateTrial") -> Iterator[tuple[str, bool]]:
    for number, (talk, sample) in enumerate(zip(trial.conversations, trial.samples, strict=False)):
        name = "" if len(trial.conversations) == 1 else f"conversation {number}: "
        masked = sum(end - start for start, end in sample.untrained)
        yield f"  {name}{_short(talk.text)}", True
        size = f"{count_of(talk.num_turns, 'turn')}, {count_of(sample.buffer.num_tokens, 'token')}"
        yield f"    {size}; do_not_train: {masked}", True
        if talk.reward is not None:
            yield f"    reward {_number(talk.reward)}{f' {_short(talk.rewards)}' if talk.rewards else ''}", True
        if talk.sample_metadata:
            yield f"    sample_metadata {_short(talk.sample_metadata)}", True
    good = trial.error is None and trial.status != "failed"
    reason = trial.error or trial.reason
    yield f"  {trial.status}{f': {reason}' if reason else ''}", good
    yield from ((f"  {line}", False) for line in (trial.trace or "").splitlines())
    own_s = trial.took_s - trial.engine_s
    cost = f"{trial.peak_bytes >> 20} MiB{_blocked(trial.blocked_s)}"
    yield f"  {trial.took_s:.3f} s, {own_s:.3f} s outside of generate; {cost}", True


def _number(value: object) -> str:
    """A reward as the function set it, which may be anything."""
    return f"{value:g}" if isinstance(value, int | float) else _short(repr(value))


def _decoded(path: Path, number: int, line: str, kind: Any) -> Any:
    """Read a line of a file."""
    import msgspec

    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:
        raise WrongInput(f"{path}:{number}: {error}") from None


def _try_filter(args: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    from actors.filter.filters import FilterError, ReplayedFilter

    judge = ReplayedFilter(args.function)
    for group in _groups(args):
        start = time.perf_counter()
        try:
            verdict = judge.judge(group.completed(), group)
        except FilterError as error:
            yield f"group {group.group_id}: failed: {error}", False
            continue
        took_s, before = time.perf_counter() - start, group.samples[0].verdict
        rewards = ", ".join("-" if sample.reward is None else f"{sample.reward:g}" for sample in group.samples)
        reason = "" if verdict.reason is None else f" ({verdict.reason})"
        was = "" if before is None else f"; in the run {before}"
        yield (
            f"group {group.group_id}: rewards {rewards}: {verdict.outcome}{reason}{was}, {took_s:.4f} s",
            verdict.outcome != "failed",
        )


def _try_metrics(args: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    import anyio

    from actors.buffer.deciding.measuring import EvalSample, MetricsError, try_metrics
    from runtime.functions.child import UserFunctionError, UserProcessError

    names = [name for name in EvalSample.__struct_fields__ if name != "item"]
    samples = [
        EvalSample(item=item, **{name: getattr(sample, name) for name in names})
        for item, group in enumerate(_groups(args))
        for sample in group.samples
    ]
    start = time.perf_counter()
    try:
        metrics = anyio.run(try_metrics, args.function, samples)
    except (MetricsError, UserFunctionError, UserProcessError, TimeoutError) as error:
        yield f"failed: {'no answer in time' if isinstance(error, TimeoutError) else error}", False
        return
    for name, value in metrics.items():
        yield f"eval/<set>/{name} {value:g}", True
    yield f"{len(metrics)} metrics of {len(samples)} samples in {time.perf_counter() - start:.3f} s", True


def _try_source(args: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    from actors.buffer.prompts.source_process import SourceProcess
    from runtime.data.data_files import DataError

    if _is_class(args.function):
        yield from _try_class(args)
        return
    with SourceProcess(_source_settings(args, is_function=True)) as source:
        source.start()
        for number in range(args.limit):
            start = time.perf_counter()
            try:
                row, again = (source.draw(number, 1).rows[0].decode() for _ in range(2))
            except DataError as error:
                yield from ((line, False) for line in str(error).splitlines())
                continue
            took_s = (time.perf_counter() - start) / 2
            yield f"row {number}: {_short(json.loads(row))}, {took_s:.4f} s", True
            if row != again:
                yield f"  a second call returned another row: {_short(json.loads(again))}", False


def _source_settings(args: argparse.Namespace, *, is_function: bool = False) -> "SourceSettings":
    from actors.buffer.prompts.source_process import SourceSettings
    from actors.buffer.prompts.source_worker import Hello
    from runtime.settings.tables.prompts import DataConfig

    files = dict(pair.partition("=")[::2] for pair in args.file)
    key, timeout_s = "data.source" if is_function else "data.source_class", DataConfig(name="tried").timeout_s
    return SourceSettings(key=key, value=args.function, hello=Hello(files=files), timeout_s=timeout_s)


def _is_class(function: str) -> bool:
    from runtime.functions.load import PluginError, load_class

    try:
        load_class("source", function, methods=(), base_dirs=[Path.cwd()])
    except PluginError:
        return False
    return True


def _try_class(args: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    """Draw rows in the process of a run, and then 100 rows twice, with a kill between."""
    from actors.buffer.prompts.source_process import SourceProcess, drawn_twice
    from actors.buffer.prompts.source_worker import SavedState
    from runtime.data.data_files import DataError

    settings = _source_settings(args)
    state: SavedState | None = None
    with SourceProcess(settings) as source:
        source.start()
        for number in range(args.limit):
            start = time.perf_counter()
            try:
                drawn = source.draw(number, 1, state=state)
            except DataError as error:
                yield from ((line, False) for line in str(error).splitlines())
                return
            took_s, state = time.perf_counter() - start, drawn.state
            assert state is not None
            size = f"{len(state.content)} bytes of state"
            yield f"row {number}: {_short(json.loads(drawn.rows[0]))}, {size}, {took_s:.4f} s", True
    if state is not None and state.is_json:
        yield f"state: {_short(json.loads(state.content))}", True
    try:
        tried = drawn_twice(settings)
    except DataError as error:
        yield from ((line, False) for line in str(error).splitlines())
    else:
        yield "100 rows are the same after a kill", True
        yield tried.note, True


def _try_calls(args: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    """Call a function with a process of its own, with each line of a file."""
    import anyio
    import msgspec

    from runtime.functions.child import UserFunctionError, UserProcess, UserProcessError
    from runtime.functions.limits import UserLimits
    from runtime.settings.derived import limits_of
    from runtime.settings.load import load_topology
    from runtime.settings.reference.functions import keys_by_function

    if args.on is None or args.on.is_dir():
        raise WrongInput("--on FILE is needed: a JSON object in each line")
    (kind,) = (kind for kind in ALL if kind.name == args.kind)
    key, *_ = keys_by_function()[kind]
    limits = limits_of(load_topology(args.topology, args.set).topology.reward) if args.topology else UserLimits()
    process = UserProcess(kind, key, args.function, limits)

    async def answers() -> list[tuple[str, bool]]:
        found: list[tuple[str, bool]] = []
        try:
            for number, line in _lines(args.on)[: args.limit]:
                payload, start = msgspec.msgpack.encode(_decoded(args.on, number, line, Any)), time.perf_counter()
                try:
                    answer = msgspec.msgpack.decode(await process.call(payload, timeout_s=kind.timeout_s))
                except TimeoutError:
                    found.append((f"line {number}: no answer within {kind.timeout_s:g} s", False))
                except (UserFunctionError, UserProcessError) as error:
                    found.append((f"line {number}: failed: {error}", False))
                else:
                    found.append((f"line {number}: {_short(answer)}, {time.perf_counter() - start:.4f} s", True))
        finally:
            await process.kill()
        return found

    yield from anyio.run(answers)


def _short(value: Any) -> str:
    """Return a value as one line of limited length."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    text = json.dumps(text, ensure_ascii=False) if isinstance(value, str) else text
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}"
