"""A run's length in epochs."""

from pathlib import Path

import pytest

from actors.buffer.prompts.source import count_steps, steps_per_epoch
from bin.start_topology import main
from runtime.data.data_files import DataError
from runtime.settings.load import load_topology
from runtime.settings.reading.config import TopologyError
from runtime.settings.topology import Topology
from tests.support.commands import called

ROOT = Path(__file__).resolve().parents[4]
LAPTOP = ROOT / "topologies/laptop.toml"
EPOCHS = ("train.num_steps=0", "train.num_epoch=3")


def laptop(*overrides: str) -> Topology:
    """78 prompts of four tokens."""
    return load_topology(LAPTOP, (*EPOCHS, *overrides)).topology


@pytest.mark.parametrize(("batch", "steps"), [(1, 78), (26, 3), (32, 2), (78, 1)])
def test_an_epoch_has_its_full_batches_of_usable_prompts(batch: int, steps: int) -> None:
    sizes = (f"rollout.rollout_batch_size={batch}",)
    assert steps_per_epoch(laptop(*sizes)) == steps
    second = ("data.1.name=e", "data.1.path=demo/data/reverse-digits/train.jsonl@[:10]", "data.1.rm_type=f1")
    assert steps_per_epoch(laptop(*sizes, *second)) == 88 // batch


def test_epochs_become_train_steps() -> None:
    train = count_steps(laptop("rollout.rollout_batch_size=32")).train
    assert (train.num_steps, train.num_epoch) == (6, None)


def test_an_epoch_without_a_full_batch_is_refused() -> None:
    with pytest.raises(DataError, match="an epoch has 78 prompts, less than one batch"):
        count_steps(laptop("rollout.rollout_batch_size=79", "algorithm.num_steps_per_rollout=1"))


def test_rules_hold_for_the_counted_steps() -> None:
    with pytest.raises(TopologyError, match="must end before the decay does, after 6 optimizer steps"):
        count_steps(laptop("optimizer.lr_decay_style=linear"))


def shown(*overrides: str) -> tuple[int, str, str]:
    words = [word for override in (*EPOCHS, *overrides) for word in ("--set", override)]
    done = called(main, LAPTOP, "--plan", *words)
    return done.returncode, done.stdout, done.stderr


def test_the_plan_of_a_run_of_epochs_has_its_train_steps() -> None:
    code, out, _ = shown()
    assert code == 0
    assert "3 steps of 64 groups" in out


def test_where_the_data_is_not_here_epochs_stay_uncounted() -> None:
    _, out, err = shown("data.0.path=nowhere.jsonl")
    assert "3 epochs of 64 groups" in out
    assert "note: the number of steps of train.num_epoch is unknown here: nowhere.jsonl: cannot be read" in err
