"""Filters of completed prompt groups: pure functions of a group's summary."""

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast, get_args

import anyio
import msgspec
import numpy as np
from numpy.typing import NDArray

from messages import SampleStatus, SampleSummary, Segment
from messages.events import GroupCompleted, Outcome
from messages.plain import clipped
from runtime.data.dumps import DumpedGroup
from runtime.functions.load import find, find_built_in, load
from runtime.functions.table import FILTER
from runtime.settings.tables.rollout import FilterField

FILTER_KEY = "rollout.dynamic_filter"
MAX_REASON_CHARS = 500
MIN_STD = 1e-6  # in units of reward; smaller differences count as rounding


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A completed prompt group as filters see it; lists have one entry per sample."""

    group_id: int
    attempt: int
    data: str  # name of the data source
    indices: list[int]  # parts of one index are fan-out siblings
    rewards: list[float]
    scores: list[dict[str, Any] | None]  # the grader's answer if it was a dict
    prompt_len: int  # tokens
    response_lens: list[int]  # tokens
    statuses: list[str]  # "completed", "truncated"
    metadata: dict[str, Any] = {}  # metadata of the prompt
    sample_metadata: list[dict[str, Any]] = []  # metadata from a generate function, and the number of turns

    # With `rollout.filter_fields`:
    tokens: list[list[int]] = []  # of the responses, input between turns included
    log_probs: list[list[float]] = []  # of the same tokens, natural log; 0 for input between turns
    prompt: str = ""
    label: Any = None
    responses: list[str] = []  # the model's turns as text


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """A filter's decision and its reason."""

    outcome: Outcome
    reason: str | None = None


class FilterError(ValueError):
    """A group cannot be filtered, or a filter's answer is not a verdict."""


KEEP = Verdict(outcome=Outcome.KEEP)
Filter = Callable[[GroupSummary], Any]  # returns a value that verdict_of parses, or an awaitable of one


def summary_of(group: GroupCompleted) -> GroupSummary:
    """Summarize a group for filters.

    Raises:
        FilterError: a sample has no reward and is not left out.
    """
    samples = trained_samples(group)
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if len(rewards) < len(samples):
        unscored = [sample.index for sample in samples if sample.reward is None]
        raise FilterError(f"samples {unscored} have no reward")
    return GroupSummary(
        group_id=group.group_id,
        attempt=group.attempt,
        data=group.data,
        indices=[sample.index for sample in samples],
        rewards=rewards,
        scores=[sample.score for sample in samples],
        prompt_len=samples[0].prompt_len if samples else 0,
        response_lens=[sample.response_len for sample in samples],
        statuses=[str(sample.status) for sample in samples],
        metadata=group.metadata,
        sample_metadata=[sample.metadata for sample in samples],
    )


def trained_samples(group: GroupCompleted) -> list[SampleSummary]:
    """Return the samples that a filter sees: those that did not fail."""
    return [sample for sample in group.samples if sample.status is not SampleStatus.FAILED]


def with_contents(
    summary: GroupSummary,
    segments: Sequence[Sequence[Segment]],
    fields: Collection[FilterField],
    *,
    prompt: str,
    label: Any,
) -> GroupSummary:
    """Add the fields that a recipe asks for.

    Args:
        summary: of the group.
        segments: of each of its samples, in order.
        fields: which fields to add.
        prompt: of the group, as text.
        label: of the prompt.
    """
    added: dict[str, Any] = {}
    if "tokens" in fields:
        added["tokens"] = [
            _joined(own, lambda part: part.prompt_ids, lambda part: part.response_ids) for own in segments
        ]
    if "log_probs" in fields:
        zeros = [
            _joined(own, lambda part: np.zeros(len(part.prompt_ids)), lambda part: part.rollout_log_probs)
            for own in segments
        ]
        added["log_probs"] = zeros
    if "texts" in fields:
        added |= {"prompt": prompt, "label": label, "responses": ["".join(s.text for s in own) for own in segments]}
    return msgspec.structs.replace(summary, **added)


def _joined(
    segments: Sequence[Segment],
    given: Callable[[Segment], NDArray[Any]],
    sampled: Callable[[Segment], NDArray[Any]],
) -> list[Any]:
    """Return numbers of all response tokens; the input of the first segment is the prompt."""
    return [
        number
        for place, segment in enumerate(segments)
        for part in ((given(segment) if place else ()), sampled(segment))
        for number in np.asarray(part).tolist()
    ]


