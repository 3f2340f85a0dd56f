"""From an engine's answer to a segment and a status."""

import json
import re
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.samples.buffer import SampleBuffer
from actors.rollout.sglang.answers import Answer, TokenList, decode_answer, decode_ids, numbers_of, status_of
from actors.rollout.sglang.checks import ExpectedAnswer, NewTokens, tokens_problem
from actors.rollout.sglang.reading import AnswerReader
from messages import EngineNumbers, Int32Array, SampleKey, SampleStatus, Segment, WeightSpan

KEY = SampleKey(group_id=1, attempt=0, index=2)
PROMPT = Int32Array([7, 8])


def answer(ids: list[int], **meta: Any) -> Answer:
    """As it comes over HTTP; every token has a log-prob of its own."""
    fields = {
        "finish_reason": {"type": "stop", "matched": ids[-1] if ids else 1},
        "weight_version": "3",
        "output_token_logprobs": [[-0.5 - place, token, None] for place, token in enumerate(ids)],
        "a_field_that_nobody_reads": 1,
    }
    return decode_answer(json.dumps({"text": "abc", "output_ids": ids, "meta_info": {**fields, **meta}}).encode())


def read(given: Answer, *, expected: ExpectedAnswer | None = None) -> tuple[AnswerReader, Segment]:
    buffer = SampleBuffer()
    reader = AnswerReader(buffer, expected or ExpectedAnswer())
    reader.add_whole(given)
    return reader, buffer.take(KEY, PROMPT)


def test_tokens_and_log_probs_come_from_the_same_list_and_every_token_trains() -> None:
    _, segment = read(answer([4, 5, 6]))
    assert segment.response_ids.tolist() == [4, 5, 6]
    assert segment.rollout_log_probs.tolist() == [-0.5, -1.5, -2.5]
    assert segment.loss_mask.tolist() == [1, 1, 1]
    assert (segment.prompt_ids.tolist(), segment.text, segment.sample) == ([7, 8], "abc", KEY)
    assert (segment.response_ids.dtype, segment.rollout_log_probs.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "truncated"), ("abort", "aborted")])
def test_how_a_request_ended_is_the_status_of_its_sample(reason: str, status: str) -> None:
    reader, _ = read(answer([4], finish_reason={"type": reason}))
    assert reader.status is SampleStatus(status)


@pytest.mark.parametrize("reason", [None, {"type": "tired"}, {}])
def test_an_end_that_is_not_known_is_refused(reason: dict[str, str] | None) -> None:
    with pytest.raises(ValueError, match="expected stop, length or abort"):
        status_of(reason)
    with pytest.raises(ValueError, match="expected stop, length or abort"):
        read(answer([4], finish_reason=reason))


def test_versions_are_kept_by_the_token() -> None:
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    _, segment = read(answer([4, 5, 6], weight_versions=spans))
    assert segment.weight_spans == (WeightSpan(version=3, start=0, end=2), WeightSpan(version=4, start=2, end=3))
    (whole,) = read(answer([4, 5, 6]))[1].weight_spans
    assert whole == WeightSpan(version=3, start=0, end=3)


def test_labels_of_loads_are_plain_versions_in_a_segment() -> None:
    labels = ["3@engine.policy.0.a.1", "3@engine.policy.0.a.2", "4@engine.policy.0.a.3"]
    spans = [{"version": label, "start": place, "end": place + 1} for place, label in enumerate(labels)]
    buffer = SampleBuffer()
    reader = AnswerReader(buffer)
    reader.add_whole(answer([4, 5, 6], weight_versions=spans))
    assert reader.labels == buffer.new_labels == labels
    assert (reader.is_recent(3), reader.is_recent(4)) == (True, False)
    segment = buffer.take(KEY, PROMPT)
    assert segment.weight_spans == (WeightSpan(version=3, start=0, end=2), WeightSpan(version=4, start=2, end=3))


@pytest.mark.parametrize("meta", [{"weight_versions": [{"version": "3", "start": 0, "end": 0}]}, {}])
def test_without_tokens_nothing_is_labelled(meta: dict[str, Any]) -> None:
    reader, segment = read(answer([], finish_reason={"type": "abort"}, **meta))
    assert (reader.labels, reader.is_recent(9), len(segment.response_ids)) == ([], True, 0)


def test_a_request_aborted_in_the_queue_is_an_empty_segment() -> None:
    _, segment = read(answer([], finish_reason={"type": "abort"}, weight_version=None))
    assert (len(segment.response_ids), segment.weight_spans) == (0, ())


def test_log_probs_of_other_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="0 log-probs and 3 tokens"):
        read(answer([4, 5, 6], output_token_logprobs=[]))


