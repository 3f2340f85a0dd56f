"""Filters of completed prompt groups: pure functions of what is light about a group."""

import math
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import msgspec

from messages.events import GroupCompleted, Outcome
from runtime.settings.plugins import OWN, is_plugin, load_plugin

FILTER_KEY = "rollout.dynamic_filter"
MIN_STD = 1e-6  # reward units; rewards that differ by rounding only are equal


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a filter sees of a completed prompt group; the lists run over its samples."""

    group_id: int
    attempt: int
    data: str  # name of the data source
    indices: list[int]  # parts of one index are fan-out siblings
    rewards: list[float]
    scores: list[dict[str, Any] | None]  # what the grader answered where that was a dict
    prompt_len: int  # tokens
    response_lens: list[int]  # tokens
    statuses: list[str]  # "completed", "truncated"
    metadata: dict[str, Any] = {}  # of the prompt
    sample_metadata: list[dict[str, Any]] = []  # what a generate function noted, and the number of turns


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a filter decided, and why."""

    outcome: Outcome
    reason: str | None = None


class FilterError(ValueError):
    """A group that cannot be filtered, or an answer that is no verdict."""


KEEP = Verdict(outcome=Outcome.KEEP)
Filter = Callable[[GroupSummary], Any]  # gives what verdict_of reads, or an awaitable of it


def summary_of(group: GroupCompleted) -> GroupSummary:
    """What a filter sees of a group.

    Raises:
        FilterError: a sample has no reward.
    """
    rewards = [sample.reward for sample in group.samples if sample.reward is not None]
    if len(rewards) < len(group.samples):
        unscored = [sample.index for sample in group.samples if sample.reward is None]
        raise FilterError(f"samples {unscored} have no reward")
    return GroupSummary(
        group_id=group.group_id,
        attempt=group.attempt,
        data=group.data,
        indices=[sample.index for sample in group.samples],
        rewards=rewards,
        scores=[sample.score for sample in group.samples],
        prompt_len=group.samples[0].prompt_len if group.samples else 0,
        response_lens=[sample.response_len for sample in group.samples],
        statuses=[str(sample.status) for sample in group.samples],
        metadata=group.metadata,
        sample_metadata=[sample.metadata for sample in group.samples],
    )


def keep_all(_group: GroupSummary) -> Verdict:
    """Keep every group."""
    return KEEP


def nonzero_std(group: GroupSummary) -> Verdict:
    """Keep a group whose rewards differ: the others teach nothing where rewards are centred.

    The sample standard deviation (n - 1) in float64 must exceed 1e-6; fan-out siblings vote together, by their mean.
    A group of one sample has no spread to judge and is kept; dropping it would drop every group for ever.
    """
    votes = _votes(group)
    if len(votes) < 2 or _sample_std(votes) > MIN_STD:
        return KEEP
    return Verdict(outcome=Outcome.DROP, reason=f"zero_std_{round(group.rewards[0], 1) + 0.0}")  # + 0.0: -0.0 is 0.0


def verdict_of(answer: Any, name: str) -> Verdict:
    """Read what a filter answered: a bool, (keep, reason), or an object with `keep` and `reason`.

    Args:
        answer: what it gave.
        name: the filter's name, which is the reason where it gave none for a drop.

    Raises:
        FilterError: it is none of these.
    """
    if isinstance(answer, Verdict):
        return answer
    keep: Any = answer
    reason: Any = None
    if isinstance(answer, tuple):
        pair = cast("tuple[Any, ...]", answer)
        if len(pair) == 2:
            keep, reason = pair
    elif hasattr(answer, "keep"):
        keep, reason = answer.keep, getattr(answer, "reason", None)
    if not isinstance(keep, bool) and not hasattr(keep, "dtype"):  # a truth value of numpy or torch will do
        raise FilterError(f"the filter returned {cast('object', answer)!r:.200}; expected a bool, or (keep, reason)")
    if keep:
        return KEEP
    return Verdict(outcome=Outcome.DROP, reason=name if reason is None else str(reason))


BUILT_IN_FILTERS: Mapping[str, Filter] = MappingProxyType({"none": keep_all, "nonzero_std": nonzero_std})


def find_filter(name: str | None, base_dirs: Sequence[Path] = ()) -> Filter:
    """The filter of a name, a built-in one or a plug-in; None is "none", which keeps everything.

    Raises:
        ValueError: no filter has this name; PluginError for a user's function.
    """
    if name is not None and is_plugin(name):
        plugin = load_plugin(FILTER_KEY, name, parameters=("group",), base_dirs=base_dirs, allow_async=True)
        return plugin.function
    found = BUILT_IN_FILTERS.get(name or "none")
    if found is None:
        close = get_close_matches(str(name), BUILT_IN_FILTERS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        names = ", ".join(BUILT_IN_FILTERS)
        raise ValueError(f"no filter {name!r}: {hint}built in are {names}; own ones are {OWN}")
    return found


def _votes(group: GroupSummary) -> list[float]:
    parts: dict[int, list[float]] = {}
    for index, reward in zip(group.indices, group.rewards, strict=True):
        parts.setdefault(index, []).append(reward)
    return [math.fsum(rewards) / len(rewards) for rewards in parts.values()]


def _sample_std(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
