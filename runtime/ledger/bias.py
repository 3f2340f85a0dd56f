"""Which samples train: the issued samples of a run against the trained ones, by length, prompt and place. Pure.

A run that loses its long samples, or those of one engine, learns from another distribution than it samples, and no
curve shows it. The log knows each issued sample and what became of it. A sample that never ended is longer than its
tokens so far, and the log does not say by how much: distances are ranges, from the least to the most that fits the log.
"""

import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from messages import ActorStarted, GroupCompleted, Message, SampleStatus, SampleSummary
from runtime.ledger.changes import AttemptEnded, Change, Closed, Issued
from runtime.ledger.fold import LEDGER_EVENTS, LedgerState, fold
from runtime.ledger.groups import MAX_REASONS, OTHER_REASONS, longest
from runtime.ledger.spills import spilled_samples
from runtime.ledger.state import Group, Stage
from runtime.ledger.steps import Settled
from runtime.util.formatting import count_of

NOISE_99: Final = 1.628  # critical value of the two-sample Kolmogorov-Smirnov test at 1 %, times sqrt((n + m) / (n m))
TOO_FAR: Final = 0.05  # distance of two distributions that is worth a look
ENDED: Final = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
UNKNOWN: Final = "unknown"
FAILED_ALONE: Final = "failed, and the others of its group trained"
PLACES: Final = ("data source", "engine", "actor", "node")  # the actor is the rollout actor
REWARD_DIGITS: Final = 3  # of a group's mean reward
MAX_NAMES: Final = 64  # shown sources, engines, actors or nodes


class Distance(msgspec.Struct, frozen=True, kw_only=True):
    """The largest difference between two cumulative distributions (Kolmogorov-Smirnov): 0 equal, 1 apart.

    `least` and `most` differ if lengths of issued samples are not known.
    """

    least: float
    most: float
    trained: int  # values
    issued: int  # values, those not known to the end too
    noise: float  # what 99 of 100 pairs of samples of one distribution stay below; 1: nothing can be told

    @property
    def is_far(self) -> bool:
        """Whether the difference is large, and too large for chance."""
        return self.noise < TOO_FAR < self.least


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """Samples that did not train for one reason."""

    samples: int
    unfinished: int  # among them, whose length is not known
    mean_len: float  # tokens so far


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """The share of one name among issued samples, and among trained ones."""

    issued: float
    trained: float


class Bias(msgspec.Struct, frozen=True, kw_only=True):
    """Issued samples against trained ones."""

    issued: int
    trained: int
    mean_len: float  # of trained samples, tokens
    response_len: Distance
    prompt_len: Distance
    difficulty: Distance  # mean reward of the sample's group
    removed: dict[str, Removed]  # by reason; of groups that are not settled too
    places: dict[str, dict[str, Shares]]  # by kind of place (PLACES) and name


class _Fate(msgspec.Struct):
    """A group that is not settled: what is known of its samples."""

    num_samples: int = 0  # 0: unknown
    samples: tuple[SampleSummary, ...] = ()
    reward: float | None = None  # mean of its samples; None: not scored
    names: Mapping[str, str] = {}  # of its places, once it completed


class _Counts(msgspec.Struct):
    """Issued samples and trained ones, by what they are compared in. Many samples of one length take one entry."""

    lens: Counter[float] = msgspec.field(default_factory=Counter[float])  # of issued samples that ended
    so_far: Counter[float] = msgspec.field(default_factory=Counter[float])  # of issued samples that did not
    trained_lens: Counter[float] = msgspec.field(default_factory=Counter[float])
    prompts: tuple[Counter[float], Counter[float]] = msgspec.field(default_factory=lambda: (Counter(), Counter()))
    rewards: tuple[Counter[float], Counter[float]] = msgspec.field(default_factory=lambda: (Counter(), Counter()))
    places: dict[str, tuple[Counter[str], Counter[str]]] = msgspec.field(
        default_factory=lambda: {place: (Counter(), Counter()) for place in PLACES}
    )
    removed: dict[str, tuple[int, int, int]] = {}  # by reason: samples, unfinished ones, tokens

    def add(self, fate: _Fate, reasons: Mapping[tuple[int, int], str], reason: str) -> None:
        """Count the samples of a group.

        Args:
            fate: the group.
            reasons: why some samples did not train, by index and part.
            reason: why the others did not; empty: they trained.
        """
        known = [sample for sample in fate.samples if not sample.is_baseline]
        for sample in known:
            own = reasons.get((sample.index, sample.part), reason)
            self._add_sample(sample, fate, own or (FAILED_ALONE if sample.status is SampleStatus.FAILED else ""))
        missing = max(0, fate.num_samples - len({sample.index for sample in known}))
        if missing:
            self.so_far[0] += missing
            self._remove(reason or FAILED_ALONE, missing, missing, 0)
            for place in PLACES:
                self.places[place][0][UNKNOWN] += missing

    def _add_sample(self, sample: SampleSummary, fate: _Fate, reason: str) -> None:
        has_ended, length = sample.status in ENDED, sample.response_len
        (self.lens if has_ended else self.so_far)[length] += 1
        both = (True, not reason)  # among the issued ones, among the trained ones
        for number, counts in enumerate(both):
            if not counts:
                continue
            self.prompts[number][sample.prompt_len] += 1
            if fate.reward is not None:
                self.rewards[number][fate.reward] += 1
            for place in PLACES:
                self.places[place][number][fate.names.get(place, UNKNOWN)] += 1
        if reason:
            self._remove(reason, 1, int(not has_ended), length)
        else:
            self.trained_lens[length] += 1

    def _remove(self, reason: str, samples: int, unfinished: int, tokens: int) -> None:
        if reason not in self.removed and len(self.removed) >= MAX_REASONS:
            reason = OTHER_REASONS
        before = self.removed.get(reason, (0, 0, 0))
        self.removed[reason] = before[0] + samples, before[1] + unfinished, before[2] + tokens


