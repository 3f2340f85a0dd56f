"""A run that begins from another run's checkpoint: from all of it, or from its weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from actors.trainer.checkpoints import RUN_FILE, SavedRun, checkpoint_at
from actors.trainer.commands import TrainerRank
from runtime.models.checkpoint_files import CHECKPOINTS
from tests.actors.trainer.hf import whole_weights, write_model
from tests.actors.trainer.tiny import TINY, random_batch
from tests.build.topology import MakeTopology
from tests.support.checkpoints import save

SCHEDULE = {"lr_decay_style": "linear", "lr_warmup_iters": 3}
DISTRIBUTED = {"optimizer": {"use_distributed_optimizer": True}}


def train(rank: TrainerRank, steps: range, *, first: int = 0) -> list[dict[str, float]]:
    """Metrics of steps on fixed samples, numbered from another one in the run.

    Left out are times, and counts of tokens by rule, which only step 0 of a run has.
    """
    batches = [replace(random_batch(step), step=step - first) for step in steps]
    metrics = [rank.train(batch).metrics for batch in batches]
    left_out = ("perf/", "train/masked_tokens/", "train/num_response_tokens")
    return [{name: value for name, value in one.items() if not name.startswith(left_out)} for one in metrics]


def weights_of(rank: TrainerRank) -> dict[str, torch.Tensor]:
    found = whole_weights(rank._replica.complete_chunks(), rank._replica.hf)
    return {name: tensor.clone() for name, tensor in found.items()}


@pytest.fixture
def other(make_topology: MakeTopology, tmp_path: Path) -> TrainerRank:
    """A run of which two of four planned steps are trained and saved."""
    topology = make_topology(optimizer=SCHEDULE, train={"num_steps": 4}, algorithm={"entropy_coef": 0.1})
    rank = TrainerRank(topology, tmp_path / "other")
    train(rank, range(2))
    save(rank, step=2, incarnation=1)
    return rank


def beginning(make_topology: MakeTopology, tmp_path: Path, load: Path, **tables: Any) -> TrainerRank:
    trainer = {"load": str(load)} | tables.pop("trainer", {})
    base: dict[str, Any] = {"optimizer": SCHEDULE, "train": {"num_steps": 2}, "algorithm": {"entropy_coef": 0.1}}
    topology = make_topology(trainer=trainer, run={"name": "new"}, **(base | tables))
    return TrainerRank(topology, tmp_path / "new")


def test_a_run_goes_on_exactly_where_another_one_was_saved(
    make_topology: MakeTopology, other: TrainerRank, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    save(other, step=3, incarnation=1)
    expected, drawn = train(other, range(2, 4)), torch.rand(2)
    new = beginning(make_topology, tmp_path, tmp_path / "other")
    torch.manual_seed(4)
    assert new.resume() == 0
    new._replica.steps_before = 2  # the checkpoint was saved under another number, to have a random state of its own
    assert train(new, range(2, 4), first=2) == expected
    assert torch.equal(torch.rand(2), drawn)
    assert [one["train/lr-pg_0"] for one in expected] != [0.0, 0.0]


def test_what_a_run_began_from_is_kept_over_its_own_checkpoints(
    make_topology: MakeTopology, other: TrainerRank, tmp_path: Path
) -> None:
    expected = train(other, range(2, 4))
    new = beginning(make_topology, tmp_path, tmp_path / "other")
    new.resume()
    assert train(new, range(2, 3), first=2) == expected[:1]
    save(new, step=1, incarnation=1)
    resumed = beginning(make_topology, tmp_path, tmp_path / "other")
    assert resumed.resume() == 1
    assert train(resumed, range(3, 4), first=2) == expected[1:]
    _, saved = checkpoint_at(tmp_path / "new")
    assert (saved.run, saved.step, saved.frontier, saved.steps_before) == ("new", 1, 1, 2)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of Megatron's distributed optimizer
@pytest.mark.parametrize("trainer", [{}, DISTRIBUTED])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fine_tuning_takes_the_weights_and_nothing_else(
    make_topology: MakeTopology, other: TrainerRank, tmp_path: Path, dtype: str, trainer: dict[str, Any]
) -> None:
    model = {"dtype": dtype}
    new = beginning(
        make_topology, tmp_path, tmp_path / "other", trainer={"load_weights_only": True, **trainer}, model=model
    )
    torch.manual_seed(4)
    drawn = torch.rand(2)
    torch.manual_seed(4)
    assert new.resume() == 0
    assert torch.equal(torch.rand(2), drawn)
    expected = weights_of(other)
    found = weights_of(new)
    assert all(torch.equal(found[name], tensor.to(found[name].dtype)) for name, tensor in expected.items())
    plain = TrainerRank(
        make_topology(
            optimizer=SCHEDULE, train={"num_steps": 2}, algorithm={"entropy_coef": 0.1}, model=model, trainer=trainer
        ),
        tmp_path / "plain",
    )
    plain._replica.set_weights(lambda name, cut=None: expected[name])
    assert train(new, range(2)) == train(plain, range(2))


def test_a_checkpoint_is_named_by_its_own_directory_too(
    make_topology: MakeTopology, other: TrainerRank, tmp_path: Path
) -> None:
    older = weights_of(other)
    path = checkpoint_at(tmp_path / "other")[0]
    train(other, range(2, 3))
    save(other, step=3, incarnation=1)
    new = beginning(make_topology, tmp_path, path)
    new.resume()
    assert all(torch.equal(tensor, older[name]) for name, tensor in weights_of(new).items())


def test_what_no_run_can_begin_from_is_refused(
    make_topology: MakeTopology, other: TrainerRank, model_dir: Path, tmp_path: Path
) -> None:
    def refused(load: Path, says: str, **tables: Any) -> None:
        with pytest.raises(ValueError, match=says):
            beginning(make_topology, tmp_path, load, **tables).resume()

    refused(tmp_path / "nowhere", "nowhere: no such directory")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "neither a run with a complete checkpoint nor a complete checkpoint")
    refused(tmp_path / "other", "trained in float32, .* model.dtype = bfloat16", model={"dtype": "bfloat16"})
    (model_dir / "config.json").write_bytes(msgspec.json.encode(TINY | {"hidden_size": 24}))
    says = "of another model: hidden_size is 16 in the checkpoint, and 24 in config.json"
    refused(tmp_path / "other", says)
    refused(tmp_path / "other", says, trainer={"load_weights_only": True})
    path, saved = checkpoint_at(tmp_path / "other")
    assert isinstance(saved, SavedRun)
    (path / RUN_FILE).write_bytes(b"{")
    refused(tmp_path / "other", r"run\.json cannot be read")
    said = msgspec.json.format(msgspec.json.encode(saved))
    (path / RUN_FILE).write_bytes(said.replace(b'"step": 2', b'"step": 3'))
    refused(tmp_path / "other", r"step-00000002 is damaged: the sha256 of run\.json differs")
    (path / RUN_FILE).write_bytes(said)
    (path / "common.pt").write_bytes(b"half")
    refused(tmp_path / "other", r"step-00000002 is damaged: common\.pt has 4 bytes")
    (path / "metadata.json").unlink()
    refused(path, "nor a complete checkpoint")
    assert path.parent.parent == tmp_path / "other" / CHECKPOINTS


@pytest.mark.parametrize("weights_only", [False, True])
def test_the_reference_is_what_training_starts_from_and_stays_over_a_resume(
    make_topology: MakeTopology, other: TrainerRank, tmp_path: Path, weights_only: bool
) -> None:
    """The first step's divergence is 0. A later checkpoint in the directory of `trainer.load` changes nothing."""
    tables: dict[str, Any] = {
        "algorithm": {"num_steps_per_rollout": 1, "kl": {"type": "k2", "loss_coef": 0.1}},
        "trainer": {"load_weights_only": weights_only},
        "train": {"num_steps": 3},
    }
    new = beginning(make_topology, tmp_path, tmp_path / "other", **tables)
    assert new.resume() == 0
    before = train(new, range(1))
    assert before[0]["train/kl_loss"] == 0.0
    save(new, step=1, incarnation=1)
    expected = train(new, range(1, 3))
    assert expected[0]["train/kl_loss"] > 0.0
    train(other, range(2, 4))
    save(other, step=4, incarnation=1)
    resumed = beginning(make_topology, tmp_path, tmp_path / "other", **tables)
    assert resumed.resume() == 1
    assert train(resumed, range(1, 3)) == expected


def test_a_reference_that_is_named_stays_with_a_checkpoint_to_start_from(
    make_topology: MakeTopology, tmp_path: Path
) -> None:
    write_model(tmp_path / "first")
    write_model(tmp_path / "second", initializer_range=0.1)
    model = {"hf_checkpoint": str(tmp_path / "first"), "random_init": False, "ref_load": str(tmp_path / "second")}
    algorithm = {"num_steps_per_rollout": 1, "kl": {"type": "k2", "loss_coef": 0.1}}
    tables: dict[str, Any] = {"model": model, "algorithm": algorithm}
    old = TrainerRank(make_topology(**tables), tmp_path / "other")
    save(old, step=0, incarnation=1)
    new = beginning(make_topology, tmp_path, tmp_path / "other", **tables)
    new.resume()
    (expected,), (found,) = train(old, range(1)), train(new, range(1))
    assert found["train/kl_loss"] == expected["train/kl_loss"] > 0.0
