"""Dumps as files: what is written is read again, with numpy alone too, and what is broken is named."""

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messages import (
    ColumnPublished,
    Float32Array,
    GroupCompleted,
    Int32Array,
    Outcome,
    SampleKey,
    SampleStatus,
    SampleSummary,
    Segment,
    SegmentRef,
    SegmentsPublished,
    UInt8Array,
    WeightSpan,
)
from runtime.data.columns import DumpError
from runtime.data.dump_files import (
    columns_path,
    lines_path,
    read_lines,
    read_pair,
    read_sample,
    steps_in,
    told_by_of,
    write_pair,
)
from runtime.data.dumps import DumpedGroup, Fate, group_of
from runtime.util.rewards import MAX_REWARD

TOLD_BY = (17, 1_700_000_000_000_000)
TEXT = st.text(max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=2),
    max_leaves=4,
)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=5)


@st.composite
def segments(draw: st.DrawFn, key: SampleKey) -> Segment:
    response = draw(TOKENS)
    cut = draw(st.integers(0, len(response)))
    bounds = [(0, cut), (cut, len(response))]
    size = len(response)
    counts = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    ids = [token + more for token, count in zip(response, counts, strict=True) for more in range(0, -count, -1)]
    recorded = bool(ids) and min(ids) >= 0
    return Segment(
        sample=key,
        prompt_ids=Int32Array(draw(TOKENS)),
        response_ids=Int32Array(response),
        loss_mask=UInt8Array(draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))),
        rollout_log_probs=Float32Array(
            draw(st.lists(st.floats(-50, 0, width=32), min_size=size, max_size=size)),
        ),
        weight_spans=tuple(
            WeightSpan(version=version, start=begin, end=end)
            for version, (begin, end) in enumerate(bounds, start=1)
            if end > begin
        ),
        text=draw(TEXT),
        kept_counts=Int32Array(counts) if recorded else None,
        kept_ids=Int32Array(ids) if recorded else None,
        temperature=draw(st.none() | st.floats(0.01, 5)),
    )


@st.composite
def groups(draw: st.DrawFn, group_id: int) -> DumpedGroup:
    attempt, payloads, summaries = draw(st.integers(0, 3)), dict[int, SegmentsPublished](), list[SampleSummary]()
    columns: dict[int, ColumnPublished] = {}
    for index in range(draw(st.integers(1, 3))):
        refs: list[SegmentRef] = []
        for _ in range(draw(st.integers(0, 3))):
            seq = 100 + len(payloads)
            key = SampleKey(group_id=group_id, attempt=draw(st.integers(0, attempt)), index=index, part=index % 2)
            payloads[seq] = SegmentsPublished(
                group_id=group_id,
                attempt=attempt,
                lease="l",
                segments=(draw(segments(key)),),
                prompt="p",
                label=[1, "x"],
            )
            refs.append(SegmentRef(seq=seq, position=0))
        values = draw(st.lists(st.floats(-50, 0, width=32), max_size=5))
        key = SampleKey(group_id=group_id, attempt=attempt, index=index, part=index % 2)
        name = draw(st.sampled_from(("teacher_log_probs", "token_rewards")))
        if values:
            width = draw(st.integers(0, 3)) if name == "teacher_log_probs" else 0  # likeliest tokens at each place
            num = width * len(values)
            topk: dict[str, Any] = {}
            if width:
                topk = {"topk_ids": Int32Array(range(num)), "topk_log_probs": Float32Array([-0.5] * num)}
            columns[200 + index] = ColumnPublished(sample=key, column=name, values=Float32Array(values), **topk)
        summaries.append(
            SampleSummary(
                index=index,
                part=index % 2,
                columns={name: 200 + index} if values else {},
                status=draw(st.sampled_from(SampleStatus)),
                segments=tuple(refs),
                reward=draw(st.none() | st.floats(-MAX_REWARD, MAX_REWARD)),
                score=draw(st.none() | st.dictionaries(TEXT, JSON, max_size=2)),
                metadata=draw(st.dictionaries(TEXT, JSON, max_size=2)),
            )
        )
    completed = GroupCompleted(
        group_id=group_id,
        attempt=attempt,
        lease="l",
        round=draw(st.integers(0, 9)),
        instance="r",
        data="d",
        samples=tuple(summaries),
        metadata=draw(st.dictionaries(TEXT, JSON, max_size=2)),
    )
    fate = Fate(verdict=draw(st.none() | st.sampled_from(Outcome)), step=draw(st.none() | st.integers(0, 9)))
    return group_of(completed, payloads, fate, columns=columns)


