"""Columns of samples, of engine pools and graders: checks, and their join to the tokens of a batch."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from actors.trainer.data.skipped import SamplePlace
from messages import ColumnPublished, GroupCompleted, SampleSummary, Segment
from runtime.data.tokens import given_log_prob_problem, topk_problem
from runtime.settings.topology import TEACHER_LOG_PROBS, TOKEN_REWARDS
from runtime.util.rewards import first_wrong

Columns = Mapping[int, ColumnPublished]  # by sequence in the data stream


def column_seqs(completed: GroupCompleted, names: Collection[str], too_long: Collection[SamplePlace] = ()) -> list[int]:
    """Data stream sequences of the named columns of a group, without samples that are too long."""
    wanted = (sample for sample in completed.samples if (sample.index, sample.part) not in too_long)
    return sorted({sample.columns[name] for sample in wanted for name in names if name in sample.columns})


def column_problem(
    completed: GroupCompleted,
    sample: SampleSummary,
    segments: Sequence[Segment],
    columns: Columns,
    names: Sequence[str],
    *,
    topk: int = 0,
    vocab_size: int | None = None,
) -> str | None:
    """Describe the first column that a sample lacks, or that is not of its tokens; None if there is none.

    Args:
        completed: The sample's group.
        sample: The sample.
        segments: Its segments in order.
        columns: Fetched columns.
        names: Names of the columns that it needs; it may have one reward instead of rewards per token.
        topk: Number of likeliest tokens that a teacher's column needs at each place.
        vocab_size: Vocabulary size of the trained model. None: unknown.
    """
    for name in names:
        if name not in sample.columns:
            if name == TOKEN_REWARDS:  # its grader gave one reward
                continue
            return f"it has no {name}"
        found = columns[sample.columns[name]]
        key = found.sample
        if (key.group_id, key.index, key.part, found.column) != (completed.group_id, sample.index, sample.part, name):
            return f"its {name} in message {sample.columns[name]} are {found.column} of {key}"
        if len(found.values) != (length := column_length(segments)):
            return f"it has {len(found.values)} {name} for {length} tokens"
        if name == TOKEN_REWARDS:
            if (place := first_wrong(np.asarray(found.values))) is not None:
                return f"{name}: that of token {place} is {found.values[place]}"
            continue
        if (problem := given_log_prob_problem(np.asarray(found.values))) is not None:
            return f"{name}: {problem}"
        if topk and name == TEACHER_LOG_PROBS and (problem := _topk_problem(found, topk, vocab_size)) is not None:
            return f"{name}: {problem}"
    return None


def _topk_problem(found: ColumnPublished, topk: int, vocab_size: int | None) -> str | None:
    """Describe why a column does not have `topk` possible tokens at each place; None if it does."""
    ids, log_probs, needed = found.topk_ids, found.topk_log_probs, topk * len(found.values)
    if ids is None or log_probs is None or not len(ids) == len(log_probs) == needed:
        sizes = [0 if part is None else len(part) for part in (ids, log_probs)]
        return f"{sizes[0]} top-k ids and {sizes[1]} log-probs, not {needed} (algorithm.opd.distillation.topk = {topk})"
    return topk_problem(np.asarray(ids).reshape(-1, topk), np.asarray(log_probs).reshape(-1, topk), vocab_size)


def column_length(segments: Sequence[Segment]) -> int:
    """Count the tokens after a sample's first prompt."""
    num_tokens = sum(len(segment.prompt_ids) + len(segment.response_ids) for segment in segments)
    return num_tokens - len(segments[0].prompt_ids) if segments else 0


def of_all_tokens(column: ColumnPublished | None, segments: Sequence[Segment]) -> NDArray[np.float32]:
    """Return a column over all tokens of a sample: 0 for its first prompt. Without segments: of the token left in."""
    if not segments:
        return np.zeros(1, dtype=np.float32)
    length = column_length(segments)
    values = np.zeros(length, dtype=np.float32) if column is None else np.asarray(column.values)
    return np.concatenate([np.zeros(len(segments[0].prompt_ids), dtype=np.float32), values])


def topk_of_all_tokens(
    column: ColumnPublished | None, segments: Sequence[Segment], topk: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return a teacher's likeliest tokens and their log-probs over all tokens of a sample, as `of_all_tokens` does.

    Returns:
        [n, K] each.
    """
    if column is None or column.topk_ids is None or column.topk_log_probs is None or not segments:
        return np.zeros((1, topk), dtype=np.int32), np.zeros((1, topk), dtype=np.float32)
    before = [(len(segments[0].prompt_ids), 0), (0, 0)]
    ids, log_probs = np.asarray(column.topk_ids), np.asarray(column.topk_log_probs)
    return np.pad(ids.reshape(-1, topk), before), np.pad(log_probs.reshape(-1, topk), before)
