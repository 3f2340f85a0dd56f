"""Batches with losses that are not finite, on a real bus: what the log and the books say of them, and replays."""

from pathlib import Path

import numpy as np
import pytest

from messages import BatchReady, BatchTrained, WeightsAnnounced
from runtime.bus.bus import Bus
from runtime.ledger.fold import LEDGER_EVENTS, LedgerState, fold
from runtime.process.actor import InputError
from runtime.settings.topology import Topology
from tests.actors.trainer.hosting import errors_of, of, running, said_until
from tests.actors.trainer.logs import GROUPS, publish_group
from tests.build.topology import MakeTopology

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("actor_joins")]

LARGE = 1e30  # a reward, not normalised: the gradient's norm would be infinite


def topology_of(make_topology: MakeTopology, **train: object) -> Topology:
    algorithm = {
        "num_steps_per_rollout": 3,
        "estimator": {"type": "grpo", "normalize": False},
    }  # an optimizer step for each group
    return make_topology(algorithm=algorithm, train={"num_steps": 3} | train)


async def publish_poisoned(bus: Bus, step: int, *groups: int) -> None:
    """A batch in which no reward of some groups can be trained on."""
    numbers = range(step * GROUPS, (step + 1) * GROUPS)
    all_large = dict.fromkeys(range(4), LARGE)
    refs = [await publish_group(bus, number, rewards=all_large if number in groups else {}) for number in numbers]
    await bus.publish(BatchReady(incarnation=1, step=step, groups=tuple(refs)))


async def books_of(bus: Bus) -> LedgerState:
    state = LedgerState()
    async with bus.read(*LEDGER_EVENTS) as events:
        async for received in events.so_far():
            fold(state, received.message, received.seq)
    return state


async def test_samples_without_a_gradient_are_named_and_their_groups_are_skipped_in_the_books(
    make_topology: MakeTopology, bus: Bus, tmp_path: Path
) -> None:
    async with running(topology_of(make_topology), bus, tmp_path / "run"):
        await publish_poisoned(bus, 0, 1)
        (trained,) = of(await said_until(bus, BatchTrained), BatchTrained)
    (untrained,) = trained.untrained
    assert (untrained.group_id, untrained.reason) == (1, "not_finite")
    assert untrained.samples == ((0, 0), (1, 0), (2, 0), (3, 0))
    assert (trained.num_groups, trained.num_samples, trained.skipped_groups) == (2, 8, (1,))
    assert trained.metrics["train/num_skipped_steps"] == 1
    assert trained.metrics["train/num_untrained_samples"] == 4
    assert np.isfinite(trained.metrics["train/loss"])  # the mean of the other two optimizer steps
    state = await books_of(bus)
    assert (state.books().trained, state.books().skipped, state.books().closed) == (2, 1, True)
    assert state.untrained == {"not_finite": 4}


async def test_a_replay_skips_what_was_skipped_before(make_topology: MakeTopology, bus: Bus, tmp_path: Path) -> None:
    topology = topology_of(make_topology)
    async with running(topology, bus, tmp_path / "run"):
        await publish_poisoned(bus, 0, 1)
        await publish_poisoned(bus, 1, 4, 5)
        before = await said_until(bus, WeightsAnnounced, 3)
    async with running(topology, bus, tmp_path / "run"):  # there is no checkpoint: both steps are trained again
        after = (await said_until(bus, WeightsAnnounced, 4))[len(before) :]
    first, again = of(before, BatchTrained), of(after, BatchTrained)
    assert [event.replay for event in again] == [True, True]
    for one, other in zip(first, again, strict=True):
        assert (one.untrained, one.skipped_groups, one.num_tokens) == (
            other.untrained,
            other.skipped_groups,
            other.num_tokens,
        )
    assert of(before, WeightsAnnounced)[-1].checksum == of(after, WeightsAnnounced)[-1].checksum
    state = await books_of(bus)
    assert (state.books().trained, state.books().skipped, state.books().closed) == (3, 3, True)


async def test_one_skipped_step_too_many_ends_the_trainer_and_says_so(
    make_topology: MakeTopology, bus: Bus, tmp_path: Path
) -> None:
    await publish_poisoned(bus, 0, 1, 2)
    (error,) = await errors_of(topology_of(make_topology, max_skipped=1), bus, tmp_path / "run")
    assert isinstance(error, InputError)  # the same batch would be met after a restart
    assert "2 in a row; train.max_skipped = 1 are allowed" in str(error)


async def test_one_sample_without_a_finite_loss_is_named_and_costs_no_other(
    make_topology: MakeTopology, bus: Bus, tmp_path: Path
) -> None:
    """In every batch."""
    algorithm = {"num_steps_per_rollout": 1, "estimator": {"type": "grpo", "normalize": False}}
    topology = make_topology(algorithm=algorithm, train={"num_steps": 3, "max_skipped": 0})
    async with running(topology, bus, tmp_path / "run"):
        for step in range(3):
            numbers = range(step * GROUPS, (step + 1) * GROUPS)
            refs = [
                await publish_group(bus, number, rewards={1: LARGE} if number % GROUPS == 1 else {})
                for number in numbers
            ]
            await bus.publish(BatchReady(incarnation=1, step=step, groups=tuple(refs)))
        trained = of(await said_until(bus, BatchTrained, 3), BatchTrained)
    for number, event in enumerate(trained):
        (untrained,) = event.untrained
        assert (untrained.group_id, untrained.reason) == (GROUPS * number + 1, "not_finite")
        assert untrained.samples == ((1, 0),)
        assert (event.num_groups, event.num_samples, event.skipped_groups) == (GROUPS, 4 * GROUPS - 1, ())
        assert event.metrics["train/num_skipped_steps"] == 0
    state = await books_of(bus)
    assert (state.books().trained, state.books().skipped, state.books().closed) == (9, 0, True)
