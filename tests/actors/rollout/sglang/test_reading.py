"""What a sample holds at each point of a stream, however its chunks are written."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.samples.buffer import SampleBuffer
from actors.rollout.sglang.checks import ExpectedAnswer
from actors.rollout.sglang.errors import PrefixOutdated
from actors.rollout.sglang.reading import AdapterLabels, AnswerReader
from messages import Int32Array, SampleKey, SampleStatus, Segment, WeightSpan

KEY = SampleKey(group_id=0, attempt=0, index=0)
IDS = list(range(10, 20))
TEXT = "abcdefghij"


def chunk(start: int, end: int, version: str = "1", *, finish: str | None = None, spans: object = None) -> bytes:
    """Tokens [start, end) of IDS; of all that came so far when start is 0."""
    meta = {
        "completion_tokens": end,
        "finish_reason": {"type": finish} if finish else None,
        "weight_version": version,
        "output_token_logprobs": [[-float(token), token, None] for token in IDS[start:end]],
        "output_token_sampling_mask": [[token, token + 1] for token in IDS[start:end]],
        "output_token_sampling_logprobs": [-float(token) for token in IDS[start:end]],
    }
    if spans is not None:
        meta["weight_versions"] = spans
    return json.dumps({"text": TEXT[start:end], "output_ids": IDS[start:end], "meta_info": meta}).encode()


def spans(*found: tuple[int, int, str]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for start, end, version in found]


def begun(
    trusts: Callable[[str], bool] = lambda _: True, *, buffer: SampleBuffer | None = None, new_input: Any = ()
) -> tuple[AnswerReader, SampleBuffer]:
    buffer = buffer or SampleBuffer()
    expected = ExpectedAnswer(max_kept=2)
    reader = AnswerReader(buffer, expected, new_input=Int32Array(new_input), sent_under=1, trusts=trusts)
    return reader, buffer


def take(buffer: SampleBuffer) -> Segment:
    return buffer.take(KEY, Int32Array())


def spans_of(segment: Segment) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in segment.weight_spans]


@given(
    ends=st.lists(st.integers(1, len(IDS)), min_size=1).map(lambda ends: sorted({*ends, len(IDS)})),
    incremental=st.booleans(),
    data=st.data(),
)
def test_the_segments_are_the_whole_however_it_is_streamed_and_taken(
    ends: list[int], incremental: bool, data: st.DataObject
) -> None:
    (reader, buffer), segments, before = begun(), list[Segment](), 0
    for end in ends:
        reader.add_chunk(chunk(before if incremental else 0, end, finish="stop" if end == len(IDS) else None))
        before = end
        if data.draw(st.booleans()) or end == len(IDS):
            assert reader.num_new > 0
            segments.append(take(buffer))
            assert (reader.num_new, reader.num_taken, buffer.num_taken) == (0, end, end)
    assert reader.ended
    assert reader.status is SampleStatus.COMPLETED
    assert reader.ids.tolist() == buffer.ids.tolist() == IDS
    assert [token for segment in segments for token in segment.response_ids.tolist()] == IDS
    assert "".join(segment.text for segment in segments) == buffer.text == TEXT
    for segment in segments:
        ids = segment.response_ids.tolist()
        assert segment.rollout_log_probs.tolist() == [-float(token) for token in ids]
        assert segment.weight_spans == (WeightSpan(version=1, start=0, end=len(ids)),)
        assert segment.kept_ids is not None
        assert segment.kept_ids.tolist() == [kept for token in ids for kept in (token, token + 1)]


def test_log_probs_of_all_so_far_beside_new_tokens_alone_are_understood() -> None:
    reader, buffer = begun()
    reader.add_chunk(chunk(0, 4))
    second = json.loads(chunk(4, 10, finish="length"))
    second["meta_info"]["output_token_logprobs"] = json.loads(chunk(0, 10))["meta_info"]["output_token_logprobs"]
    reader.add_chunk(json.dumps(second).encode())
    assert take(buffer).rollout_log_probs.tolist() == [-float(token) for token in IDS]


def test_tokens_that_came_around_an_update_count_as_sampled_by_the_old_weights() -> None:
    reader, buffer = begun()
    reader.add_chunk(chunk(0, 2, "1"))
    reader.add_chunk(chunk(0, 6, "2"))
    reader.add_chunk(chunk(0, 8, "2"))
    assert spans_of(take(buffer)) == [(1, 0, 6), (2, 6, 8)]


def test_the_spans_of_the_last_chunk_are_believed() -> None:
    reader, buffer = begun()
    reader.add_chunk(chunk(0, 4, "2"))
    assert spans_of(take(buffer)) == [(1, 0, 4)]
    exact = [{"version": "1", "start": 0, "end": 5}, {"version": "2", "start": 5, "end": 10}]
    reader.add_chunk(chunk(0, 10, "2", finish="stop", spans=exact))
    assert spans_of(take(buffer)) == [(1, 0, 1), (2, 1, 6)]


@pytest.mark.parametrize(
    ("chunks", "is_outdated"),
    [
        ((chunk(0, 2, "1@a"), chunk(2, 4, "2@b", finish="length")), False),
        ((chunk(0, 2, "2@b"),), True),  # its first token may be of either
        ((chunk(0, 4, "2@b", finish="length", spans=spans((0, 1, "1@a"), (1, 4, "2@b"))),), False),
        ((chunk(0, 4, "2@b", finish="length", spans=spans((0, 4, "2@b"))),), True),
        ((chunk(0, 0, "2@b", finish="abort"),), False),  # no token
        ((chunk(0, 2, "default", finish="length"),), False),  # not of the run: found unverified later
    ],
)
def test_the_first_token_has_to_be_of_the_weights_that_may_have_computed_the_prefix(
    chunks: tuple[bytes, ...], is_outdated: bool
) -> None:
    for prefix_of in (0, 1):
        buffer = SampleBuffer()
        reader = AnswerReader(buffer, sent_under=1, prefix_of=prefix_of)
        if is_outdated and prefix_of:
            with pytest.raises(PrefixOutdated) as raised:
                reader.add_chunk(chunks[0])
            assert (raised.value.label, buffer.num_tokens, reader.num_tokens) == ("2@b", 0, 0)
            continue
        for data in chunks:
            reader.add_chunk(data)
        assert reader.ended or not prefix_of


def test_the_spans_of_every_chunk_are_believed() -> None:
    """The tiny engine reports them in each chunk, so what is taken in between has exact labels too."""
    reader, buffer = begun()
    reader.add_chunk(chunk(0, 2, "2", spans=[{"version": "2", "start": 0, "end": 2}]))
    assert spans_of(take(buffer)) == [(2, 0, 2)]
    exact = [{"version": "2", "start": 0, "end": 3}, {"version": "3", "start": 3, "end": 8}]
    reader.add_chunk(chunk(0, 8, "3", spans=exact))
    assert spans_of(take(buffer)) == [(2, 0, 1), (3, 1, 6)]


def test_an_abort_without_a_count_keeps_what_came() -> None:
    reader, buffer = begun()
    reader.add_chunk(chunk(0, 4))
    aborted = json.loads(chunk(0, 4, finish="abort"))
    del aborted["meta_info"]["completion_tokens"]
    reader.add_chunk(json.dumps(aborted).encode())
    assert (take(buffer).response_ids.tolist(), reader.status, reader.ended) == (IDS[:4], SampleStatus.ABORTED, True)


def test_nothing_came_of_a_request_that_was_lost_at_once() -> None:
    reader, buffer = begun()
    assert (reader.num_tokens, reader.is_recent(1), len(take(buffer).response_ids)) == (0, True, 0)


@pytest.mark.parametrize("second", [chunk(6, 8), chunk(0, 2), b"{}", b'{"error": {"message": "x"}}', b"<html>"])
def test_a_chunk_that_does_not_follow_is_refused(second: bytes) -> None:
    reader, buffer = begun()
    reader.add_chunk(chunk(0, 4))
    with pytest.raises(ValueError, match=r"chunk|missing|malformed"):
        reader.add_chunk(second)
    assert buffer.ids.tolist() == IDS[:4]


@given(
    ends=st.lists(st.integers(1, len(IDS)), min_size=1).map(lambda ends: sorted({*ends, len(IDS)})),
    labels=st.lists(st.sampled_from(["1@a", "2@b", "3@c"]), min_size=len(IDS), max_size=len(IDS)).map(sorted),
    refused=st.sets(st.sampled_from(["1@a", "2@b", "3@c"])),
    incremental=st.booleans(),
    exact=st.booleans(),
)
def test_no_token_of_unproven_weights_is_kept_and_what_is_kept_belongs_together(
    ends: list[int], labels: list[str], refused: set[str], incremental: bool, exact: bool
) -> None:
    """Each token has a label; a chunk names that of its last one."""
    (reader, buffer), before = begun(lambda label: label not in refused), 0
    spans = [{"version": label, "start": place, "end": place + 1} for place, label in enumerate(labels)]
    for end in ends:
        last = exact and end == len(IDS)
        begin = before if incremental else 0
        named = labels[end - 1]
        reader.add_chunk(chunk(begin, end, named, finish="stop" if last else None, spans=spans if last else None))
        before = end
    assert not refused & set(reader.labels) or refused & set(labels)
    reader.drop_untrusted(lambda label: label not in refused)
    kept, ended = reader.num_tokens, reader.ended
    if exact:
        assert not refused & set(labels[:kept])
    named = [label for start, end in zip([0, *ends], ends, strict=False) for label in [labels[end - 1]] * (end - start)]
    assert exact or not refused & set(named[:kept])
    rest = take(buffer)
    assert (rest.response_ids.tolist(), rest.text, len(rest.rollout_log_probs)) == (IDS[:kept], TEXT[:kept], kept)
    if not refused & set(labels):
        assert (kept, ended) == (len(IDS), exact)
    elif exact:
        assert not ended


def test_what_was_taken_before_stays_taken() -> None:
    reader, buffer = begun(lambda label: label == "1@a")
    reader.add_chunk(chunk(0, 4, "1@a"))
    assert take(buffer).response_ids.tolist() == IDS[:4]
    assert reader.is_trusted
    reader.add_chunk(chunk(4, 6, "1@a"))
    reader.add_chunk(chunk(6, 8, "2@b"))
    assert not reader.is_trusted
    reader.drop_untrusted(lambda _: False)
    assert (take(buffer).response_ids.tolist(), reader.num_tokens) == (IDS[4:6], 6)
    reader.discard()
    assert buffer.ids.tolist() == IDS[:6]


def test_input_between_turns_enters_with_the_first_token_and_leaves_with_the_last() -> None:
    reader, buffer = begun()
    reader.add_chunk(chunk(0, 3, finish="stop"))
    take(buffer)
    second, _ = begun(buffer=buffer, new_input=[77, 78])
    assert buffer.num_tokens == 3
    second.add_chunk(chunk(0, 2))
    assert (buffer.ids.tolist(), second.ids.tolist()) == ([*IDS[:3], 77, 78, *IDS[:2]], IDS[:2])
    second.discard()
    assert (buffer.ids.tolist(), second.num_tokens) == (IDS[:3], 0)
    third, _ = begun(buffer=buffer, new_input=[77, 78])
    third.add_chunk(chunk(0, 4, finish="stop"))
    segment = take(buffer)
    assert (segment.prompt_ids.tolist(), segment.response_ids.tolist()) == ([77, 78], IDS[:4])
    assert (spans_of(segment), segment.text, buffer.text) == ([(1, 0, 4)], TEXT[:4], TEXT[:3] + TEXT[:4])
    assert segment.kept_counts is not None
    assert segment.kept_counts.tolist() == [2] * 4


def test_text_of_several_bytes_is_cut_between_characters() -> None:
    reader, buffer = begun(lambda label: label == "1@a")
    for start, text, label in ((0, "a\u00e4", "1@a"), (2, "\U0001f600b", "2@b")):
        data = json.loads(chunk(start, start + 2, label))
        reader.add_chunk(json.dumps({**data, "text": text}).encode())
    reader.drop_untrusted(lambda _: False)
    assert (buffer.text, take(buffer).text) == ("a\u00e4", "a\u00e4")


@pytest.mark.parametrize("ends", [[4], [2, 4]])
def test_tokens_of_an_adapter_have_its_label_and_those_on_another_base_have_not(ends: list[int]) -> None:
    """An engine names the base alone; it was updated in the middle of the answer."""
    buffer, start = SampleBuffer(), 0
    labels = AdapterLabels("0@base", "3@adapter")
    reader = AnswerReader(buffer, ExpectedAnswer(max_kept=2), sent_under=3, adapter=labels)
    for end in ends:
        last = end == ends[-1]
        versions = spans((0, 3, "0@base"), (3, 4, "0@other")) if last else None
        label = "0@other" if last else "0@base"
        reader.add_chunk(chunk(start, end, label, finish="stop" if last else None, spans=versions))
        start = end
    assert reader.labels == ["3@adapter", "0@other"]
    assert spans_of(take(buffer)) == [(3, 0, 3), (0, 3, 4)]