class BiasReport:
    """Folds the events of a run, from the first on, into its bias."""

    def __init__(self) -> None:
        self._ledger = LedgerState()
        self._open: dict[int, _Fate] = {}
        self._nodes: dict[str, str] = {}  # by process
        self._counts = _Counts()

    def begin(self, state: LedgerState) -> None:
        """Start in the middle of the log, from a folded state: groups that ended before are not counted."""
        self._ledger = state
        self._open = {group.group_id: _fate_of(group) for group in state.groups.values()}

    def take(self, event: Message, seq: int) -> None:
        """Take the next event of the log.

        Args:
            event: any event of the run.
            seq: its sequence in the log.
        """
        if isinstance(event, ActorStarted):
            self._nodes[event.actor] = event.node
        elif isinstance(event, LEDGER_EVENTS):
            for change in fold(self._ledger, event, seq):
                self._change(change)

    def result(self) -> Bias:
        """Return the bias after the newest event. Groups that are not settled count as issued."""
        counts = copy.deepcopy(self._counts)
        for group in self._ledger.groups.values():
            fate = self._open.get(group.group_id, _fate_of(group))
            if group.stage is Stage.IN_FLIGHT:
                fate = msgspec.structs.replace(fate, samples=longest(group.carried, spilled_samples(group)))
            counts.add(fate, {}, f"not settled: {group.stage.replace('_', ' ')}")
        num_trained, lens = counts.trained_lens.total(), counts.trained_lens
        return Bias(
            issued=counts.lens.total() + counts.so_far.total(),
            trained=num_trained,
            mean_len=math.fsum(length * count for length, count in lens.items()) / max(num_trained, 1),
            response_len=distance(lens, counts.lens, counts.so_far),
            prompt_len=distance(counts.prompts[1], counts.prompts[0]),
            difficulty=distance(counts.rewards[1], counts.rewards[0]),
            removed={
                reason: Removed(samples=samples, unfinished=unfinished, mean_len=tokens / samples)
                for reason, (samples, unfinished, tokens) in sorted(counts.removed.items())
            },
            places={place: _shares(*both) for place, both in counts.places.items()},
        )

    def _change(self, change: Change) -> None:
        match change:
            case Issued():
                for group in change.groups:
                    self._open.setdefault(group.group_id, _Fate()).num_samples = group.num_samples
            case AttemptEnded(event=GroupCompleted() as event):
                self._open[event.group_id] = self._completed(event, change.group)
            case AttemptEnded():
                self._open[change.group.group_id] = _fate_of(change.group)
            case Closed():
                self._settle(change.group.group_id, {}, change.reason)
            case Settled():
                reasons: dict[int, dict[tuple[int, int], str]] = {}
                for each in change.untrained:
                    reasons.setdefault(each.group_id, {}).update(dict.fromkeys(each.samples, each.reason))
                for ref in change.groups:
                    reason = "skipped" if ref.group_id in change.skipped else ""
                    self._settle(ref.group_id, reasons.get(ref.group_id, {}), reason)
            case _:
                pass

    def _completed(self, event: GroupCompleted, group: Group) -> _Fate:
        rewards = [sample.reward for sample in event.samples if sample.reward is not None and not sample.is_baseline]
        names = {
            "data source": event.data,
            "engine": event.last_sample.engine,
            "actor": event.instance,
            "node": self._nodes.get(event.instance, ""),
        }
        return _Fate(
            num_samples=group.num_samples,
            samples=event.samples,
            reward=round(math.fsum(rewards) / len(rewards), REWARD_DIGITS) if rewards else None,
            names={place: name or UNKNOWN for place, name in names.items()},
        )

    def _settle(self, group_id: int, reasons: Mapping[tuple[int, int], str], reason: str) -> None:
        fate = self._open.pop(group_id, None)
        if fate is not None:
            self._counts.add(fate, reasons, reason)


