"""Dump files: `rollout_<step>.jsonl` with a line per sample, and `rollout_<step>.npz` with their tokens.

The pair of a step contains the groups of its batch, and those closed since the previous batch. Both files are written
atomically, the lines last. Line i and row i of the columns are the same sample. Columns need only numpy:

    group_id, attempt, index, part [n]   key of the sample
    sample_offsets [n + 1]               segments of sample i: sample_offsets[i] to sample_offsets[i + 1]
    segment_attempt [s]                  attempt that generated the segment
    prompt_ids, prompt_offsets [s + 1]   tokens of all segments, concatenated, and the start of each
    response_ids, loss_mask, rollout_log_probs, response_offsets [s + 1]
    weight_spans [k, 3], span_offsets [s + 1]   version, start, end within the segment's response
    routed_experts, routed_offsets [s + 1]      experts of all layers for each token; optional
    kept_counts, kept_ids, kept_offsets [s + 1] tokens that top-p and top-k kept for each response token; optional
    temperatures [s]                     that a generate function chose; NaN: the recipe's. Optional
    teacher_log_probs, teacher_log_probs_offsets [n + 1]   of all tokens after the first prompt; optional
    token_rewards, token_rewards_offsets [n + 1]           of a grader, of the same tokens; optional
    teacher_topk_ids, teacher_topk_log_probs   the teacher's likeliest tokens, K for each of these; optional, each with
                                               its offsets as above
    told_by [2]                          log sequence and Unix microseconds of the event that closed the pair
"""

import math
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from messages import Float32Array, Int32Array, PackedArray, SampleKey, SampleStatus, Segment, UInt8Array, WeightSpan
from runtime.data.columns import Columns, DumpError, load, reading, rows
from runtime.data.dumps import TOPK_COLUMNS, DumpedGroup, DumpedSample
from runtime.data.tokens import sample_problem
from runtime.settings.topology import TEACHER_LOG_PROBS, TOKEN_REWARDS
from runtime.util.disk import writing
from runtime.util.files import atomic_file, path_inside
from runtime.util.rewards import reward_problem

RUN_FILE: Final = "run.json"
TOPOLOGY_FILE: Final = "topology.json"
TOKENIZER: Final = "tokenizer"  # directory of the tokenizer's files
NEWEST: Final = "samples"  # in a run directory: the dumps of its newest steps, of `observe.samples`
MAX_LINE_BYTES: Final = 64 * 2**20  # of a sample; a longer line counts as damaged
_NAME: Final = re.compile(r"rollout_(\d+)\.jsonl")
_KEYS: Final = ("group_id", "attempt", "index", "part")


class DumpedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a dump directory belongs to."""

    run: str
    began: str  # creation time of its log; a run that was started over has another one


def write_pair(directory: Path, step: int, groups: Sequence[DumpedGroup], told_by: tuple[int, int]) -> None:
    """Write or replace the pair of a step.

    Args:
        told_by: log sequence and Unix microseconds of the event that closed the pair; see `told_by_of`.

    Raises:
        OSError: the disk failed; NoSpace if it is full.
    """
    lines = b"".join(msgspec.json.encode(sample) + b"\n" for group in groups for sample in group.samples)
    columns: dict[str, Any] = _columns(groups) | {"told_by": np.array(told_by, dtype=np.int64)}
    needed_bytes = len(lines) + sum(column.nbytes for column in columns.values())
    for path in (columns_path(directory, step), lines_path(directory, step)):
        with writing(path, needed_bytes), atomic_file(path) as file:
            if path.suffix == ".npz":
                np.savez(file, **columns)
            else:
                file.write(lines)


def keep_newest(directory: Path, num_steps: int) -> None:
    """Remove the pairs of all steps but the newest ones.

    Raises:
        OSError: a file cannot be removed.
    """
    for step in known_steps(directory)[:-num_steps]:
        for path in (lines_path(directory, step), columns_path(directory, step)):
            path.unlink(missing_ok=True)


def known_steps(directory: Path) -> list[int]:
    """Return the steps with lines, in order, and unchecked."""
    return sorted(int(match[1]) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name)))


def lines_path(directory: Path, step: int) -> Path:
    """Return the path of a step's lines."""
    return directory / f"rollout_{step}.jsonl"


