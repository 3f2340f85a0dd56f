"""A sample's tokens: appended once, truncated before what was taken, taken as segments."""

import sys
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.samples.buffer import GrowingArray, LabelSpan, Mark, SampleBuffer
from messages import Int32Array, SampleKey, Segment

KEY = SampleKey(group_id=0, attempt=0, index=0)
PROMPT = Int32Array([7, 8])


def append(buffer: SampleBuffer, ids: list[int], label: str = "1@a", text: str | None = None) -> None:
    log_probs = -np.array(ids, np.float64)
    buffer.append(np.array(ids, np.int64), log_probs, "".join(map(chr, ids)) if text is None else text, label)


@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50), max_size=20))
def test_a_growing_array_holds_what_was_appended_in_at_most_twice_the_memory(parts: list[list[int]]) -> None:
    array = GrowingArray("<i4")
    for part in parts:
        array.extend(np.array(part, np.int32))
    whole = [value for part in parts for value in part]
    assert array.view().tolist() == whole
    base = array.view().base
    assert base is None or base.size <= max(64, 2 * len(whole))


Step = tuple[str, Any]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.integers(97, 2000), max_size=5)),
        st.tuples(st.just("take"), st.none()),
        st.tuples(st.just("truncate"), st.floats(0, 1)),
    ),
    max_size=30,
)


@given(steps)
def test_a_buffer_holds_its_tokens_whatever_is_dropped_and_taken(steps: list[Step]) -> None:
    buffer, ids, num_taken = SampleBuffer(), list[int](), 0
    marks, segments = [Mark(0, 0)], list[Segment]()
    for step, value in steps:
        match step:
            case "append":
                append(buffer, value)
                ids += value
                marks.append(buffer.mark)
            case "take":
                segments.append(buffer.take(KEY, PROMPT))
                num_taken = len(ids)
            case _:
                mark = marks[int(value * (len(marks) - 1))]
                buffer.truncate(mark)
                ids = ids[: max(mark.num_tokens, num_taken)]
                marks = [each for each in marks if each.num_tokens <= len(ids)]
    segments.append(buffer.take(KEY, PROMPT))
    assert buffer.ids.tolist() == ids == [token for segment in segments for token in segment.response_ids.tolist()]
    assert buffer.log_probs.tolist() == [-float(token) for token in ids]
    assert buffer.text == "".join(map(chr, ids)) == "".join(segment.text for segment in segments)


def test_a_taken_segment_does_not_change_when_the_buffer_goes_on() -> None:
    buffer = SampleBuffer()
    append(buffer, [1, 2, 3])
    segment = buffer.take(KEY, PROMPT)
    append(buffer, [9] * 500)
    buffer.truncate(Mark(0, 0))
    append(buffer, [8] * 500)
    assert segment.response_ids.tolist() == [1, 2, 3]
    assert buffer.ids.tolist() == [1, 2, 3] + [8] * 500


def test_exact_labels_replace_those_of_the_tokens_that_were_not_taken() -> None:
    buffer = SampleBuffer()
    append(buffer, [1, 2], "1@a")
    buffer.take(KEY, PROMPT)
    append(buffer, [3, 4, 5], "1@a")
    buffer.relabel([LabelSpan("1@a", 0, 3), LabelSpan("2@b", 3, 4), LabelSpan("2@c", 4, 5)])
    assert buffer.new_labels == ["1@a", "2@b", "2@c"]
    assert buffer.oldest_new_version == 1
    spans = [(span.version, span.start, span.end) for span in buffer.take(KEY, PROMPT).weight_spans]
    assert spans == [(1, 0, 1), (2, 1, 3)]
    assert buffer.oldest_new_version is None


def test_kept_tokens_stay_with_their_tokens() -> None:
    buffer = SampleBuffer()
    append(buffer, [1])  # of an attempt that did not record them
    for ids, counts, kept in (([2, 3], [1, 2], [2, 3, 4]), ([5], [1], [5])):
        buffer.append(np.array(ids), np.zeros(len(ids)), "", "1@a", (np.array(counts), np.array(kept)))
    buffer.truncate(Mark(3, 0))
    segment = buffer.take(KEY, PROMPT)
    assert segment.kept_counts is not None
    assert segment.kept_ids is not None
    assert (segment.kept_counts.tolist(), segment.kept_ids.tolist()) == ([0, 1, 2], [2, 3, 4])


def test_text_ends_behind_the_stop_text_that_was_not_taken() -> None:
    buffer = SampleBuffer()
    append(buffer, [1], text="a.b")
    buffer.take(KEY, PROMPT)
    append(buffer, [2], text="cd.ef")
    buffer.end_text_after(".")
    assert buffer.text == "a.bcd."


def test_a_token_takes_at_most_forty_bytes() -> None:
    buffer, num_tokens = SampleBuffer(), 33_000  # just after the arrays doubled
    for start in range(0, num_tokens, 64):
        append(buffer, list(range(start, start + 64)), text="abcd" * 64)
    held = [getattr(buffer, name) for name in ("_ids", "_log_probs")]
    size = sum(array.view().base.nbytes for array in held) + sys.getsizeof(buffer._text)
    assert size / buffer.num_tokens <= 40
