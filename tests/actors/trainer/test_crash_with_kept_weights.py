"""A trainer that dies with a reference that moved and with old actors, and the one that goes on to the same weights."""

from pathlib import Path

import pytest

from actors.trainer.commands import TrainerRank
from actors.trainer.data.assembly import CollectedGroup, assemble
from actors.trainer.torch_thread import TorchThread
from messages import BatchTrained
from runtime.bus.bus import Bus
from runtime.settings.topology import Topology
from tests.actors.trainer.hosting import errors_of, of, running
from tests.actors.trainer.logs import GROUPS, completed, payload
from tests.actors.trainer.test_crash_windows import (
    NUM_STEPS,
    SAVE_INTERVAL,
    WINDOWS,
    Died,
    beside,
    check,
    dying,
    log_until_the_end,
)
from tests.build.topology import MakeTopology

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("actor_joins")]

AGES = (0, 1, 0, 1)  # of the batches' tokens: batch 2 waits for an evaluation of weights 2


@pytest.fixture
def topology(make_topology: MakeTopology) -> Topology:
    return make_topology(
        train={"num_steps": NUM_STEPS, "save_interval": SAVE_INTERVAL},
        rollout={"max_token_staleness": 2},
        algorithm={
            "ref_update_interval": 1,
            "keep_old_actor": True,
            "reset_optimizer_states": True,
            "kl": {"type": "k3", "loss_coef": 0.3},
        },
    )


async def undisturbed(topology: Topology, directory: Path) -> list[str]:
    """Checksums of the weights after each step, trained without a bus."""

    def train_all() -> list[str]:
        engine = TrainerRank(topology, directory)
        sums = [engine.publish(1, confirmed=0).checksum]
        for step in range(NUM_STEPS):
            numbers = range(step * GROUPS, (step + 1) * GROUPS)
            groups = [CollectedGroup(completed(number, 1), {1: payload(number)}) for number in numbers]
            batch = assemble(step, groups, {1: step - AGES[step]})
            assert batch is not None
            engine.train(batch)
            sums.append(engine.publish(step + 2, confirmed=0).checksum)
        engine.close()
        return sums

    with TorchThread() as torch_thread:
        return await torch_thread.run(train_all)


@pytest.mark.parametrize("window", ["before step 1", "after checkpoint of 2", "before weights of 3"])
async def test_a_run_with_kept_weights_goes_on_to_the_same_bits(
    topology: Topology, bus: Bus, tmp_path: Path, window: str
) -> None:
    """Before the checkpoint with them, with it, and one step after it."""
    async with beside(bus, max_staleness=1):
        errors = await errors_of(topology, bus, tmp_path / "run", through=dying(*WINDOWS[window]))
        assert {type(error) for error in errors} == {Died}
        async with running(topology, bus, tmp_path / "run"):
            log = await log_until_the_end(bus)
    check(log, await undisturbed(topology, tmp_path / "undisturbed"), deaths=1)
    last = {event.step: event.metrics for event in of(log, BatchTrained)}
    assert [last[step]["train/ref_step"] for step in range(NUM_STEPS)] == list(range(NUM_STEPS))
    assert [last[step]["train/old_actor_ratio"] for step in range(NUM_STEPS)] == [float(age > 0) for age in AGES]