def columns_path(directory: Path, step: int) -> Path:
    """Return the path of a step's columns."""
    return directory / f"rollout_{step}.npz"


def steps_in(directory: Path) -> list[int]:
    """Return the steps with a pair, in order.

    Raises:
        DumpError: there is no such directory, no pair in it, or a file of a pair is a link that leads out of it, or no
            regular file.
    """
    if not directory.is_dir():
        raise DumpError(f"{directory}: no such directory")
    steps = known_steps(directory)
    if not steps:
        raise DumpError(f"{directory}: no rollout_<step>.jsonl in this directory")
    for step in steps:
        for path in (lines_path(directory, step), columns_path(directory, step)):
            _check_file(directory, path)
    return steps


def _check_file(directory: Path, path: Path) -> None:
    try:
        path_inside(directory, path.name)
    except (ValueError, OSError) as error:
        raise DumpError(f"{path}: {error}") from error
    if path.exists() and not path.is_file():
        raise DumpError(f"{path}: is not a regular file")


def told_by_of(directory: Path, step: int) -> tuple[int, int] | None:
    """Return log sequence and time of the event that closed a step's pair; None if the pair is incomplete."""
    if not lines_path(directory, step).exists() or not columns_path(directory, step).exists():
        return None
    try:
        seq, time_us = load(columns_path(directory, step), ["told_by"])["told_by"]
    except (DumpError, ValueError):
        return None
    return int(seq), int(time_us)


def read_lines(directory: Path, step: int) -> list[DumpedSample]:
    """Read the lines of a step, without tokens.

    Raises:
        DumpError: the file cannot be read; names the line.
    """
    path = lines_path(directory, step)
    samples = [sample for sample, _ in sample_lines(path)]
    if not samples:
        raise DumpError(f"{path}: is empty")
    return samples


def sample_lines(path: Path, begin: int = 0, num: int | None = None) -> Iterator[tuple[DumpedSample, int]]:
    """Yield the samples of a file of lines, each with the byte at which its line begins.

    Args:
        path: of the file.
        begin: byte at which the first line begins.
        num: lines to read at most; None: all.

    Raises:
        DumpError: the file cannot be read; names the line.
    """
    decoder = msgspec.json.Decoder(DumpedSample)
    try:
        with path.open("rb") as file:
            file.seek(begin)
            at, number = begin, 0
            while num is None or number < num:
                line = file.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                number += 1
                where = f"{path}:{number}" if not begin else f"{path}: line {number} after byte {begin}"
                if len(line) > MAX_LINE_BYTES:
                    raise DumpError(f"{where}: the line has more than {MAX_LINE_BYTES // 2**20} MiB")
                try:
                    sample = decoder.decode(line)
                except (msgspec.DecodeError, RecursionError) as error:
                    raise DumpError(f"{where}: {error}") from error
                _check_rewards(sample, where)
                yield sample, at
                at += len(line)
    except OSError as error:
        raise DumpError(f"{path}: cannot be read: {error.strerror or error}") from error


def _check_rewards(sample: DumpedSample, where: str) -> None:
    """Refuse a line with a number that can be no reward, as a grader's answer is refused."""
    named = {"reward": sample.reward, "baseline_reward": sample.baseline_reward}
    named |= {f"rewards.{name}": value for name, value in sample.rewards.items()}
    for name, value in named.items():
        if value is not None and (problem := reward_problem(value)) is not None:
            which = f"sample {sample.index} of group {sample.group_id}"
            raise DumpError(f"{where}: {which} has {name} = {value}, {problem}")


