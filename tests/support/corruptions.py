"""Corruptions of weights between trainer and engine, and the expected error texts.

The engine has verified the same weights before, as a peer engine would have: its tensors are compared with those.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
import torch

from tests.support.weight_line import NUM_BUCKETS, Corruption, Sending, Tensors, buckets_of, changed, flipped

LAYER: Final = "model.layers.1."
KEY: Final = f"{LAYER}self_attn.k_proj.weight"
GATE, UP = (f"{LAYER}mlp.{part}_proj.weight" for part in ("gate", "up"))
UNKNOWN: Final = "model.layers.9.extra.weight"
LAST: Final = NUM_BUCKETS - 1
DIFFERS: Final = ("its checksum is", "for the same files")


class Version(NamedTuple):
    """Weights of one version, and of the version before it."""

    now: Tensors
    before: Tensors


class Case(NamedTuple):
    """A corruption, and the expected error texts."""

    corruption: Corruption
    says: tuple[str, ...] = DIFFERS  # empty: the engine ignores it, and holds the right weights
    is_by_tensors: bool = True  # True: its tensors differ; False: the set of received buckets is wrong
    tensors: tuple[str, ...] = ()  # corrupted tensors


def cases(version: Version) -> dict[str, Case]:
    """One case of each kind."""
    return {
        "high byte": Case(flipped(KEY, 3, 0x7F)),
        "lowest bit": Case(flipped(KEY, 0, 1)),
        "zeros": Case(zeros(KEY)),
        "stale": Case(stale(KEY, version)),
        "wrong dtype": Case(wrong_dtype(KEY)),
        "swapped": Case(swapped(GATE, UP)),
        "truncated": Case(truncated),
        "unknown": Case(unknown, ()),
        "lost": lost_case(1),
        "lost last": lost_case(LAST),
        "late duplicate": duplicate_case(0, version),
    }


def random_cases(version: Version, number: int, seed: int) -> Iterator[Case]:
    """Yield corruptions of random tensors and buckets. Half of them flip bits, and half of these the lowest bit."""
    generator = random.Random(seed)
    for _ in range(number):
        yield generator.choice((_flipped_bit, _flipped_bit, _of_a_tensor, _of_a_bucket))(version, generator)


def _flipped_bit(version: Version, generator: random.Random) -> Case:
    name = generator.choice(list(version.now))
    byte = generator.randrange(version.now[name].nbytes)
    byte, bits = generator.choice(((byte, 1 << generator.randrange(8)), (byte - byte % 4, 1)))
    return Case(flipped(name, byte, bits), tensors=(name,))


def _of_a_tensor(version: Version, generator: random.Random) -> Case:
    one, other = generator.choice(_twins(version))
    made: Callable[[], Case] = generator.choice(
        (
            lambda: Case(zeros(one), tensors=(one,)),
            lambda: Case(stale(one, version), tensors=(one,)),
            lambda: Case(swapped(one, other), tensors=(one, other)),
        )
    )
    return made()


def _of_a_bucket(version: Version, generator: random.Random) -> Case:
    index = generator.randrange(NUM_BUCKETS)
    return generator.choice((lost_case(index), duplicate_case(index, version)))


def _twins(version: Version) -> list[tuple[str, str]]:
    """Pairs of tensors with the same shape in the same bucket."""
    return [
        (one, other)
        for bucket in buckets_of(version.now)
        for one, its in bucket
        for other, others in bucket
        if one < other and its.shape == others.shape
    ]


def zeros(name: str) -> Corruption:
    """Replace a tensor by zeros."""
    return changed(name, lambda own: own.zero_())


def stale(name: str, version: Version) -> Corruption:
    """Replace a tensor by that of the version before."""
    return changed(name, lambda own: own.copy_(version.before[name].flatten().view(torch.uint8)))


def swapped(one: str, other: str) -> Corruption:
    """Swap the names of two tensors of a bucket."""
    names_of = {one: other, other: one}

    def corrupt(sending: Sending) -> Sequence[Sending]:
        names = tuple(names_of.get(name, name) for name in sending.step.names)
        return [sending._replace(step=msgspec.structs.replace(sending.step, names=names))]

    return corrupt


def wrong_dtype(name: str) -> Corruption:
    """Declare a float tensor as int32."""

    def corrupt(sending: Sending) -> Sequence[Sending]:
        dtypes = tuple("int32" if each == name else "float32" for each in sending.step.names)
        return [sending._replace(step=msgspec.structs.replace(sending.step, dtypes=dtypes))]

    return corrupt


def lost_case(index: int) -> Case:
    """Drop a bucket."""
    got = f"received {LAST} of {NUM_BUCKETS} buckets of weight sync"
    says = got if index == LAST else f"received bucket {index + 1} of stage 0, expected bucket {index}"
    return Case(lambda sending: [] if sending.step.index == index else [sending], (says,), is_by_tensors=False)


def duplicate_case(index: int, version: Version) -> Case:
    """Send an old bucket again after the last one, with the weights of the version before."""
    tensors = [tensor for _, tensor in buckets_of(version.before)[index]]
    old = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])
    seen: dict[int, Sending] = {}

    def corrupt(sending: Sending) -> Sequence[Sending]:
        seen[sending.step.index] = sending
        return [sending, seen[index]._replace(flat=old)] if sending.step.index == LAST else [sending]

    return Case(corrupt, (f"received bucket {index} of stage 0, expected bucket {NUM_BUCKETS}",), is_by_tensors=False)


def truncated(sending: Sending) -> Sequence[Sending]:
    """Drop the last tensor of the last bucket."""
    step = sending.step
    if step.index != LAST:
        return [sending]
    fields = {name: getattr(step, name)[:-1] for name in ("names", "dtypes", "shapes")}
    size = 4 * torch.Size(step.shapes[-1]).numel()
    return [Sending(msgspec.structs.replace(step, **fields), sending.flat[:-size])]


def unknown(sending: Sending) -> Sequence[Sending]:
    """Add a tensor to the last bucket that the model does not have."""
    step = sending.step
    more = {"names": UNKNOWN, "dtypes": "float32", "shapes": (1,)}
    fields = {name: (*getattr(step, name), value) for name, value in more.items()}
    flat = torch.cat([sending.flat, torch.zeros(4, dtype=torch.uint8)])
    return [Sending(msgspec.structs.replace(step, **fields), flat)] if step.index == LAST else [sending]
