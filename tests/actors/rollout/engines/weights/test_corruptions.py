"""Corruptions between trainer and engine: each is caught, and what is to blame is named.

The prover knows no other engine here, and there is no probe: what is caught is caught by the tensors alone.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
import torch

from actors.rollout.engines.weights.verification import WeightsMismatch
from actors.rollout.sglang.client import SglangClient
from tests.support.corruptions import KEY, Case, Version, cases, random_cases
from tests.support.tiny_engine import running_engine
from tests.support.weight_line import ENGINE, Halves, Transport, as_it_is, drawn

pytestmark = pytest.mark.anyio

KINDS: Final = (
    *("high byte", "lowest bit", "zeros", "stale", "wrong dtype", "swapped"),
    *("truncated", "unknown", "lost", "lost last", "late duplicate"),
)
NUM_RANDOM: Final = 50  # with each transport


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with running_engine(model, "--load-format", "dummy") as engine:
        yield engine.url


@pytest.fixture(scope="module")
def version(model: Path) -> Version:
    return Version(now=drawn(model, 2), before=drawn(model, 1))


async def check(halves: Halves, version: Version, case: Case) -> None:
    """It is caught; and the next session is right."""
    assert await halves.bring(version.before) == {}
    failed = await halves.bring(version.now, case.corruption)
    assert list(failed) == [ENGINE]
    for part in case.says:
        assert part in failed[ENGINE]
    assert str(halves.refused).startswith(f"{ENGINE}: ")
    assert isinstance(halves.refused, WeightsMismatch) == case.is_by_tensors
    assert await halves.bring(version.now) == {}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_corruption_is_caught_and_the_next_session_is_right(
    kind: str, url: str, model: Path, version: Version, client: SglangClient
) -> None:
    assert set(cases(version)) == set(KINDS)
    halves = Halves(client, url, model)
    await check(halves, version, cases(version)[kind])
    await halves.leave()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("transport", "seed"), [("collective", 1), ("ipc", 2)])
async def test_random_corruptions_are_caught(
    transport: Transport, seed: int, model: Path, version: Version, client: SglangClient
) -> None:
    with running_engine(model, "--load-format", "dummy") as engine:
        halves = Halves(client, engine.url, model, transport=transport)
        for case in random_cases(version, NUM_RANDOM, seed):
            await check(halves, version, case)
        await halves.leave()


async def test_nothing_is_raised_without_a_corruption(url: str, model: Path, client: SglangClient) -> None:
    versions = [drawn(model, seed) for seed in range(3)]
    halves = Halves(client, url, model)
    assert [await halves.bring(tensors, as_it_is) for tensors in versions] == [{}] * 3
    await halves.leave()
    assert all(not torch.equal(one[KEY], next_one[KEY]) for one, next_one in pairwise(versions))


def test_random_corruptions_are_of_most_tensors_and_of_buckets(version: Version) -> None:
    made = list(random_cases(version, NUM_RANDOM, seed=1))
    of_tensors = {says for case in made if case.is_by_tensors for says in case.says}
    assert len(of_tensors) > len(version.now) / 2
    assert sum(not case.is_by_tensors for case in made) >= 5


async def test_fingerprints_are_taken_only_where_they_are_compared(url: str, model: Path, client: SglangClient) -> None:
    for verify, names in (("always", set(drawn(model, 1))), ("never", set[str]())):
        halves = Halves(client, url, model, verify=verify)
        assert await halves.bring(drawn(model, 1)) == {}
        await halves.leave()
        assert set(halves.sent.fingerprints) == names