def check_columns(directory: Path, step: int, num_samples: int) -> None:
    """Check that a step's columns exist and match its number of lines, without reading them all.

    Raises:
        DumpError: a file is missing, or the numbers of rows differ; names the file.
    """
    path = columns_path(directory, step)
    found = len(load(path, ["group_id"])["group_id"])
    if found != num_samples:
        lines = lines_path(directory, step)
        raise DumpError(f"{path}: has {found} samples, {lines.name} has {num_samples} lines")


def read_pair(directory: Path, step: int, vocab_size: int | None = None) -> tuple[DumpedGroup, ...]:
    """Read the groups of a step, in order of their ids.

    An invalid sample gets the status failed with the reason, and no segments.

    Args:
        directory: directory of the dump.
        step: train step of the pair.
        vocab_size: vocabulary size of the model; none: unchecked.

    Raises:
        DumpError: a file cannot be read, or the two do not match; names file and line.
    """
    samples, path = read_lines(directory, step), columns_path(directory, step)
    check_columns(directory, step, len(samples))
    columns = load(
        path,
        [*_KEYS, "sample_offsets", "segment_attempt", *_ARRAYS, *_OFFSETS],
        may_lack=(*_ROUTED, *_KEPT, _TEMPERATURES, *_COMPUTED),
    )
    return _groups_of(samples, columns, path, vocab_size)


def read_sample(directory: Path, step: int, row: int, sample: DumpedSample) -> tuple[Segment, ...]:
    """Read the tokens of one sample, in the memory of this sample alone. Experts and kept tokens are left out.

    Args:
        directory: directory of the dump.
        step: train step of the pair.
        row: row of the sample, from 0.
        sample: its line.

    Raises:
        DumpError: the columns cannot be read, or are not this sample's; names the file.
    """
    path = columns_path(directory, step)
    with reading(path) as opened, zipfile.ZipFile(opened) as file:
        columns: dict[str, NDArray[Any]] = {name: rows(file, name, row, row + 1) for name in _KEYS}
        first, last = (int(bound) for bound in rows(file, "sample_offsets", row, row + 2))
        columns |= {
            "sample_offsets": np.array([0, last - first]),
            "segment_attempt": rows(file, "segment_attempt", first, last),
        }
        for offsets, names in _TOKENS_BY_OFFSETS.items():
            bounds = rows(file, offsets, first, last + 1)
            begin, end = int(bounds[0]), int(bounds[-1])
            columns |= {offsets: bounds - begin} | {name: rows(file, name, begin, end) for name in names}
    (group,) = _groups_of([sample], columns, path, None, first_row=row)
    if group.samples[0].status is SampleStatus.FAILED and sample.status is not SampleStatus.FAILED:
        raise DumpError(group.samples[0].reason or str(path))
    return group.segments[0]


def _groups_of(
    samples: list[DumpedSample], columns: Columns, path: Path, vocab_size: int | None, first_row: int = 0
) -> tuple[DumpedGroup, ...]:
    """Check samples and their columns, and return them by group."""
    for number, sample in enumerate(samples):
        key = tuple(int(columns[name][number]) for name in _KEYS)
        if key != (sample.group_id, sample.attempt, sample.index, sample.part):
            lines = path.with_suffix(".jsonl")
            raise DumpError(f"{lines}:{first_row + number + 1}: is not the sample that {path.name} has at this place")
    segments: list[tuple[Segment, ...]] = []
    for number, sample in enumerate(samples):
        own, problem = _checked_segments(sample, number, columns, vocab_size)
        if problem is not None:
            reason = f"{path}: sample {sample.index} of group {sample.group_id}: {problem}"
            samples[number] = msgspec.structs.replace(sample, status=SampleStatus.FAILED, reason=reason)
        segments.append(own)
    found: list[DumpedGroup] = []
    for _, numbers in groupby(
        range(len(samples)), key=lambda number: (samples[number].group_id, samples[number].attempt)
    ):
        own = list(numbers)
        computed = tuple(_computed_of(i, columns) for i in own)
        found.append(
            DumpedGroup(
                samples=tuple(samples[i] for i in own),
                segments=tuple(segments[i] for i in own),
                columns=computed if any(computed) else (),
            )
        )
    return tuple(sorted(found, key=lambda group: group.group_id))


