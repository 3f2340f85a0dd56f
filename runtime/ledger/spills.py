"""Joins the increments of an attempt's samples, which rollout actors store while it is in flight. Pure.

An increment has the segments of one sample since its last one, and the number of segments before them. It is joined
only to increments of the same lease that lead up to it. One that does not fit (a gap, a duplicate, a lease that was
replaced) changes nothing. So the segments of a sample are always those of one lease, complete from the first on.
"""

import msgspec

from messages import SampleSummary, SegmentsSpilled
from runtime.ledger.state import Group, Spilled


def spilled_samples(group: Group) -> tuple[SampleSummary, ...]:
    """The stored samples of an attempt in flight, each with all its segments, in order."""
    ordered = sorted(group.spilled, key=lambda spilled: (spilled.sample.index, spilled.sample.part))
    return tuple(msgspec.structs.replace(spilled.sample, segments=tuple(spilled.segments)) for spilled in ordered)


def take_increments(group: Group, event: SegmentsSpilled) -> list[SampleSummary]:
    """Join the increments of an event to those before; return the increments that fit.

    If two leases have a sample, the one with more tokens counts. A shorter one of the later lease is kept beside it.
    """
    starts = event.starts or (0,) * len(event.samples)
    return [
        sample for sample, start in zip(event.samples, starts, strict=True) if _take(group, event.lease, sample, start)
    ]


def _take(group: Group, lease: str, sample: SampleSummary, start: int) -> bool:
    longest, later = _find(group.spilled, sample), _find(group.anew, sample)
    chain = next((each for each in (longest, later) if each is not None and each.lease == lease), None)
    if chain is None:
        if start or any(lease in each.replaced for each in (longest, later) if each is not None):
            return False  # a gap, or a lease that was replaced: its first increment may be stored again
        chain = Spilled(lease=lease, sample=sample)
    elif start > len(chain.segments) or sample.response_len < chain.sample.response_len:
        return False  # a gap, or a duplicate of an earlier increment
    chain.segments[start:] = sample.segments
    chain.sample = msgspec.structs.replace(sample, segments=())
    if chain is longest:
        return True
    group.anew = [each for each in group.anew if each is not later]
    _replace(later, chain)
    if longest is None or sample.response_len >= longest.sample.response_len:
        group.spilled = [*(each for each in group.spilled if each is not longest), chain]
        _replace(longest, chain)
    else:
        group.anew.append(chain)
    return True


def _replace(old: Spilled | None, new: Spilled) -> None:
    if old is not None and old is not new:
        new.replaced = (*new.replaced, *old.replaced, old.lease)


def _find(samples: list[Spilled], sample: SampleSummary) -> Spilled | None:
    key = sample.index, sample.part
    return next((each for each in samples if (each.sample.index, each.sample.part) == key), None)
