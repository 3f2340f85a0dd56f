"""Metrics of one step, computed from its groups and its evaluation, and metrics.jsonl, a file of such rows."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from messages import EngineNumbers
from runtime.report.group_numbers import GroupNumbers, mean_of
from runtime.util.files import append_line, write_atomically

MetricRow = dict[str, Any]  # by name
STEP: Final = "eval/step"  # train steps before an evaluation
UNGRADED: Final = "-ungraded_ratio"
NOT_ASKED: Final = "-not_asked"
NOT_MEANS: Final = (
    "-truncated_ratio",
    "-newer_weights_ratio",
    NOT_ASKED,
    UNGRADED,
)  # suffixes of other metrics of an evaluation set


def rewards_of(groups: Sequence[GroupNumbers]) -> list[float]:
    """Return all rewards of a batch."""
    return [reward for group in groups for reward in group.rewards]


def group_metrics(groups: Sequence[GroupNumbers], *, graded: bool) -> MetricRow:
    """Compute the metrics of a batch's groups.

    Args:
        graded: whether samples have scores; demonstrations do not.
    """
    lengths = [length for group in groups for length in group.response_lens]
    mean, ungraded = mean_of(rewards_of(groups)), sum(group.num_ungraded for group in groups)
    failed = sum(group.num_failed for group in groups)
    own_rewards = sum(group.num_own_rewards for group in groups)
    if mean is None or not lengths:
        return {}
    rewards: MetricRow = _reward_metrics(groups, mean) if graded else {}
    return {
        **rewards,
        "rollout/response_len/mean": statistics.fmean(lengths),
        "rollout/response_len/median": statistics.median(lengths),
        "rollout/response_len/max": max(lengths),
        "rollout/response_len/min": min(lengths),
        "rollout/truncated_ratio": sum(group.num_truncated for group in groups) / len(lengths),
        **({"rollout/no_score_ratio": ungraded / len(lengths)} if ungraded else {}),
        **({"rollout/failed_sample_ratio": failed / len(lengths)} if failed else {}),
        **({"rollout/own_reward_ratio": own_rewards / len(lengths)} if own_rewards else {}),
        **_round_metrics([turns for group in groups for turns in group.round_numbers]),
        "perf/group_rollout_time": statistics.fmean(group.rollout_time_s for group in groups),
        **_engine_metrics(groups, num_samples=len(lengths)),
    }


def _engine_metrics(groups: Sequence[GroupNumbers], *, num_samples: int) -> MetricRow:
    """Compute metrics from the engines' statistics. A missing number gives no metric, as for offline samples."""
    engines = [group.engine for group in groups if group.engine.num_requests]
    sums: MetricRow = {name: sum([getattr(each, name) for each in engines]) for name in EngineNumbers.__struct_fields__}
    sums["max_queue_time_s"] = max([each.max_queue_time_s for each in engines], default=0.0)
    of = EngineNumbers(**sums)
    row: MetricRow = {"rollout/num_retractions": of.num_retractions} if of.num_requests else {}
    if of.prompt_tokens:
        row["rollout/prefix_cache_hit_rate"] = of.cached_tokens / of.prompt_tokens
        row["rollout/avg_cached_tokens_per_sample"] = of.cached_tokens / num_samples
    if of.draft_tokens:
        row["rollout/spec_accept_rate"] = of.accepted_draft_tokens / of.draft_tokens
    if of.verify_steps:
        row["rollout/spec_accept_length"] = of.verified_tokens / of.verify_steps
    if of.num_timed:
        row["perf/request/queue_time/mean"] = of.queue_time_s / of.num_timed
        row["perf/request/queue_time/max"] = of.max_queue_time_s
    return row


def _reward_metrics(groups: Sequence[GroupNumbers], mean: float) -> MetricRow:
    equal = Counter(round(group.rewards[0], 1) for group in groups if len(set(group.rewards)) == 1)
    return {
        "rollout/raw_reward": mean,
        **{f"rollout/zero_std/count_{reward:g}": count for reward, count in sorted(equal.items())},
        "perf/group_reward_time": statistics.fmean(group.reward_time_s for group in groups),
    }


def _round_metrics(turns: Sequence[float]) -> MetricRow:
    """Compute metrics of the numbers of turns that samples of a custom generate function report."""
    if not turns:
        return {}
    named = {"mean": statistics.fmean(turns), "max": max(turns), "min": min(turns)}
    return {f"multi_turn/round_number_{name}": value for name, value in named.items()}


def drop_metrics(now: Mapping[str, int], before: Mapping[str, int]) -> MetricRow:
    """Return the number of groups dropped since the previous step, by reason."""
    new = {reason: count - before.get(reason, 0) for reason, count in now.items()}
    return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in new.items() if count}


def eval_means(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the mean reward of each evaluation set."""
    return {key.removeprefix("eval/"): value for key, value in metrics.items() if is_mean(key)}


def ungraded_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the share of samples without a grade of each evaluation set that has some."""
    return _of_sets(metrics, UNGRADED)


def not_asked(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the number of prompts that the evaluation function left out, of each evaluation set that has some."""
    return _of_sets(metrics, NOT_ASKED)


def _of_sets(metrics: Mapping[str, float], suffix: str) -> dict[str, float]:
    ends = {key.removeprefix("eval/"): value for key, value in metrics.items() if key.endswith(suffix)}
    return {name.removesuffix(suffix): value for name, value in ends.items()}


def is_mean(key: str) -> bool:
    """Return whether a metric is `eval/<set>`, the mean reward of an evaluation set, and no other metric of the set."""
    name = key.removeprefix("eval/")
    return key != name and key != STEP and "/" not in name and not name.endswith(NOT_MEANS) and "-pass@" not in name


class MetricsFile:
    """Appends rows. A row of a known step replaces the old one if it has more keys (a late evaluation)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        rows = {row["step"]: row for row in _rows(path)}
        self._num_keys = {step: len(row) for step, row in rows.items()}
        if path.exists():  # removes a line that a crash cut off
            self._rewrite(rows)

    def put(self, row: MetricRow) -> None:
        """Write the row of a step. Numbers that JSON cannot express become "NaN", "Infinity" or "-Infinity"."""
        row = {key: spelled(value) for key, value in row.items()}
        step, known = row["step"], self._num_keys.get(row["step"])
        if known is not None and known >= len(row):
            return
        self._num_keys[step] = len(row)
        if known is None:
            append_line(self.path, msgspec.json.encode(row))
        else:
            self._rewrite({row["step"]: row for row in _rows(self.path)} | {step: row})

    def _rewrite(self, rows: dict[int, MetricRow]) -> None:
        write_atomically(self.path, b"".join(msgspec.json.encode(rows[step]) + b"\n" for step in sorted(rows)))


def _rows(path: Path) -> Iterator[MetricRow]:
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            row = msgspec.json.decode(line, type=MetricRow)
        except (ValueError, RecursionError):  # a DecodeError and a UnicodeDecodeError are ValueErrors
            continue
        if isinstance(row.get("step"), int):
            yield row


def spelled(value: Any) -> Any:
    """Convert a float that is not finite to protobuf's JSON spelling, which Python's float() reads."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