def plain(group: DumpedGroup) -> Any:
    """What compares: arrays as lists."""
    return msgspec.to_builtins(
        (
            group.samples,
            [[msgspec.structs.asdict(segment) for segment in own] for own in group.segments],
            group.columns,
        ),
        enc_hook=lambda array: array.tolist(),
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_written_is_read_again(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("dump")
    written = [data.draw(groups(group_id)) for group_id in range(data.draw(st.integers(1, 3)))]
    write_pair(directory, 4, written, TOLD_BY)
    assert [plain(group) for group in read_pair(directory, 4)] == [plain(group) for group in written]
    assert (steps_in(directory), told_by_of(directory, 4)) == ([4], TOLD_BY)


def example(group_id: int = 3, *, step: int | None = 0) -> DumpedGroup:
    """A group of two samples, the second of two segments over two weight versions."""
    payloads = {
        7: SegmentsPublished(
            group_id=group_id,
            attempt=1,
            lease="l",
            segments=(segment(group_id, 0, 1, [5, 6], [7, 8]), segment(group_id, 1, 0, [5, 6], [9])),
            prompt="say",
            label="hi",
        ),
        9: SegmentsPublished(
            group_id=group_id, attempt=1, lease="l", segments=(segment(group_id, 1, 1, [], [4, 3], version=2),)
        ),
    }
    one, two = SegmentRef(seq=7, position=0), (SegmentRef(seq=7, position=1), SegmentRef(seq=9, position=0))
    done = SampleStatus.COMPLETED
    samples = (
        SampleSummary(index=0, status=done, segments=(one,), prompt_len=2, response_len=2, reward=1.0),
        SampleSummary(index=1, status=done, segments=two, prompt_len=2, response_len=3, reward=0.0),
    )
    completed = GroupCompleted(
        group_id=group_id, attempt=1, lease="l", round=0, instance="r", data="d", samples=samples, metadata={"a": 1}
    )
    return group_of(completed, payloads, Fate(verdict=Outcome.KEEP, step=step))


def segment(
    group_id: int, index: int, attempt: int, prompt: list[int], response: list[int], version: int = 1
) -> Segment:
    return Segment(
        sample=SampleKey(group_id=group_id, attempt=attempt, index=index),
        prompt_ids=Int32Array(prompt),
        response_ids=Int32Array(response),
        loss_mask=UInt8Array([1] * len(response)),
        rollout_log_probs=Float32Array([-0.5] * len(response)),
        weight_spans=(WeightSpan(version=version, start=0, end=len(response)),),
        text="".join(map(str, response)),
    )


def test_a_notebook_reads_lines_and_columns_without_us(tmp_path: Path) -> None:
    import json

    write_pair(tmp_path, 0, [example()], TOLD_BY)
    lines = [json.loads(line) for line in (tmp_path / "rollout_0.jsonl").read_text().splitlines()]
    assert [(line["prompt"], line["label"], line["response"], line["reward"]) for line in lines] == [
        ("say", "hi", "78", 1.0),
        ("say", "hi", "943", 0.0),
    ]
    columns = np.load(tmp_path / "rollout_0.npz", allow_pickle=False)
    begin, end = columns["sample_offsets"][1:3]
    tokens = slice(columns["response_offsets"][begin], columns["response_offsets"][end])
    assert columns["response_ids"][tokens].tolist() == [9, 4, 3]
    assert columns["rollout_log_probs"][tokens].tolist() == [-0.5, -0.5, -0.5]
    assert columns["weight_spans"][columns["span_offsets"][begin] :].tolist() == [[1, 0, 1], [2, 0, 2]]
    assert columns["segment_attempt"].tolist() == [1, 0, 1]


def test_a_pair_is_replaced_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    write_pair(tmp_path, 0, [example(3), example(4)], TOLD_BY)
    write_pair(tmp_path, 0, [example(4)], (18, 1))
    assert [group.group_id for group in read_pair(tmp_path, 0)] == [4]
    assert told_by_of(tmp_path, 0) == (18, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rollout_0.jsonl", "rollout_0.npz"]


def test_groups_come_in_the_order_of_their_ids_and_as_the_event_that_told_of_them(tmp_path: Path) -> None:
    write_pair(tmp_path, 0, [example(9), example(2)], TOLD_BY)
    first, second = read_pair(tmp_path, 0)
    assert (first.group_id, second.group_id) == (2, 9)
    told = first.completed()
    assert (told.attempt, told.data, told.metadata) == (1, "d", {"a": 1})
    assert [(sample.reward, sample.response_len, sample.segments) for sample in told.samples] == [
        (1.0, 2, ()),
        (0.0, 3, ()),
    ]


def test_a_broken_line_is_named_by_file_and_number(tmp_path: Path) -> None:
    write_pair(tmp_path, 0, [example()], TOLD_BY)
    path = lines_path(tmp_path, 0)
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(whole[0] + whole[1][:20])
    with pytest.raises(DumpError, match=r"rollout_0\.jsonl:2: "):
        read_pair(tmp_path, 0)
    path.write_bytes(whole[0] + b'{"deep":' + b"[" * 100_000)
    with pytest.raises(DumpError, match=r"rollout_0\.jsonl:2: .*recursion"):
        read_pair(tmp_path, 0)
    path.write_bytes(whole[1] + whole[0])
    with pytest.raises(DumpError, match=r"rollout_0\.jsonl:1: is not the sample that rollout_0\.npz"):
        read_pair(tmp_path, 0)
    path.write_bytes(whole[0])
    with pytest.raises(DumpError, match=r"rollout_0\.npz: has 2 samples, rollout_0\.jsonl has 1 lines"):
        read_pair(tmp_path, 0)
    path.write_bytes(b"")
    with pytest.raises(DumpError, match=r"rollout_0\.jsonl: is empty"):
        read_pair(tmp_path, 0)


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        (
            '"reward":1e308',
            "rollout_0.jsonl:1: sample 0 of group 0 has reward = 1e+308, beyond the 1e+15",
        ),
        ('"reward":-1e16', "sample 0 of group 0 has reward = -1e+16, beyond"),
        ('"rewards":{"format":1e20}', "has rewards.format = 1e+20, beyond"),
        ('"baseline_reward":1e20', "has baseline_reward = 1e+20, beyond"),
    ],
)
def test_a_number_that_can_be_no_reward_is_named_by_line_and_sample(tmp_path: Path, field: str, problem: str) -> None:
    begin = '"group_id":0,"attempt":0,"index":0,"round":0,"data":"d","prompt":"","response":"","status":"completed"'
    line = f"{{{begin},{field}}}"
    (tmp_path / "rollout_0.jsonl").write_text(f"{line}\n")
    with pytest.raises(DumpError, match=re.escape(problem)):
        read_lines(tmp_path, 0)


def test_missing_and_broken_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="no such directory"):
        steps_in(tmp_path / "nowhere")
    with pytest.raises(DumpError, match=r"no rollout_<step>\.jsonl"):
        steps_in(tmp_path)
    write_pair(tmp_path, 0, [example()], TOLD_BY)
    path = columns_path(tmp_path, 0)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DumpError, match=r"rollout_0\.npz: cannot be read"):
        read_pair(tmp_path, 0)
    assert told_by_of(tmp_path, 0) is None
    path.unlink()
    with pytest.raises(DumpError, match=r"rollout_0\.npz: no such file"):
        read_pair(tmp_path, 0)