def test_tokens_of_unknown_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="does not report which weights"):
        read(answer([4], weight_version=None))


def test_the_numbers_of_requests_are_added_up_over_those_that_the_engine_ended() -> None:
    ended = b"""{"output_ids": [1, 2, 3], "meta_info": {"finish_reason": {"type": "stop"}, "prompt_tokens": 7,
        "completion_tokens": 3, "cached_tokens": 4, "num_retractions": 1, "queue_time": 0.5, "spec_verify_ct": 2,
        "spec_num_proposed_drafts": 6, "spec_num_correct_drafts": 1}}"""
    in_queue = b"""{"meta_info": {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}}"""
    lost = b"""{"meta_info": {"prompt_tokens": 7}}"""
    assert numbers_of(decode_answer(data).meta_info for data in (ended, ended, in_queue, lost)) == EngineNumbers(
        num_requests=3,
        prompt_tokens=14,
        cached_tokens=8,
        num_retractions=2,
        num_timed=2,
        queue_time_s=1.0,
        max_queue_time_s=0.5,
        draft_tokens=12,
        accepted_draft_tokens=2,
        verify_steps=4,
        verified_tokens=6,
    )


def test_log_probs_among_kept_tokens_are_those_of_the_segment() -> None:
    masks = {"output_token_sampling_mask": [[9, 4], [5]], "output_token_sampling_logprobs": [-0.25, 0.0]}
    _, segment = read(answer([4, 5], **masks), expected=ExpectedAnswer(max_kept=3))
    assert segment.rollout_log_probs.tolist() == [-0.25, 0.0]
    assert segment.kept_counts is not None
    assert segment.kept_ids is not None
    assert (segment.kept_counts.tolist(), segment.kept_ids.tolist()) == ([2, 1], [9, 4, 5])
    assert read(answer([4, 5]))[1].kept_counts is None


@pytest.mark.parametrize(
    ("masks", "log_probs", "problem"),
    [
        ([[4, 9], [5]], [-0.25, 0.0], None),
        ([], [], "0 sampling masks and 0 log-probs came for 2 tokens: rollout.return_sampling_mask needs SGLang"),
        ([[4, 9], [5]], [-0.25], "2 sampling masks and 1 log-probs came for 2 tokens"),
        ([[4, 9], [6]], [-0.25, 0.0], "token 1 has id 5, which is not among its 1 kept tokens"),
        ([[4, 9, 9], [5]], [-0.25, 0.0], "token 0 has kept token 9 twice"),
        ([[4, 16], [5]], [-0.25, 0.0], r"kept token 1 has id 16 \(allowed: 0 to 15\)"),
        ([[4, 1, 2, 3], [5]], [-0.25, 0.0], "a sampling mask has 4 tokens; top_k allows 3"),
        ([[4, 9], [5]], [None, 0.0], "token 0 has log-prob null"),
        ([[4, 9], [5]], [-0.25, 0.5], "token 1 has log-prob 0.5"),
        ([[4, 9], []], [-0.25, 0.0], "token 1 has id 5, and no kept tokens"),
    ],
)
def test_kept_tokens_that_cannot_be_true_are_found(masks: Any, log_probs: Any, problem: str | None) -> None:
    tokens = NewTokens([4, 5], [4, 5], [-0.5, -1.5], masks, log_probs)
    found = tokens_problem(tokens, ExpectedAnswer(vocab_size=16, max_kept=3))
    assert (found is None) if problem is None else re.search(problem, found or "")


@given(
    ends=st.lists(st.integers(0, 40), min_size=1, max_size=8).map(sorted),
    spaces=st.lists(st.sampled_from([(",", ":"), (", ", ": ")]), min_size=8, max_size=8),
)
def test_a_repeated_list_gives_its_new_entries_alone_however_it_is_written(
    ends: list[int], spaces: list[tuple[str, str]]
) -> None:
    values = [(place * 7919) % 1000 - 500 for place in range(40)]
    tokens, found = TokenList[int](decode_ids, b","), list[int]()
    for end, separators in zip(ends, spaces, strict=False):
        data = msgspec.Raw(json.dumps(values[:end], separators=separators).encode())
        new, length = tokens.read(data, len(found), end)
        assert length == end
        found += new
    assert found == values[: ends[-1]]


def test_the_entries_that_came_before_are_not_decoded_again() -> None:
    tokens = TokenList[int](decode_ids, b",")
    assert tokens.read(msgspec.Raw(b"[1,2]"), 0, 2) == ([1, 2], 2)
    assert tokens.read(msgspec.Raw(b"[1,2,3]"), 2, 3) == ([3], 3)
    assert tokens.read(msgspec.Raw(b"[x,y,z,4]"), 3, 4) == ([4], 4), "only bytes behind the earlier entries are read"
