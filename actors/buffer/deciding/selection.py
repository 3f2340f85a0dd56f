"""Which groups make a batch of those that were kept, and which of the pool go on first. Pure."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

import msgspec

from runtime.ledger.fold import Group
from runtime.settings.plugins import OWN, is_plugin, load_plugin

Kind = Literal["over_sampling_filter", "buffer_filter"]


class SelectableGroup(msgspec.Struct, frozen=True, kw_only=True):
    """What a selection sees of a prompt group. The lists run over its samples; those of the pool may be unfinished."""

    group_id: int  # rises in the order of issue
    attempt: int
    round: int  # for which it was issued last
    data: str  # name of the data source; empty before the first completion
    indices: list[int]  # parts of one index are fan-out siblings
    rewards: list[float | None]
    response_lens: list[int]  # tokens
    oldest_version: int | None  # weights, among all tokens
    newest_version: int | None


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """A question to a user's function: which of these groups, and in which order."""

    kind: Kind
    groups: tuple[SelectableGroup, ...]  # first come first
    count: int  # over_sampling_filter: at least so many; buffer_filter: at most so many


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a Selection."""

    kind: Kind
    group_ids: tuple[int, ...]  # in order of preference


class SelectionError(ValueError):
    """An answer that is no selection."""


Filter = Callable[[Sequence[Group]], list[int]]


def summary_of(group: Group) -> SelectableGroup:
    """What a selection sees of a group."""
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
    """Groups whose rewards differ most first; equal ones as they came.

    The sample standard deviation over samples with a reward, fan-out siblings together by their mean.
    """
    return [group.group_id for group in sorted(groups, key=lambda group: -_spread(group))]


def fifo(groups: Sequence[Group]) -> list[int]:
    """In the order of issue."""
    return sorted(group.group_id for group in groups)


def newest(groups: Sequence[Group]) -> list[int]:
    """Those issued last first."""
    return sorted((group.group_id for group in groups), reverse=True)


def by_reward(groups: Sequence[Group]) -> list[int]:
    """Those with the highest mean of known rewards first; without any last. Equal ones in the order of issue."""

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
PARAMETERS: Mapping[Kind, tuple[str, ...]] = MappingProxyType(
    {"over_sampling_filter": ("groups",), "buffer_filter": ("groups", "n")}
)


def find_selection(kind: Kind, name: str, base_dirs: Sequence[Path] = ()) -> Callable[..., Any] | None:
    """A user's function of this name; None where the name is of a built-in.

    Raises:
        ValueError: there is none of this name; PluginError for a user's function.
    """
    if is_plugin(name):
        return load_plugin(f"rollout.{kind}", name, parameters=PARAMETERS[kind], base_dirs=base_dirs).function
    known = BUILT_IN[kind]
    if name not in known:
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"no {kind} {name!r}: {hint}built in are {', '.join(known)}; own ones are {OWN}")
    return None


def chosen_of(selection: Selection, answer: Any) -> Chosen:
    """Read what a user's function answered: groups, or their ids, in order of preference.

    Raises:
        SelectionError: it is none, names a group that was not offered or one twice, or too few or too many.
    """
    if not isinstance(answer, Iterable) or isinstance(answer, str | bytes | Mapping):
        raise SelectionError(f"returned {cast('object', answer)!r:.200}; expected groups or their ids")
    items = islice(cast("Iterable[Any]", answer), len(selection.groups) + 1)  # a generator may have no end
    ids = [item.group_id if isinstance(item, SelectableGroup) else item for item in items]
    offered = {group.group_id for group in selection.groups}
    unknown = [item for item in ids if isinstance(item, bool) or not isinstance(item, int) or item not in offered]
    if unknown:
        raise SelectionError(f"returned {unknown[0]!r:.200}, which is none of the groups that it was given")
    if len(set(ids)) < len(ids):
        raise SelectionError("returned a group twice")
    if selection.kind == "over_sampling_filter" and len(ids) < selection.count:
        raise SelectionError(f"returned {len(ids)} groups; at least {selection.count} are needed")
    if selection.kind == "buffer_filter" and len(ids) > selection.count:
        raise SelectionError(f"returned {len(ids)} groups; at most {selection.count} were asked for")
    return Chosen(kind=selection.kind, group_ids=tuple(ids))


def first_come(selection: Selection) -> Chosen:
    """What takes the place of an answer that cannot be used."""
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