_ARRAYS: Final = ("prompt_ids", "response_ids", "loss_mask", "rollout_log_probs", "weight_spans")
_OFFSETS: Final = ("prompt_offsets", "response_offsets", "span_offsets")
_TOKENS_BY_OFFSETS: Final = {  # columns by those that have their offsets
    "prompt_offsets": ("prompt_ids",),
    "response_offsets": ("response_ids", "loss_mask", "rollout_log_probs"),
    "span_offsets": ("weight_spans",),
}
_KEPT: Final = ("kept_counts", "kept_ids", "kept_offsets")
_ROUTED: Final = ("routed_experts", "routed_offsets")
_TEMPERATURES: Final = "temperatures"
_PER_TOKEN: Final[Mapping[str, type[PackedArray]]] = {  # of engine pools and graders, of tokens after the first prompt
    TEACHER_LOG_PROBS: Float32Array,
    TOKEN_REWARDS: Float32Array,
    **dict(zip(TOPK_COLUMNS, (Int32Array, Float32Array), strict=True)),
}
_COMPUTED: Final = tuple(name for column in _PER_TOKEN for name in (column, f"{column}_offsets"))


def _columns(groups: Sequence[DumpedGroup]) -> dict[str, NDArray[Any]]:
    samples = [sample for group in groups for sample in group.samples]
    per_sample = [own for group in groups for own in group.segments]
    segments = [segment for own in per_sample for segment in own]
    keys = {name: np.array([getattr(sample, name) for sample in samples], dtype=np.int64) for name in _KEYS}
    spans = [(span.version, span.start, span.end) for segment in segments for span in segment.weight_spans]
    return keys | {
        "sample_offsets": _offsets([len(own) for own in per_sample]),
        "segment_attempt": np.array([segment.sample.attempt for segment in segments], dtype=np.int64),
        "prompt_offsets": _offsets([len(segment.prompt_ids) for segment in segments]),
        "prompt_ids": _joined([segment.prompt_ids for segment in segments], np.int32),
        "response_offsets": _offsets([len(segment.response_ids) for segment in segments]),
        "response_ids": _joined([segment.response_ids for segment in segments], np.int32),
        "loss_mask": _joined([segment.loss_mask for segment in segments], np.uint8),
        "rollout_log_probs": _joined([segment.rollout_log_probs for segment in segments], np.float32),
        "span_offsets": _offsets([len(segment.weight_spans) for segment in segments]),
        "weight_spans": np.array(spans, dtype=np.int64).reshape(-1, 3),
        **_routed(segments),
        **_kept(segments),
        **_temperatures(segments),
        **_computed(groups),
    }


def _computed(groups: Sequence[DumpedGroup]) -> dict[str, NDArray[Any]]:
    per_sample = [own for group in groups for own in group.columns_of_samples]
    found: dict[str, NDArray[Any]] = {}
    for name, kind in _PER_TOKEN.items():
        values = [own.get(name, kind()) for own in per_sample]
        if any(map(len, values)):
            found |= {name: _joined(values, kind.wire_dtype), f"{name}_offsets": _offsets([*map(len, values)])}
    return found


def _computed_of(sample: int, columns: Columns) -> dict[str, PackedArray]:
    found: dict[str, PackedArray] = {}
    for name, kind in _PER_TOKEN.items():
        if name in columns and f"{name}_offsets" in columns:
            begin, end = (int(bound) for bound in columns[f"{name}_offsets"][sample : sample + 2])
            found |= {name: kind(columns[name][begin:end])} if end > begin else {}
    return found


def _routed(segments: Sequence[Segment]) -> dict[str, NDArray[Any]]:
    experts = [() if segment.routed_experts is None else segment.routed_experts for segment in segments]
    if not any(map(len, experts)):
        return {}
    return {
        "routed_experts": _joined(experts, np.int32),
        "routed_offsets": _offsets([len(routed) for routed in experts]),
    }


