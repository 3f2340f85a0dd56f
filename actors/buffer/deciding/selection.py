"""Selection of groups for a batch (over_sampling_filter) and from the pool (buffer_filter). Pure."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal, cast

import msgspec

from runtime.functions.load import find_built_in
from runtime.functions.table import BUFFER_FILTER, OVER_SAMPLING_FILTER, UserFunction
from runtime.ledger.fold import Group

Kind = Literal["over_sampling_filter", "buffer_filter"]


class SelectableGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt group as selections see it. Lists have one entry per sample; samples in the pool may be unfinished."""

    group_id: int  # ascending in order of issue
    attempt: int
    round: int  # of its latest issue
    data: str  # name of the data source; empty before the first completion
    indices: list[int]  # parts of one index are fan-out siblings
    rewards: list[float | None]
    response_lens: list[int]  # tokens
    oldest_version: int | None  # oldest weight version of its tokens
    newest_version: int | None


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a user's selection function: which of these groups to take, in which order."""

    kind: Kind
    groups: tuple[SelectableGroup, ...]  # in order of arrival
    count: int  # over_sampling_filter: minimum number of groups; buffer_filter: maximum


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen groups of a Selection, in order."""

    kind: Kind
    group_ids: tuple[int, ...]  # in order of preference


class SelectionError(ValueError):
    """An invalid answer of a selection function."""


Filter = Callable[[Sequence[Group]], list[int]]


def summary_of(group: Group) -> SelectableGroup:
    """Summarize a group for a selection."""
    return SelectableGroup(
        group_id=group.group_id,
        attempt=group.attempt,
        round=group.round,
        data=group.data,
        indices=list(group.indices),
        rewards=list(group.rewards),
        response_lens=list(group.response_lens),
        oldest_version=group.oldest_version,
        newest_version=group.newest_version,
    )


def sort_by_reward_std(groups: Sequence[Group]) -> list[int]:
    """Sort by standard deviation of rewards, highest first; ties keep their order.

    The sample standard deviation (n - 1) over samples with a reward; fan-out siblings count once, with their mean.
    """
    return [group.group_id for group in sorted(groups, key=lambda group: -_spread(group))]


def fifo(groups: Sequence[Group]) -> list[int]:
    """Sort by order of issue."""
    return sorted(group.group_id for group in groups)


def newest(groups: Sequence[Group]) -> list[int]:
    """Sort by order of issue, newest first."""
    return sorted((group.group_id for group in groups), reverse=True)


def by_reward(groups: Sequence[Group]) -> list[int]:
    """Sort by mean reward, highest first; groups without rewards last. Ties keep the order of issue."""

    def place(group: Group) -> tuple[bool, float, int]:
        known = [reward for reward in group.rewards if reward is not None]
        return not known, -math.fsum(known) / max(1, len(known)), group.group_id

    return [group.group_id for group in sorted(groups, key=place)]


BUILT_IN: Mapping[Kind, Mapping[str, Filter]] = MappingProxyType(
    {
        "over_sampling_filter": MappingProxyType({"sort_by_reward_std": sort_by_reward_std}),
        "buffer_filter": MappingProxyType({"fifo": fifo, "newest": newest, "by_reward": by_reward}),
    }
)
FUNCTIONS: Mapping[Kind, UserFunction] = MappingProxyType(
    {"over_sampling_filter": OVER_SAMPLING_FILTER, "buffer_filter": BUFFER_FILTER}
)


def key_of(kind: Kind) -> str:
    """Return the setting that names a selection."""
    return f"rollout.{kind}"


def built_in_over_sampling(name: str) -> Filter:
    """Find a built-in selection of a batch. Raises ValueError: there is none."""
    return find_built_in("over_sampling_filter", name, BUILT_IN["over_sampling_filter"])


def built_in_buffer(name: str) -> Filter:
    """Find a built-in selection from the pool. Raises ValueError: there is none."""
    return find_built_in("buffer_filter", name, BUILT_IN["buffer_filter"])


def chosen_of(selection: Selection, answer: Any) -> Chosen:
    """Parse a user function's answer: groups, or their ids, in order of preference.

    Raises:
        SelectionError: it is not an iterable, names an unknown group or a group twice, or has too few or too many
            groups.
    """
    if not isinstance(answer, Iterable) or isinstance(answer, str | bytes | Mapping):
        raise SelectionError(f"returned {cast('object', answer)!r:.200}; expected groups or their ids")
    items = islice(cast("Iterable[Any]", answer), len(selection.groups) + 1)  # a generator may have no end
    ids = [item.group_id if isinstance(item, SelectableGroup) else item for item in items]
    offered = {group.group_id for group in selection.groups}
    unknown = [item for item in ids if isinstance(item, bool) or not isinstance(item, int) or item not in offered]
    if unknown:
        raise SelectionError(f"returned {unknown[0]!r:.200}, which is not the id of a group that it received")
    if len(set(ids)) < len(ids):
        raise SelectionError("returned a group twice")
    if selection.kind == "over_sampling_filter" and len(ids) < selection.count:
        raise SelectionError(f"returned {len(ids)} groups; at least {selection.count} are needed")
    if selection.kind == "buffer_filter" and len(ids) > selection.count:
        raise SelectionError(f"returned {len(ids)} groups; at most {selection.count} are allowed")
    return Chosen(kind=selection.kind, group_ids=tuple(ids))


def first_come(selection: Selection) -> Chosen:
    """Return the first groups, in place of an invalid answer of the user's function."""
    ids = [group.group_id for group in selection.groups]
    return Chosen(kind=selection.kind, group_ids=tuple(ids[: selection.count]))


def _spread(group: Group) -> float:
    votes: dict[int, list[float]] = {}
    for index, reward in zip(group.indices, group.rewards, strict=True):
        if reward is not None:
            votes.setdefault(index, []).append(reward)
    values = [math.fsum(rewards) / len(rewards) for rewards in votes.values()]
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