def keep_all(_group: GroupSummary) -> Verdict:
    """Keep every group."""
    return KEEP


def nonzero_std(group: GroupSummary) -> Verdict:
    """Keep a group whose rewards differ: with centered rewards, the others have no advantage to train on.

    The sample standard deviation (n - 1) in float64 must exceed 1e-6; fan-out siblings count once, with their mean.
    A group of one sample has no standard deviation and is kept; otherwise such a run would drop every group.
    """
    votes = _votes(group)
    if len(votes) < 2 or _sample_std(votes) > MIN_STD:
        return KEEP
    return Verdict(outcome=Outcome.DROP, reason=f"zero_std_{round(group.rewards[0], 1) + 0.0}")  # + 0.0: -0.0 is 0.0


def verdict_of(answer: Any, name: str) -> Verdict:
    """Parse a filter's answer: a bool, (keep, reason), or an object with `keep` and `reason`.

    Args:
        answer: the filter's return value.
        name: name of the filter; the reason of a drop without one.

    Raises:
        FilterError: the answer is none of these.
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
    if not isinstance(keep, bool) and not hasattr(keep, "dtype"):  # NumPy and torch booleans are accepted
        raise FilterError(f"the filter returned {cast('object', answer)!r:.200}; expected a bool, or (keep, reason)")
    if keep:
        return KEEP
    return Verdict(outcome=Outcome.DROP, reason=clipped(name if reason is None else str(reason), MAX_REASON_CHARS))


BUILT_IN_FILTERS: Mapping[str, Filter] = MappingProxyType({"none": keep_all, "nonzero_std": nonzero_std})


def built_in_filter(name: str) -> Filter:
    """Find a built-in filter. Raises ValueError: no filter has this name."""
    return find_built_in("filter", name, BUILT_IN_FILTERS)


def answering(key: str, name: str) -> Callable[[bytes], bytes]:
    """Return a user's filter as its process calls it: from a packed GroupSummary to a packed Verdict.

    Raises:
        PluginError: the filter cannot be used.
    """
    judge, decoder = load(FILTER, key, name).function, msgspec.msgpack.Decoder(GroupSummary)

    def answer(payload: bytes) -> bytes:
        verdict = judge(decoder.decode(payload))
        if inspect.isawaitable(verdict):
            verdict = anyio.run(_awaited, verdict)
        return msgspec.msgpack.encode(verdict_of(verdict, name))

    return answer


def _votes(group: GroupSummary) -> list[float]:
    parts: dict[int, list[float]] = {}
    for index, reward in zip(group.indices, group.rewards, strict=True):
        parts.setdefault(index, []).append(reward)
    return [math.fsum(rewards) / len(rewards) for rewards in parts.values()]


def _sample_std(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


class ReplayedFilter:
    """A filter by name, applied to one group at a time, without a timeout."""

    def __init__(self, name: str | None) -> None:
        """Raises ValueError for an unknown filter, PluginError if a user's filter cannot be used."""
        self.name = name or "none"
        self._filter: Filter = find(FILTER, FILTER_KEY, self.name)

    def judge(self, group: GroupCompleted, contents: DumpedGroup | None = None) -> Verdict:
        """Judge a group, with all fields that its dump has; a filter that raises gives a failed verdict."""
        try:
            summary = summary_of(group)
            if contents is not None:
                pairs = zip(contents.samples, contents.segments, strict=True)
                segments = [own for sample, own in pairs if sample.status is not SampleStatus.FAILED]
                first = contents.samples[0]
                summary = with_contents(
                    summary, segments, get_args(FilterField), prompt=first.prompt, label=first.label
                )
            answer = self._filter(summary)
            if inspect.isawaitable(answer):
                answer = anyio.run(_awaited, answer)
            return verdict_of(answer, self.name)
        except Exception as error:  # noqa: BLE001 - a user's filter may raise anything
            return Verdict(outcome=Outcome.FAILED, reason=clipped(repr(error), MAX_REASON_CHARS))


async def _awaited(answer: object) -> object:
    assert inspect.isawaitable(answer)
    return await answer
