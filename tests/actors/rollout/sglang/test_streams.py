"""What a stream holds at each point, however its chunks are written."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.sglang.answers import Answer, oldest_version, segment_of, status_of
from actors.rollout.sglang.streams import Stream
from messages import Int32Array, SampleKey, SampleStatus, WeightSpan

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


def spans_of(answer: Answer) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in segment_of(answer, KEY, Int32Array()).weight_spans]


@given(
    ends=st.lists(st.integers(1, len(IDS)), min_size=1).map(lambda ends: sorted({*ends, len(IDS)})),
    incremental=st.booleans(),
    data=st.data(),
)
def test_the_pieces_are_the_whole_however_it_is_streamed_and_taken(
    ends: list[int], incremental: bool, data: st.DataObject
) -> None:
    stream, pieces, before = Stream(1), list[Answer](), 0
    for end in ends:
        stream.add(chunk(before if incremental else 0, end, finish="stop" if end == len(IDS) else None))
        before = end
        if data.draw(st.booleans()) or end == len(IDS):
            assert stream.num_new > 0
            pieces.append(stream.take())
    assert stream.ended
    assert [token for piece in pieces for token in piece.output_ids] == IDS
    assert "".join(piece.text for piece in pieces) == TEXT
    assert status_of(pieces[-1]) is SampleStatus.COMPLETED
    for piece in pieces:
        segment = segment_of(piece, KEY, Int32Array())
        assert segment.rollout_log_probs.tolist() == [-float(token) for token in piece.output_ids]
        assert segment.weight_spans == (WeightSpan(version=1, start=0, end=len(piece.output_ids)),)
        assert segment.kept_ids is not None
        assert segment.kept_ids.tolist() == [kept for token in piece.output_ids for kept in (token, token + 1)]


def test_log_probs_of_all_so_far_beside_new_tokens_alone_are_understood() -> None:
    stream = Stream(1)
    stream.add(chunk(0, 4))
    second = json.loads(chunk(4, 10, finish="length"))
    second["meta_info"]["output_token_logprobs"] = json.loads(chunk(0, 10))["meta_info"]["output_token_logprobs"]
    stream.add(json.dumps(second).encode())
    assert segment_of(stream.take(), KEY, Int32Array()).rollout_log_probs.tolist() == [-float(token) for token in IDS]


def test_tokens_that_came_around_an_update_count_as_sampled_by_the_old_weights() -> None:
    stream = Stream(1)
    stream.add(chunk(0, 2, "1"))
    stream.add(chunk(0, 6, "2"))
    stream.add(chunk(0, 8, "2"))
    assert spans_of(stream.take()) == [(1, 0, 6), (2, 6, 8)]


def test_the_spans_of_the_last_chunk_are_believed() -> None:
    stream = Stream(1)
    stream.add(chunk(0, 4, "2"))
    assert spans_of(stream.take()) == [(1, 0, 4)]
    exact = [{"version": "1", "start": 0, "end": 5}, {"version": "2", "start": 5, "end": 10}]
    stream.add(chunk(0, 10, "2", finish="stop", spans=exact))
    assert spans_of(stream.take()) == [(1, 0, 1), (2, 1, 6)]


def test_an_abort_without_a_count_keeps_what_came() -> None:
    stream = Stream(1)
    stream.add(chunk(0, 4))
    aborted = json.loads(chunk(0, 4, finish="abort"))
    del aborted["meta_info"]["completion_tokens"]
    stream.add(json.dumps(aborted).encode())
    piece = stream.take()
    assert (piece.output_ids, status_of(piece), stream.ended) == (IDS[:4], SampleStatus.ABORTED, True)


def test_nothing_came_of_a_request_that_was_lost_at_once() -> None:
    piece = Stream(1).take()
    assert (piece.output_ids, oldest_version(piece)) == ([], None)


@pytest.mark.parametrize("second", [chunk(6, 8), chunk(0, 2), b"{}", b'{"error": {"message": "x"}}', b"<html>"])
def test_a_chunk_that_does_not_follow_is_refused(second: bytes) -> None:
    stream = Stream(1)
    stream.add(chunk(0, 4))
    with pytest.raises(ValueError, match=r"chunk|missing|malformed"):
        stream.add(second)


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
    stream, before = Stream(1, lambda label: label not in refused), 0
    spans = [{"version": label, "start": place, "end": place + 1} for place, label in enumerate(labels)]
    for end in ends:
        last = exact and end == len(IDS)
        begin = before if incremental else 0
        stream.add(chunk(begin, end, labels[end - 1], finish="stop" if last else None, spans=spans if last else None))
        before = end
    assert not refused & set(stream.labels) or refused & set(labels)
    stream.drop_untrusted(lambda label: label not in refused)
    rest = stream.rest()
    kept = len(rest.output_ids)
    if exact:
        assert not refused & set(labels[:kept])
    named = [label for start, end in zip([0, *ends], ends, strict=False) for label in [labels[end - 1]] * (end - start)]
    assert exact or not refused & set(named[:kept])
    assert (rest.output_ids, rest.text) == (IDS[:kept], TEXT[:kept])
    assert len(segment_of(rest, KEY, Int32Array()).rollout_log_probs) == kept
    if not refused & set(labels):
        assert (kept, stream.ended) == (len(IDS), exact)
    elif exact:
        assert not stream.ended


def test_what_was_taken_before_stays_taken() -> None:
    stream = Stream(1, lambda label: label == "1@a")
    stream.add(chunk(0, 4, "1@a"))
    assert stream.take().output_ids == IDS[:4]
    assert stream.is_trusted
    stream.add(chunk(4, 6, "1@a"))
    stream.add(chunk(6, 8, "2@b"))
    assert not stream.is_trusted
    stream.drop_untrusted(lambda _: False)
    assert (stream.rest().output_ids, stream.num_taken) == (IDS[4:6], 4)
