"""The first train steps of a run with a critic, which may train the critic alone."""

from pathlib import Path

import pytest
import torch

from actors.trainer.commands import TrainerRank
from messages import BatchTrained, CheckpointSaved, WeightsAnnounced
from runtime.bus.bus import Bus
from tests.actors.trainer.hf import whole_weights
from tests.actors.trainer.hosting import of, running, said_until
from tests.actors.trainer.logs import publish_batch
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import MakeTopology
from tests.support.checkpoints import save

PPO = {"num_steps_per_rollout": 2, "estimator": {"type": "ppo", "num_critic_only_steps": 2}}
WARM_UP = {"lr": 1e-3, "lr_warmup_iters": 4}


def weights_of(rank: TrainerRank, role: int) -> dict[str, torch.Tensor]:
    replica = rank._replicas[role]
    return {name: own.clone() for name, own in whole_weights(replica.complete_chunks(), replica.hf).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_the_actor_keeps_its_weights_and_its_schedule_begins_afterwards(
    make_topology: MakeTopology, tmp_path: Path
) -> None:
    rank = TrainerRank(
        make_topology(algorithm=PPO, optimizer=WARM_UP, critic={"lr": 1e-2}, train={"num_steps": 4}), tmp_path
    )
    found = []
    for step in range(4):
        before = [weights_of(rank, role) for role in (0, 1)]
        found.append(rank.train(random_batch(step)).metrics)
        assert same(before[0], weights_of(rank, 0)) == (step < 2)
        assert not same(before[1], weights_of(rank, 1))
    policy = {"train/loss", "train/pg_loss", "train/grad_norm", "train/lr-pg_0", "perf/actor_train_time"}
    critic = {"train/value_loss", "train/value_clipfrac", "train/explained_variance", "train/critic-grad_norm"}
    critic |= {"train/critic-lr-pg_0", "rollout/values", "rollout/returns", "rollout/rewards", "perf/critic_train_time"}
    for step, metrics in enumerate(found):
        assert policy & metrics.keys() == (policy if step >= 2 else set())
        assert critic <= metrics.keys()
    # as the last of its two optimizer steps: the warm-up begins with the actor's first one
    assert [metrics["train/lr-pg_0"] for metrics in found[2:]] == pytest.approx([5e-4, 1e-3])
    assert [metrics["train/critic-lr-pg_0"] for metrics in found] == pytest.approx([5e-3, 1e-2, 1e-2, 1e-2])
    assert "train/masked_tokens/clip" not in found[0]
    assert "train/masked_tokens/clip" in found[2]


def test_a_run_that_starts_from_a_checkpoint_continues_the_actors_schedule(
    make_topology: MakeTopology, tmp_path: Path
) -> None:
    """Steps of the critic alone are no steps of that schedule, in the run that was saved and in a third one either."""
    schedule = {"lr": 1e-3, "lr_decay_style": "linear", "lr_warmup_iters": 2}
    rank = TrainerRank(make_topology(algorithm=PPO, optimizer=schedule, train={"num_steps": 5}), tmp_path / "first")
    for step in range(3):
        rank.train(random_batch(step))
    save(rank, step=3)
    expected = [rank.train(random_batch(step)).metrics["train/lr-pg_0"] for step in (3, 4)]
    assert len(set(expected)) == 2
    algorithm, found = PPO | {"estimator": {"type": "ppo", "num_critic_only_steps": 0}}, []
    for before, name in (("first", "second"), ("second", "third")):
        tables = {"trainer": {"load": str(tmp_path / before)}, "train": {"num_steps": 2 - len(found)}}
        new = TrainerRank(make_topology(algorithm=algorithm, optimizer=schedule, **tables), tmp_path / name)
        assert new.resume() == 0
        found.append(new.train(random_batch(0)).metrics["train/lr-pg_0"])
        save(new, step=1)
        again = TrainerRank(make_topology(algorithm=algorithm, optimizer=schedule, **tables), tmp_path / name)
        assert again.resume() == 1
        assert again._replica.untrained_before == 2
    assert found == expected


def test_the_reference_and_old_log_probs_are_computed_when_the_actor_trains(
    make_topology: MakeTopology, tmp_path: Path
) -> None:
    rank = TrainerRank(make_topology(algorithm=PPO | {"kl": {"type": "k1", "loss_coef": 0.1}}), tmp_path)
    passes: list[str] = []
    rank._replica.before_log_probs = passes.append
    for step in range(3):
        rank.train(random_batch(step))
        assert passes == ([] if step < 2 else ["", "ref_"])


@pytest.mark.anyio
@pytest.mark.usefixtures("actor_joins")
async def test_a_step_of_the_critic_announces_an_equal_version_so_that_no_sample_is_stale(
    make_topology: MakeTopology, bus: Bus, tmp_path: Path
) -> None:
    topology = make_topology(algorithm=PPO, train={"num_steps": 3})
    async with running(topology, bus, tmp_path / "run"):
        for step in range(3):
            await said_until(bus, WeightsAnnounced, step + 1)
            await publish_batch(bus, step)
        events = await said_until(bus, CheckpointSaved)
    announced = of(events, WeightsAnnounced)
    assert [(event.version, event.step) for event in announced] == [(1, 0), (2, 1), (3, 2), (4, 3)]
    checksums = [event.checksum for event in announced]
    assert checksums[0] == checksums[1] == checksums[2] != checksums[3]
    trained = of(events, BatchTrained)
    assert [event.num_samples for event in trained] == [12, 12, 12]
    assert {event.metrics["rollout/staleness_max"] for event in trained} == {0.0}
