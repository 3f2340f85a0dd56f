"""Columns of engine pools join the tokens of their samples; a sample without its column does not train."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from actors.trainer.data.assembly import CollectedGroup, assemble, problems_of
from actors.trainer.data.batch import LeftOut, make_micro_batch
from actors.trainer.data.columns import column_seqs
from actors.trainer.data.context import Context
from actors.trainer.data.skipped import with_mask
from messages import ColumnPublished, Float32Array, Int32Array, SampleKey, SegmentsPublished
from tests.actors.trainer.logs import group_of, segment, summary

NAMES = ("teacher_log_probs",)
KEY = SampleKey(group_id=5, attempt=0, index=0)
TURNS = (
    segment(KEY, [1, 2], [3, 4], ((1, 0, 2),)),
    segment(KEY, [5], [6, 7, 8], ((1, 0, 3),), mask=[1, 0, 1]),
)
MESSAGE = SegmentsPublished(group_id=5, attempt=0, lease="lease", segments=TURNS)
SAMPLE = msgspec.structs.replace(summary(0, [(9, 0), (9, 1)], reward=0.5), columns={"teacher_log_probs": 12})
COLUMN = ColumnPublished(sample=KEY, column="teacher_log_probs", values=Float32Array([-1, -2, -3, -4, -5, -6]))


def test_a_column_covers_the_tokens_after_the_first_prompt_and_is_0_where_a_token_does_not_train() -> None:
    left_out = msgspec.structs.replace(summary(1, [(9, 0)]), columns={"teacher_log_probs": 13})
    group = CollectedGroup(
        group_of(5, (SAMPLE, left_out)), {9: MESSAGE}, problems={(1, 0): "broken"}, columns={12: COLUMN}
    )
    batch = assemble(0, [group], {1: 0}, column_names=NAMES)
    assert batch is not None
    assert batch.tokens_N.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0]
    assert batch.teacher_log_probs_N is not None
    assert batch.teacher_log_probs_N.tolist() == [0, 0, -1, -2, 0, -4, 0, -6, 0]
    assert batch.left_out_B.tolist() == [LeftOut.NO, LeftOut.INVALID]


TOPK = Int32Array(range(12)), Float32Array([-number - 1.0 for number in range(12)])  # two for each of six tokens
WITH_TOPK = msgspec.structs.replace(COLUMN, topk_ids=TOPK[0], topk_log_probs=TOPK[1])


def test_the_likeliest_tokens_of_a_teacher_join_the_tokens_and_follow_them_into_a_micro_batch() -> None:
    left_out = msgspec.structs.replace(summary(1, [(9, 0)]), columns={"teacher_log_probs": 13})
    group = CollectedGroup(
        group_of(5, (SAMPLE, left_out)), {9: MESSAGE}, problems={(1, 0): "broken"}, columns={12: WITH_TOPK}
    )
    batch = assemble(0, [group], {1: 0}, column_names=NAMES, topk=2)
    assert batch is not None
    assert batch.teacher_topk_ids_N is not None
    assert batch.teacher_topk_ids_N.tolist() == [[0, 0], [0, 0], *TOPK[0].reshape(6, 2).tolist(), [0, 0]]
    whole = make_micro_batch(batch, np.arange(2), packed=True, multiple=4)
    assert whole.topk is not None
    assert whole.topk.ids.tolist() == [[0, 1], [2, 3], [6, 7], [10, 11]]  # of the tokens that train
    assert whole.topk.log_probs.tolist() == [[-1, -2], [-3, -4], [-7, -8], [-11, -12]]
    parts = [make_micro_batch(batch, np.arange(2), packed=True, multiple=4, context=Context(i, 2)) for i in range(2)]
    joined = {
        column: ids
        for part in parts
        if part.topk is not None
        for column, ids in zip(part.columns_M.tolist(), part.topk.ids.tolist(), strict=True)
    }
    assert joined == dict(zip(whole.columns_M.tolist(), whole.topk.ids.tolist(), strict=True))
    masked = replace(batch, loss_mask_N=np.where(np.arange(9) == 3, 0, batch.loss_mask_N).astype(np.uint8))
    fewer = with_mask(masked, whole)
    assert fewer.topk is not None
    assert fewer.topk.ids.tolist() == [[0, 1], [6, 7], [10, 11]]


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        (WITH_TOPK, None),
        (COLUMN, "0 top-k ids and 0 log-probs, not 12 (algorithm.opd.distillation.topk = 2)"),
        (msgspec.structs.replace(WITH_TOPK, topk_ids=TOPK[0][:6]), "6 top-k ids and 12 log-probs, not 12"),
        (msgspec.structs.replace(WITH_TOPK, topk_ids=Int32Array([5] * 12)), "token 0 has top-k token 5 twice"),
        (msgspec.structs.replace(WITH_TOPK, topk_ids=Int32Array(range(20, 32))), "token 5 has top-k id 30"),
    ],
)
def test_a_sample_needs_the_likeliest_tokens_of_its_teacher(column: ColumnPublished, problem: str | None) -> None:
    found = problems_of(group_of(5, (SAMPLE,)), {9: MESSAGE}, 30, columns={12: column}, column_names=NAMES, topk=2)
    assert len(found) == (problem is not None)
    assert problem is None or found[0, 0].startswith(f"teacher_log_probs: {problem}")


def test_rewards_per_token_join_all_tokens_and_a_sample_may_have_one_reward_instead() -> None:
    rewarded = msgspec.structs.replace(COLUMN, column="token_rewards")
    sample = msgspec.structs.replace(SAMPLE, columns={"token_rewards": 12})
    alone = msgspec.structs.replace(summary(1, [(10, 0)], reward=0.5))
    message = replace_key(MESSAGE, index=1)
    columns, names = {12: rewarded}, ("token_rewards",)
    group = CollectedGroup(group_of(5, (sample, alone)), {9: MESSAGE, 10: message}, columns=columns)
    batch = assemble(0, [group], {1: 0}, column_names=names)
    assert batch is not None
    assert batch.token_rewards_N is not None
    assert batch.token_rewards_N.tolist() == [0, 0, -1, -2, -3, -4, -5, -6, *[0] * 4]
    of_group = group_of(5, (sample, alone))
    payloads = {9: MESSAGE, 10: message}
    assert problems_of(of_group, payloads, None, columns=columns, column_names=names) == {}
    broken = {12: msgspec.structs.replace(rewarded, values=Float32Array([0, 0, 0, 0, 0, np.nan]))}
    found = problems_of(of_group, payloads, None, columns=broken, column_names=names)
    assert found == {(0, 0): "token_rewards: that of token 5 is nan"}


def replace_key(message: SegmentsPublished, *, index: int) -> SegmentsPublished:
    """The first segment of a message, as that of another sample."""
    first = message.segments[0]
    key = msgspec.structs.replace(first.sample, index=index)
    return msgspec.structs.replace(message, segments=(msgspec.structs.replace(first, sample=key),))


def test_without_column_names_a_batch_has_no_column() -> None:
    batch = assemble(0, [CollectedGroup(group_of(5, (SAMPLE,)), {9: MESSAGE}, columns={12: COLUMN})], {1: 0})
    assert batch is not None
    assert batch.teacher_log_probs_N is None


@pytest.mark.parametrize(
    ("columns", "column", "problem"),
    [
        ({}, COLUMN, "it has no teacher_log_probs"),
        ({"teacher_log_probs": 12}, COLUMN, None),
        (
            {"teacher_log_probs": 12},
            msgspec.structs.replace(COLUMN, values=Float32Array([-1.0])),
            "it has 1 teacher_log_probs for 6 tokens",
        ),
        (
            {"teacher_log_probs": 12},
            msgspec.structs.replace(COLUMN, values=Float32Array([-1, -2, float("nan"), -4, -5, -6])),
            "teacher_log_probs: token 2 has log-prob nan",
        ),
        (
            {"teacher_log_probs": 12},
            msgspec.structs.replace(COLUMN, sample=msgspec.structs.replace(KEY, index=3)),
            "its teacher_log_probs in message 12 are teacher_log_probs of SampleKey",
        ),
        (
            {"teacher_log_probs": 12},
            msgspec.structs.replace(COLUMN, column="values"),
            "its teacher_log_probs in message 12 are values of SampleKey",
        ),
    ],
)
def test_a_sample_needs_its_own_column(columns: dict[str, int], column: ColumnPublished, problem: str | None) -> None:
    group = group_of(5, (msgspec.structs.replace(SAMPLE, columns=columns),))
    found = problems_of(group, {9: MESSAGE}, None, columns={12: column}, column_names=NAMES)
    assert len(found) == (problem is not None)
    assert problem is None or found[0, 0].startswith(problem)


def test_only_columns_that_the_recipe_needs_are_fetched_and_none_of_samples_that_are_too_long() -> None:
    more = msgspec.structs.replace(SAMPLE, columns={"teacher_log_probs": 12, "values": 14})
    long = msgspec.structs.replace(summary(2, [(9, 0)]), columns={"teacher_log_probs": 15})
    assert column_seqs(group_of(5, (more, long)), NAMES, {(2, 0)}) == [12]
    assert column_seqs(group_of(5, (more,)), ()) == []
