"""Corruptions between trainer and engine: each is caught, and what is to blame is named.

The prover knows no other engine here, and there is no probe: what is caught is caught by the tensors alone.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec
import pytest
import torch

from actors.rollout.engines.weights.proof import WeightsMismatch
from actors.rollout.sglang.client import SglangClient
from tests.support.embedded_engine import running_engine, write_config
from tests.support.tiny_models import write_tokenizer
from tests.support.weight_line import (
    ENGINE,
    NUM_BUCKETS,
    Corruption,
    Halves,
    Sending,
    Tensors,
    as_it_is,
    buckets_of,
    changed,
    drawn,
    flipped,
)

pytestmark = pytest.mark.anyio

LAYER = "model.layers.1."
KEY, QKV = f"{LAYER}self_attn.k_proj.weight", f"{LAYER}self_attn.qkv_proj.weight"
GATE, UP, GATE_UP = (f"{LAYER}mlp.{part}_proj.weight" for part in ("gate", "up", "gate_up"))
UNKNOWN = "model.layers.9.extra.weight"
LAST = NUM_BUCKETS - 1


class Version(NamedTuple):
    """The weights of a version, and of the one before."""

    now: Tensors
    before: Tensors

    def bucket_of(self, name: str) -> int:
        return next(i for i, bucket in enumerate(buckets_of(self.now)) if name in dict(bucket))


def step_changed(index: int, **changes: object) -> Corruption:
    def corrupt(sending: Sending) -> Sequence[Sending]:
        if sending.step.index != index:
            return [sending]
        return [sending._replace(step=msgspec.structs.replace(sending.step, **changes))]

    return corrupt


def high_byte(_: Version) -> Corruption:
    return flipped(KEY, 3, 0x7F)


def lowest_bit(_: Version) -> Corruption:
    return flipped(KEY, 0, 1)


def zeros(_: Version) -> Corruption:
    return changed(KEY, lambda own: own.zero_())


def stale(version: Version) -> Corruption:
    return changed(KEY, lambda own: own.copy_(version.before[KEY].flatten().view(torch.uint8)))


def swapped(version: Version) -> Corruption:
    def corrupt(sending: Sending) -> Sequence[Sending]:
        other = {GATE: UP, UP: GATE}
        names = tuple(other.get(name, name) for name in sending.step.names)
        return [sending._replace(step=msgspec.structs.replace(sending.step, names=names))]

    assert version.now[GATE].shape == version.now[UP].shape
    return corrupt


def wrong_dtype(version: Version) -> Corruption:
    index = version.bucket_of(KEY)
    names = [name for name, _ in buckets_of(version.now)[index]]
    return step_changed(index, dtypes=tuple("int32" if name == KEY else "float32" for name in names))


def lost(_: Version) -> Corruption:
    return lambda sending: [] if sending.step.index == 1 else [sending]


def lost_last(_: Version) -> Corruption:
    return lambda sending: [] if sending.step.index == LAST else [sending]


def late_duplicate(version: Version) -> Corruption:
    """After the last bucket the first one of the version before comes once more."""
    tensors = [tensor for _, tensor in buckets_of(version.before)[0]]
    old = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])
    first: list[Sending] = []

    def corrupt(sending: Sending) -> Sequence[Sending]:
        first.append(sending)
        return [sending, first[0]._replace(flat=old)] if sending.step.index == LAST else [sending]

    return corrupt


def truncated(_: Version) -> Corruption:
    def corrupt(sending: Sending) -> Sequence[Sending]:
        step = sending.step
        if step.index != LAST:
            return [sending]
        fields = {name: getattr(step, name)[:-1] for name in ("names", "dtypes", "shapes")}
        size = 4 * torch.Size(step.shapes[-1]).numel()
        return [Sending(msgspec.structs.replace(step, **fields), sending.flat[:-size])]

    return corrupt


def unknown(_: Version) -> Corruption:
    def corrupt(sending: Sending) -> Sequence[Sending]:
        step = sending.step
        more = {"names": UNKNOWN, "dtypes": "float32", "shapes": (1,)}
        fields = {name: (*getattr(step, name), value) for name, value in more.items()}
        flat = torch.cat([sending.flat, torch.zeros(4, dtype=torch.uint8)])
        return [Sending(msgspec.structs.replace(step, **fields), flat)] if step.index == LAST else [sending]

    return corrupt


CASES: dict[
    Callable[[Version], Corruption], tuple[str, ...]
] = {  # what is said of the engine; {bucket} is that of the tensor
    high_byte: (QKV, f"{KEY}, which came in bucket {{bucket}} of stage 0"),
    lowest_bit: (QKV, f"{KEY}, which came in bucket {{bucket}} of stage 0"),
    zeros: (QKV, f"{KEY}, which came in bucket {{bucket}} of stage 0"),
    stale: (QKV, f"{KEY}, which came in bucket {{bucket}} of stage 0"),
    wrong_dtype: (QKV, f"{KEY}, which came in bucket {{bucket}} of stage 0"),
    swapped: (GATE_UP, f"{GATE}, which came in bucket", f"{UP}, which came in bucket"),
    truncated: ("lm_head.weight on rank 0", "which never came"),
    unknown: (f"no tensor of the model: {UNKNOWN} in bucket {LAST} of stage 0",),
    lost: ("bucket 2 of stage 0 came, bucket 1 was due",),
    lost_last: (f"got {LAST} of {NUM_BUCKETS} buckets of session 1.2",),
    late_duplicate: (f"bucket 0 of stage 0 came, bucket {NUM_BUCKETS} was due",),
}
BY_TENSORS = {high_byte, lowest_bit, zeros, stale, wrong_dtype, swapped, truncated, unknown}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_config(directory)
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with running_engine(model, "--load-format", "dummy") as engine:
        yield engine.url


@pytest.mark.parametrize("corruption", CASES, ids=lambda each: each.__name__)
async def test_a_corruption_is_caught_and_the_next_session_is_right(
    corruption: Callable[[Version], Corruption], url: str, model: Path
) -> None:
    first, second = drawn(model, 1), drawn(model, 2)
    version = Version(second, first)
    async with aiohttp.ClientSession() as session:
        halves = Halves(SglangClient(session), url, model)
        assert await halves.bring(first) == {}
        failed = await halves.bring(second, corruption(version))
        assert list(failed) == [ENGINE]
        for part in CASES[corruption]:
            assert part.format(bucket=version.bucket_of(KEY)) in failed[ENGINE]
        assert str(halves.refused).startswith(f"{ENGINE}: ")
        assert isinstance(halves.refused, WeightsMismatch) == (corruption in BY_TENSORS)
        assert await halves.bring(second) == {}


async def test_nothing_is_raised_without_a_corruption(url: str, model: Path) -> None:
    versions = [drawn(model, seed) for seed in range(3)]
    async with aiohttp.ClientSession() as session:
        halves = Halves(SglangClient(session), url, model)
        assert [await halves.bring(tensors, as_it_is) for tensors in versions] == [{}] * 3
    assert all(not torch.equal(one[KEY], next_one[KEY]) for one, next_one in pairwise(versions))