def _kept(segments: Sequence[Segment]) -> dict[str, NDArray[Any]]:
    if all(segment.kept_ids is None for segment in segments):
        return {}
    counts = [
        np.zeros(len(segment.response_ids), np.int32) if segment.kept_counts is None else segment.kept_counts
        for segment in segments
    ]
    ids = [() if segment.kept_ids is None else segment.kept_ids for segment in segments]
    return {
        "kept_counts": _joined(counts, np.int32),
        "kept_ids": _joined(ids, np.int32),
        "kept_offsets": _offsets([*map(len, ids)]),
    }


def _temperatures(segments: Sequence[Segment]) -> dict[str, NDArray[Any]]:
    own = [segment.temperature for segment in segments]
    if all(temperature is None for temperature in own):
        return {}
    return {_TEMPERATURES: np.array([math.nan if each is None else each for each in own], np.float64)}


def _offsets(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _joined(arrays: Sequence[Any], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.asarray(array) for array in arrays]).astype(dtype) if arrays else np.zeros(0, dtype)


def _checked_segments(
    sample: DumpedSample, number: int, columns: Columns, vocab_size: int | None
) -> tuple[tuple[Segment, ...], str | None]:
    """Return the segments of a sample, or none and the problem if they are invalid."""
    try:
        own = tuple(_segments_of(sample, number, columns))
    except (ValueError, IndexError, OverflowError) as error:
        return (), str(error)
    problem = sample_problem(own, vocab_size, num_tokens=sample.prompt_len + sample.response_len or None)
    return ((), problem) if own and problem is not None else (own, None)


def _segments_of(sample: DumpedSample, number: int, columns: Columns) -> Iterator[Segment]:
    begin, end = columns["sample_offsets"][number : number + 2]
    texts = sample.segment_texts or (sample.response,) * int(end - begin)
    for at, text in zip(range(int(begin), int(end)), texts, strict=True):
        prompt, response, spans = (slice(*(int(bound) for bound in columns[name][at : at + 2])) for name in _OFFSETS)
        yield Segment(
            sample=SampleKey(
                group_id=sample.group_id,
                attempt=int(columns["segment_attempt"][at]),
                index=sample.index,
                part=sample.part,
            ),
            prompt_ids=Int32Array(columns["prompt_ids"][prompt]),
            response_ids=Int32Array(columns["response_ids"][response]),
            loss_mask=UInt8Array(columns["loss_mask"][response]),
            rollout_log_probs=Float32Array(columns["rollout_log_probs"][response]),
            weight_spans=tuple(
                WeightSpan(version=int(version), start=int(start), end=int(end))
                for version, start, end in columns["weight_spans"][spans]
            ),
            text=text,
            routed_experts=_routed_of(at, columns),
            **_kept_of(at, response, columns),
            temperature=_temperature_of(at, columns),
        )


def _temperature_of(segment: int, columns: Columns) -> float | None:
    found = float(columns[_TEMPERATURES][segment]) if _TEMPERATURES in columns else math.nan
    return None if math.isnan(found) else found


def _routed_of(segment: int, columns: Columns) -> Int32Array | None:
    if "routed_offsets" not in columns:
        return None
    begin, end = (int(bound) for bound in columns["routed_offsets"][segment : segment + 2])
    return Int32Array(columns["routed_experts"][begin:end]) if end > begin else None


def _kept_of(segment: int, response: slice, columns: Columns) -> dict[str, Int32Array]:
    known = [name for name in _KEPT if name in columns]
    if not known:
        return {}
    if len(known) < len(_KEPT):
        raise ValueError(f"the columns have {' and '.join(known)}; kept tokens need {', '.join(_KEPT)}")
    begin, end = (int(bound) for bound in columns["kept_offsets"][segment : segment + 2])
    if begin == end:
        return {}
    ids, counts = columns["kept_ids"][begin:end], columns["kept_counts"][response]
    return {"kept_ids": Int32Array(ids), "kept_counts": Int32Array(counts)}