def test_a_segment_of_another_sample_is_refused() -> None:
    payload = SegmentsPublished(group_id=1, attempt=0, lease="l", segments=(segment(1, 1, 0, [], [1]),))
    sample = SampleSummary(index=0, status=SampleStatus.COMPLETED, segments=(SegmentRef(seq=1, position=0),))
    completed = GroupCompleted(group_id=1, attempt=0, lease="l", round=0, instance="r", data="d", samples=(sample,))
    with pytest.raises(ValueError, match="belongs to"):
        group_of(completed, {1: payload}, Fate())


def test_one_sample_is_read_without_the_others_of_its_step(tmp_path: Path) -> None:
    written = [example(3), example(8)]
    write_pair(tmp_path, 0, written, TOLD_BY)
    lines = read_lines(tmp_path, 0)
    found = [read_sample(tmp_path, 0, row, line) for row, line in enumerate(lines)]
    expected = [own for group in written for own in group.segments]
    assert [[segment.response_ids.tolist() for segment in own] for own in found] == [[[7, 8]], [[9], [4, 3]]] * 2
    assert msgspec.to_builtins(found, enc_hook=lambda array: array.tolist()) == msgspec.to_builtins(
        expected, enc_hook=lambda array: array.tolist()
    )
    with pytest.raises(DumpError, match=r"rollout_0.jsonl:2: is not the sample"):
        read_sample(tmp_path, 0, 1, lines[0])
    with pytest.raises(DumpError, match="has no rows 4 to 5"):
        read_sample(tmp_path, 0, 4, lines[0])
    columns_path(tmp_path, 0).write_bytes(b"no archive")
    with pytest.raises(DumpError, match=r"rollout_0.npz: cannot be read: File is not a zip file"):
        read_sample(tmp_path, 0, 0, lines[0])
