"""Held-out preference pairs: as batches, when they are due, and their metrics."""

from typing import Any

import numpy as np
import pytest

from actors.trainer.data.held_out import BATCH_PAIRS, HeldOut, PairSums, held_out_metrics, pair_batch
from messages import Demonstration, Int32Array, Prompt, UInt8Array
from tests.build.topology import topology_with


def pair(number: int, *, chosen: int = 2, rejected: int = 3, mask: Any = None) -> Prompt:
    """A pair of responses to a prompt of two tokens."""
    worse = Demonstration(
        response_ids=Int32Array([9] * rejected), loss_mask=UInt8Array([1] * rejected), text="w" * rejected
    )
    return Prompt(
        data="held-out",
        row=number,
        text="p",
        prompt_ids=Int32Array([number, 1]),
        response_ids=Int32Array([7] * chosen),
        loss_mask=UInt8Array(mask or [1] * chosen),
        response="r" * chosen,
        rejected=worse,
    )


def held_out(pairs: list[Prompt], **settings: Any) -> HeldOut:
    item = {"name": "held-out", "path": "none", "interval": 3, **settings}
    train = {"num_steps": 7, "max_tokens_per_gpu": 8}
    return HeldOut(topology_with(algorithm={"loss": {"type": "rm"}}, eval=[item], train=train), {"held-out": pairs})


def test_a_batch_has_the_chosen_response_of_each_pair_before_the_rejected_one() -> None:
    batch = pair_batch([pair(4, mask=[0, 1]), pair(5, chosen=1)], step=2)
    assert batch.step == 2
    assert batch.tokens_N.tolist() == [4, 1, 7, 7, 4, 1, 9, 9, 9, 5, 1, 7, 5, 1, 9, 9, 9]
    assert batch.loss_mask_N.tolist() == [0, 0, 0, 1, 0, 0, 1, 1, 1, 0, 0, 1, 0, 0, 1, 1, 1]
    assert (batch.rollouts_B.tolist(), batch.parts_B.tolist()) == ([0, 0, 1, 1], [0, 1, 0, 1])
    assert batch.rewards_B.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert batch.lengths_B.tolist() == [4, 5, 3, 5]


def test_a_prompt_without_two_responses_is_refused() -> None:
    prompt = Prompt(data="d", row=3, text="p", prompt_ids=Int32Array([1]))
    with pytest.raises(ValueError, match="row 3 of d is not a preference pair"):
        pair_batch([prompt], step=0)


def test_a_set_is_due_at_its_interval_before_the_first_and_after_the_last_step() -> None:
    pairs = [pair(0)]
    assert [step for step in range(8) if held_out(pairs).due(step)] == [0, 3, 6, 7]
    assert [step for step in range(8) if held_out(pairs, skip_eval_before_train=True).due(step)] == [3, 6, 7]


def test_pairs_over_the_token_limit_are_left_out_and_a_set_without_others_is_never_due() -> None:
    kept, long = pair(0, rejected=6), pair(1, chosen=7)
    (batch,) = held_out([kept, long]).batches("held-out", 0)
    assert batch.lengths_B.tolist() == [4, 8]
    assert held_out([long]).due(0) == []


def test_all_pairs_are_in_one_batch_each() -> None:
    batches = list(held_out([pair(number) for number in range(BATCH_PAIRS + 2)]).batches("held-out", 0))
    assert [len(batch.lengths_B) for batch in batches] == [2 * BATCH_PAIRS, 4]
    assert np.concatenate([batch.tokens_N[batch.starts_B[::2]] for batch in batches]).tolist() == list(
        range(BATCH_PAIRS + 2)
    )


def test_metrics_are_means_over_the_pairs_of_all_batches() -> None:
    first = {"train/loss": 3.0, "train/preference_loss": 3.0, "train/rewards_accuracies": 2.0}
    second = {"train/loss": 1.0, "train/preference_loss": 1.0, "train/rewards_accuracies": 1.0}
    found = held_out_metrics("s", [PairSums(3, first), PairSums(1, second)])
    assert found == {"eval/s": 0.75, "eval/s/preference_loss": 1.0}
