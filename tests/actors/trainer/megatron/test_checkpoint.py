"""Checkpoints: what is resumed goes on exactly, what is torn is not there."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from actors.trainer.checkpoints import checkpoints_in, prune_checkpoints
from actors.trainer.commands import TrainerRank
from actors.trainer.megatron.checkpoint import load_checkpoint
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.train_step import TrainStep
from runtime.settings.topology import Topology
from tests.actors.trainer.hf import whole_weights
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import MakeTopology
from tests.support.checkpoint_tensors import tensors_of
from tests.support.checkpoints import save, save_checkpoint


def trainer(topology: Topology) -> tuple[Replica, TrainStep]:
    replica = Replica(topology, torch.device("cpu"))
    return replica, TrainStep(topology, replica)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_trainer_goes_on_exactly(make_topology: MakeTopology, tmp_path: Path, dtype: str) -> None:
    topology = make_topology(model={"dtype": dtype}, optimizer={"lr_warmup_iters": 5}, algorithm={"entropy_coef": 0.1})
    replica, train = trainer(topology)
    for step in range(2):
        train(random_batch(step))
    path = save_checkpoint(replica, tmp_path, step=2, incarnation=1)
    expected = [train(random_batch(step)).metrics["train/loss"] for step in (2, 3)]
    weights = whole_weights(replica.complete_chunks(), replica.hf)

    resumed, train_on = trainer(topology)
    assert load_checkpoint(resumed, path) == 2
    assert [train_on(random_batch(step)).metrics["train/loss"] for step in (2, 3)] == expected
    for name, weight in whole_weights(resumed.complete_chunks(), resumed.hf).items():
        assert torch.equal(weight, weights[name]), name


def test_a_checkpoint_is_synced_to_the_disk_before_it_is_there(
    make_topology: MakeTopology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, _ = trainer(make_topology())
    synced: list[str] = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    path = save_checkpoint(replica, tmp_path, step=0, incarnation=1)
    assert {str(path.with_name(f".{path.name}") / file.name) for file in path.iterdir()} < set(synced)
    assert synced[-1] == str(path.parent)


def test_the_random_state_is_part_of_a_checkpoint(make_topology: MakeTopology, tmp_path: Path) -> None:
    replica, _ = trainer(make_topology())
    torch.manual_seed(5)
    path = save_checkpoint(replica, tmp_path, step=0, incarnation=1)
    expected = torch.rand(3)
    torch.manual_seed(6)
    load_checkpoint(replica, path)
    assert torch.equal(torch.rand(3), expected)


def test_a_checkpoint_from_before_the_first_optimizer_step_works(make_topology: MakeTopology, tmp_path: Path) -> None:
    topology = make_topology()
    replica, train = trainer(topology)
    path = save_checkpoint(replica, tmp_path, step=0, incarnation=1)
    expected = [train(random_batch(step)).metrics for step in (0, 1)]
    resumed, train_on = trainer(topology)
    load_checkpoint(resumed, path)
    for step, metrics in enumerate(expected):
        assert train_on(random_batch(step)).metrics["train/grad_norm"] == metrics["train/grad_norm"]


def test_torn_checkpoints_are_not_there(make_topology: MakeTopology, tmp_path: Path) -> None:
    replica, _ = trainer(make_topology())
    save_checkpoint(replica, tmp_path, step=2, incarnation=1)
    whole = save_checkpoint(replica, tmp_path, step=4, incarnation=1)
    shutil.copytree(whole, tmp_path / "0001" / ".step-00000006")  # died before the rename
    shutil.copytree(whole, tmp_path / "0001" / "step-00000008")
    (tmp_path / "0001" / "step-00000008" / "metadata.json").unlink()
    assert [found.step for found in checkpoints_in(tmp_path)] == [2, 4]


def test_a_checkpoint_is_written_over_the_rest_of_a_torn_one(make_topology: MakeTopology, tmp_path: Path) -> None:
    replica, _ = trainer(make_topology())
    torn = tmp_path / "0001" / ".step-00000002"
    torn.mkdir(parents=True)
    (torn / "__0_0.distcp").write_bytes(b"half")
    assert load_checkpoint(replica, save_checkpoint(replica, tmp_path, step=2, incarnation=1)) == 2


def test_the_newest_has_the_most_steps_and_then_the_latest_incarnation(tmp_path: Path) -> None:
    for name in ("0001/step-00000010", "0002/step-00000004", "0010/step-00000010", "0003/step-00000010"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metadata.json").touch()
    assert [(found.step, found.incarnation) for found in checkpoints_in(tmp_path)] == [
        (4, 2),
        (10, 1),
        (10, 3),
        (10, 10),
    ]


def test_pruning_keeps_the_newest_and_removes_what_is_torn(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        (tmp_path / "0001" / f"step-{step:08d}").mkdir(parents=True)
        (tmp_path / "0001" / f"step-{step:08d}" / "metadata.json").touch()
    (tmp_path / "0001" / ".step-00000008").mkdir()
    assert [found.step for found in prune_checkpoints(tmp_path, 2)] == [4, 6]
    assert sorted(path.name for path in (tmp_path / "0001").iterdir()) == ["step-00000004", "step-00000006"]


def test_an_engine_resumes_from_the_newest_and_begins_at_nought_without(
    make_topology: MakeTopology, tmp_path: Path
) -> None:
    topology = make_topology(train={"keep_checkpoints": 2})
    engine = TrainerRank(topology, tmp_path / "run")
    assert engine.resume() == 0
    for step in range(3):
        engine.train(random_batch(step))
        _, kept = save(engine, step=step + 1, incarnation=1)
    assert [checkpoint.step for checkpoint in kept] == [2, 3]
    expected = engine.train(random_batch(3)).metrics["train/loss"]
    again = TrainerRank(topology, tmp_path / "run")
    assert again.resume() == 3
    assert again.train(random_batch(3)).metrics["train/loss"] == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("distributed", [False, True])
def test_the_other_optimizer_goes_on_from_a_checkpoint(
    make_topology: MakeTopology, tmp_path: Path, dtype: str, distributed: bool
) -> None:
    """The distributed optimizer and the other have main parameters under other names, or none."""

    def made(use_distributed_optimizer: bool) -> tuple[Replica, TrainStep]:
        table = {"optimizer": {"use_distributed_optimizer": use_distributed_optimizer}}
        return trainer(make_topology(model={"dtype": dtype}, trainer=table))

    replica, train = made(distributed)
    for step in range(2):
        train(random_batch(step))
    first = save_checkpoint(replica, tmp_path / "first", step=2, incarnation=1)
    other, train_on = made(not distributed)
    assert load_checkpoint(other, first) == 2
    back, _ = made(distributed)
    load_checkpoint(back, save_checkpoint(other, tmp_path / "other", step=2, incarnation=1))
    saved = tensors_of(first)
    returned = tensors_of(save_checkpoint(back, tmp_path / "back", step=2, incarnation=1))
    assert saved.keys() == returned.keys()
    assert all(torch.equal(tensor, returned[name]) for name, tensor in saved.items())
    for step in (2, 3):
        loss = train(random_batch(step)).metrics["train/loss"]
        assert train_on(random_batch(step)).metrics["train/loss"] == pytest.approx(loss, abs=1e-6)