def _fate_of(group: Group) -> _Fate:
    """What the ledger knows of a group's samples, before they completed."""
    return _Fate(num_samples=group.num_samples, samples=group.carried)


def distance(
    trained: Mapping[float, int], ended: Mapping[float, int], so_far: Mapping[float, int] | None = None
) -> Distance:
    """Compare the trained samples with the issued ones.

    Args:
        trained: number of trained samples by value.
        ended: number of issued samples by value, trained ones too.
        so_far: number of further issued samples by what their value exceeds.
    """
    open_ = so_far or {}
    num_trained, num_ended, num_open = sum(trained.values()), sum(ended.values()), sum(open_.values())
    num_issued = num_ended + num_open
    if not num_trained or not num_issued:
        return Distance(least=0.0, most=1.0 if num_issued else 0.0, trained=num_trained, issued=num_issued, noise=1.0)
    below_trained = below_ended = below_open = 0
    least = most = 0.0
    for value in sorted({*trained, *ended, *open_}):
        below_trained, below_ended = below_trained + trained.get(value, 0), below_ended + ended.get(value, 0)
        share = below_trained / num_trained
        low, high = below_ended / num_issued, (below_ended + below_open) / num_issued
        least = max(least, low - share, share - high)
        below_open += open_.get(value, 0)  # they exceed it: they may end before the next value, or far beyond
        high = (below_ended + below_open) / num_issued
        most = max(most, abs(share - low), abs(share - high))
    noise = min(1.0, NOISE_99 * math.sqrt((num_trained + num_issued) / (num_trained * num_issued)))
    return Distance(least=least, most=most, trained=num_trained, issued=num_issued, noise=noise)


def _shares(issued: Counter[str], trained: Counter[str]) -> dict[str, Shares]:
    """The shares of each name, the commonest first."""
    names = [name for name, _ in issued.most_common(MAX_NAMES)]
    of_issued, of_trained = max(issued.total(), 1), max(trained.total(), 1)
    return {name: Shares(issued=issued[name] / of_issued, trained=trained[name] / of_trained) for name in names}


def bias_lines(bias: Bias) -> Iterator[str]:
    """Format the bias as lines for people."""
    yield f"samples      {bias.trained:,} of {bias.issued:,} issued are trained"
    if not bias.trained:
        yield "             nothing to compare yet"
        return
    yield f"length       {_shown(bias.response_len)}; mean of trained {bias.mean_len:.1f} tokens"
    yield f"prompt       {_shown(bias.prompt_len)}"
    yield f"difficulty   {_shown(bias.difficulty)} (mean reward of the group)"
    for place, shares in bias.places.items():
        for name, share in shares.items():
            yield f"{place:<13}{name}: {share.issued:.1%} of issued, {share.trained:.1%} of trained"
    for reason, removed in sorted(bias.removed.items(), key=lambda item: -item[1].samples):
        open_ = f", {removed.unfinished:,} unfinished" if removed.unfinished else ""
        part = removed.samples / bias.issued
        about = f"{part:.1%}{open_}, mean {removed.mean_len:.1f} tokens"
        yield f"not trained  {count_of(removed.samples, 'sample')} ({about}): {reason}"
    yield from (f"advice       {text}" for text in bias_advice(bias))


def bias_advice(bias: Bias) -> Iterator[str]:
    """Say which differences are more than chance."""
    found = {"lengths": bias.response_len, "prompts": bias.prompt_len, "rewards": bias.difficulty}
    for what, distance_of in found.items():
        if distance_of.is_far:
            reason = max(bias.removed, key=lambda reason: bias.removed[reason].samples, default="")
            why = f"; most of the others were not trained because of: {reason}" if reason else ""
            yield f"the {what} of trained samples differ from the issued ones by {distance_of.least:.3f}{why}"
    noise = max(distance_of.noise for distance_of in found.values())
    if noise >= TOO_FAR:
        yield f"too few samples for a distance of {TOO_FAR} to be more than chance, which alone gives {noise:.3f}"


def _shown(found: Distance) -> str:
    between = f"{found.least:.3f}" if found.most - found.least < 0.0005 else f"{found.least:.3f} to {found.most:.3f}"
    return f"distance {between} (99 % noise {found.noise:.3f})"
