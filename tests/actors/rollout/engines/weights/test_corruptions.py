"""Corruptions between trainer and engine: refused if the engine's tensors differ from those verified for the version.

There is no probe unless a test says so: what is found is found by checksums and bucket numbers alone.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
import torch

from actors.rollout.engines.weights.verification import WeightsMismatch
from actors.rollout.sglang.client import SglangClient
from actors.trainer.weights.engine_sums import Layout, place_of
from messages import WeightProbe
from tests.support.corruptions import KEY, Case, Version, cases, flipped, random_cases, zeros
from tests.support.tiny_engine import running_engine
from tests.support.weight_line import ENGINE, Halves, Transport, as_it_is, drawn

pytestmark = [pytest.mark.anyio, pytest.mark.slow]  # an engine starts, for all tests

KINDS: Final = (
    *("high byte", "lowest bit", "zeros", "stale", "wrong dtype", "swapped"),
    *("truncated", "unknown", "lost", "lost last", "late duplicate"),
)
NUM_RANDOM: Final = 50  # with each transport
TINY_ENGINE: Final = Layout(is_padded=False)
TOKENS: Final = tuple((7 * place) % 60 + 2 for place in range(64))


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with running_engine(model, "--load-format", "dummy") as engine:
        yield engine.url


@pytest.fixture(scope="module")
def version(model: Path) -> Version:
    return Version(now=drawn(model, 2), before=drawn(model, 1))


async def check(halves: Halves, version: Version, case: Case) -> None:
    """It is refused, or harmless; and after the next sync the engine holds the weights that were sent."""
    assert await halves.sync(version.before) == {}
    failed = await halves.sync(version.now, case.corruption)
    if case.says:
        assert list(failed) == [ENGINE]
        assert [part for part in case.says if part not in failed[ENGINE]] == []
        assert str(halves.refused).startswith(f"{ENGINE}: ")
        assert isinstance(halves.refused, WeightsMismatch) == case.is_by_tensors
        assert await halves.sync(version.now) == {}
    assert await halves.holds(version.now, TINY_ENGINE)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_corruption_is_caught_and_the_next_session_is_right(
    kind: str, url: str, model: Path, version: Version, client: SglangClient
) -> None:
    assert set(cases(version)) == set(KINDS)
    halves = Halves(client, url, model)
    assert await halves.sync(version.now) == {}
    await check(halves, version, cases(version)[kind])
    await halves.leave()


@pytest.mark.parametrize(("transport", "seed"), [("collective", 1), pytest.param("ipc", 2, marks=pytest.mark.nightly)])
async def test_random_corruptions_are_caught(
    transport: Transport, seed: int, model: Path, version: Version, client: SglangClient
) -> None:
    with running_engine(model, "--load-format", "dummy") as engine:
        halves = Halves(client, engine.url, model, transport=transport)
        assert await halves.sync(version.now) == {}
        for case in random_cases(version, NUM_RANDOM, seed):
            await check(halves, version, case)
        await halves.leave()


async def test_a_lowest_bit_changed_for_the_only_engine_is_found_by_the_trainers_sums_alone(
    url: str, model: Path, version: Version, client: SglangClient
) -> None:
    """Without them and without a peer, only the probe is left, and it tolerates this."""
    halves = Halves(client, url, model)
    assert await halves.sync(version.now, flipped(KEY, 0, 1)) == {}
    assert not await halves.holds(version.now, TINY_ENGINE)
    await halves.leave()
    halves = Halves(client, url, model, layout=TINY_ENGINE)
    failed = await halves.sync(version.now, flipped(KEY, 0, 1))
    assert failed[ENGINE].endswith(
        f"1 of its 19 tensors differ from the trainer's sums; the first is {place_of(KEY).name}"
    )
    assert await halves.sync(version.now) == {}
    assert await halves.holds(version.now, TINY_ENGINE)
    await halves.leave()


async def test_the_probe_finds_a_wrong_tensor_of_the_only_engine(
    url: str, model: Path, version: Version, client: SglangClient
) -> None:
    halves = Halves(client, url, model)
    assert await halves.sync(version.now) == {}
    log_probs = await client.prompt_log_probs(url, TOKENS)
    await halves.leave()
    probe = WeightProbe(token_ids=TOKENS, log_probs=tuple(each or 0.0 for each in log_probs))
    halves = Halves(client, url, model)
    failed = await halves.sync(version.now, zeros(KEY), probe=probe)
    assert list(failed) == [ENGINE]
    assert "its log-probs of the probe differ" in failed[ENGINE]
    assert await halves.sync(version.now, probe=probe) == {}
    assert await halves.holds(version.now, TINY_ENGINE)
    await halves.leave()


async def test_nothing_is_raised_without_a_corruption(url: str, model: Path, client: SglangClient) -> None:
    versions = [drawn(model, seed) for seed in range(3)]
    halves = Halves(client, url, model)
    for tensors in versions:
        assert await halves.sync(tensors, as_it_is) == {}
        assert await halves.holds(tensors, TINY_ENGINE)
    await halves.leave()
    assert all(not torch.equal(one[KEY], next_one[KEY]) for one, next_one in pairwise(versions))


def test_random_corruptions_are_of_most_tensors_and_of_buckets(version: Version) -> None:
    made = list(random_cases(version, NUM_RANDOM, seed=1))
    assert len({name for case in made for name in case.tensors}) > len(version.now) / 2
    assert sum(not case.is_by_tensors for case in made) >= 5


async def test_fingerprints_are_taken_only_where_they_are_compared(url: str, model: Path, client: SglangClient) -> None:
    for verify, names in (("always", set(drawn(model, 1))), ("never", set[str]())):
        halves = Halves(client, url, model, verify=verify)
        assert await halves.sync(drawn(model, 1)) == {}
        await halves.leave()
        assert set(halves.sent.fingerprints) == names
