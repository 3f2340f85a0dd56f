"""Which ids and log-probs are believed: by hand, and for anything that JSON or an array can hold."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from messages import Float32Array, Int32Array, SampleKey, Segment, UInt8Array, WeightSpan
from runtime.data.tokens import are_possible, id_problem, log_prob_problem, sample_problem


@pytest.mark.parametrize("wrong", [-1, 8, 10**6, 2**31, 2**63, -(2**70)])
def test_an_id_outside_the_vocabulary_is_named_with_its_place(wrong: int) -> None:
    assert id_problem([0, 7, wrong], 8) == f"token 2 has id {wrong} (allowed: 0 to 7)"
    assert id_problem([0, 7, 3], 8) is None


def test_without_a_model_only_negative_ids_are_known_to_be_wrong() -> None:
    assert id_problem([0, 10**9], None) is None
    assert id_problem(Int32Array([0, -1]), None) == "token 1 has id -1 (allowed: 0 or more)"


@pytest.mark.parametrize("wrong", [-1e39, -3.4e38, -65504.0, -1000.1, 0.0011, 5.0, math.inf, -math.inf, math.nan])
def test_a_log_prob_that_no_model_gives_is_named_with_its_place(wrong: float) -> None:
    assert log_prob_problem([-0.5, wrong]) == f"token 1 has log-prob {wrong:g} (allowed: -1000 to 0.001)"
    packed = log_prob_problem(Float32Array([-0.5, wrong]))
    assert packed is not None
    assert packed.startswith("token 1 has log-prob")


def test_a_missing_log_prob_is_null_and_rounding_above_zero_is_allowed() -> None:
    assert log_prob_problem([-0.5, None]) == "token 1 has log-prob null (allowed: -1000 to 0.001)"
    assert log_prob_problem([0.0, 1e-6, -1000.0]) is None
    assert log_prob_problem([]) is None


@given(st.lists(st.integers() | st.integers(0, 7)))
def test_ids_are_right_exactly_if_all_are_in_the_vocabulary(ids: list[int]) -> None:
    assert (id_problem(ids, 8) is None) == all(0 <= token < 8 for token in ids)


@given(st.lists(st.floats() | st.none() | st.floats(-1000, 0)))
def test_log_probs_are_right_exactly_if_all_are_in_bounds(log_probs: list[float | None]) -> None:
    right = all(value is not None and -1000 <= value <= 1e-3 for value in log_probs)
    assert (log_prob_problem(log_probs) is None) == right


def segment(prompt: list[int], response: list[int], log_probs: list[float]) -> Segment:
    return Segment(
        sample=SampleKey(group_id=0, attempt=0, index=0),
        prompt_ids=Int32Array(prompt),
        response_ids=Int32Array(response),
        loss_mask=UInt8Array(np.ones(len(response))),
        rollout_log_probs=Float32Array(log_probs),
        weight_spans=(WeightSpan(version=1, start=0, end=len(response)),) if response else (),
    )


def test_a_sample_is_wrong_where_one_of_its_segments_is_or_their_tokens_are_others_than_said() -> None:
    right = segment([1, 2], [3], [-0.5])
    assert sample_problem([right], 8, num_tokens=3) is None
    assert sample_problem([right], 3) == "response: token 0 has id 3 (allowed: 0 to 2)"
    assert sample_problem([right, segment([9], [3], [-0.5])], 8) == (
        "segment 1, prompt: token 0 has id 9 (allowed: 0 to 7)"
    )
    wrong = segment([1], [3, 4], [-0.5, math.nan])
    assert sample_problem([wrong], 8) == "response: token 1 has log-prob nan (allowed: -1000 to 0.001)"
    assert sample_problem([right], 8, num_tokens=4) == "its segments have 3 tokens, but 4 are reported"


@pytest.mark.parametrize(
    ("prompt", "response", "log_prob"),
    [([1], [8], -0.5), ([-1], [1], -0.5), ([1], [1], math.nan), ([1], [1], 0.5), ([1], [1], -math.inf), ([8], [], 0.0)],
)
def test_one_impossible_number_among_many_segments_is_found(
    prompt: list[int], response: list[int], log_prob: float
) -> None:
    right, wrong = segment([1, 7], [3], [-0.5]), segment(prompt, response, [log_prob] * len(response))
    assert are_possible([right, right], 8)
    assert not are_possible([right, wrong, right], 8)
    assert sample_problem([wrong], 8) is not None
    assert are_possible([], 8)
    assert are_possible([segment([], [], [])], 8)
