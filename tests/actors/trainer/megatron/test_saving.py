"""A checkpoint is written beside training, and one that death cut off is not there."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem

from actors.trainer import file_checksums
from actors.trainer.checkpoints import checkpoints_in
from actors.trainer.commands import TrainerRank
from actors.trainer.file_checksums import damage_of
from actors.trainer.megatron import saving
from actors.trainer.megatron.checkpoint import begin_save, load_checkpoint
from actors.trainer.megatron.kept_weights import KeptWeights
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.models.files import random_source
from actors.trainer.step.train_step import TrainStep
from runtime.process.actor import InputError
from runtime.util.disk import NoSpace, free_bytes
from tests.actors.trainer.hf import whole_weights
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import MakeTopology
from tests.support.checkpoints import save, save_checkpoint
from tests.support.small_disk import fill, small_disk

TIMEOUT_S = 40.0
CHANGES: dict[str, Callable[[Replica, Path], object]] = {
    "step": lambda replica, _: replica.optimizer_step(learning_rate=1e-3, weight_decay=0.1),
    "reset": lambda replica, _: replica.reset_optimizer(),
    "exchange": lambda replica, _: replica.exchange_weights(replica.weights_copy()),
    "keep": lambda replica, _: replica.keep_weights(KeptWeights(replica.weights_copy()), 1),
    "set": lambda replica, _: replica.set_weights(random_source(replica.hf, 3)),
    "offload": lambda replica, place: replica.offload(place),
    "rest": lambda replica, place: replica.rest(place),
}


@pytest.fixture
def busy() -> Iterator[tuple[ThreadPoolExecutor, Event]]:
    """A thread that writes nothing until it is let go."""
    go = Event()
    with ThreadPoolExecutor(max_workers=1) as executor:
        executor.submit(go.wait, TIMEOUT_S)
        yield executor, go
        go.set()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_holds_the_state_it_was_begun_with(
    make_topology: MakeTopology, tmp_path: Path, busy: tuple[ThreadPoolExecutor, Event], dtype: str
) -> None:
    topology, (executor, go) = make_topology(model={"dtype": dtype}), busy
    replica = Replica(topology, torch.device("cpu"))
    train = TrainStep(topology, replica)
    train(random_batch(0))
    saving = begin_save(replica, tmp_path, executor, step=1, incarnation=1)
    expected = [train(random_batch(step)).metrics["train/loss"] for step in (1, 2)]
    weights = whole_weights(replica.complete_chunks(), replica.hf)
    assert not saving.written.done()
    assert checkpoints_in(tmp_path) == []
    go.set()
    path = saving.finish()
    assert [found.path for found in checkpoints_in(tmp_path)] == [path]

    resumed = Replica(topology, torch.device("cpu"))
    assert load_checkpoint(resumed, path) == 1
    train_on = TrainStep(topology, resumed)
    assert [train_on(random_batch(step)).metrics["train/loss"] for step in (1, 2)] == expected
    for name, weight in whole_weights(resumed.complete_chunks(), resumed.hf).items():
        assert torch.equal(weight, weights[name]), name


def from_live_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy no tensor before the state changes, as with a large model: the pool has room for one of 10 kB."""
    monkeypatch.setattr(saving, "POOL_BYTES", 10_000)
    monkeypatch.setattr(saving, "LARGE_BYTES", 0)


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_written_from_the_live_state_has_the_bytes_of_one_written_from_copies(
    make_topology: MakeTopology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, distributed: bool
) -> None:
    trainer = {"optimizer": {"use_distributed_optimizer": distributed}}
    topology = make_topology(model={"dtype": dtype}, trainer=trainer)
    replica = Replica(topology, torch.device("cpu"))
    train = TrainStep(topology, replica)
    train(random_batch(0))
    copied = save_checkpoint(replica, tmp_path / "copied", step=1, incarnation=1)
    from_live_state(monkeypatch)
    reached, go, write = Event(), Event(), filesystem._write_item

    def write_late(*arguments: Any) -> Any:
        reached.set()
        assert go.wait(TIMEOUT_S)
        return write(*arguments)

    monkeypatch.setattr(filesystem, "_write_item", write_late)
    with ThreadPoolExecutor(max_workers=1) as executor:
        begun = begin_save(replica, tmp_path / "live", executor, step=1, incarnation=1)
        assert reached.wait(TIMEOUT_S)  # one tensor is being written
        settle = replica.before_change

        def asked() -> None:
            go.set()
            settle()

        replica.before_change = asked
        train(random_batch(1))
        path = begun.finish()
    for file in copied.glob("*.distcp"):
        assert file.read_bytes() == (path / file.name).read_bytes()


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_nothing_changes_the_state_before_the_writer_has_it(
    make_topology: MakeTopology,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    busy: tuple[ThreadPoolExecutor, Event],
    change: str,
) -> None:
    from_live_state(monkeypatch)
    topology, (executor, go) = make_topology(), busy
    replica = Replica(topology, torch.device("cpu"))
    TrainStep(topology, replica)(random_batch(0))
    saving = begin_save(replica, tmp_path, executor, step=1, incarnation=1)
    asked, before_change = Event(), replica.before_change

    def settle() -> None:
        asked.set()
        go.set()
        before_change()

    replica.before_change = settle
    CHANGES[change](replica, tmp_path)
    assert asked.is_set()
    saving.finish()


@pytest.mark.parametrize("window", ["before a file", "between the ranks' files", "before the rename"])
def test_a_start_takes_the_last_complete_checkpoint_and_clears_the_rest_away(
    make_topology: MakeTopology, tmp_path: Path, busy: tuple[ThreadPoolExecutor, Event], window: str
) -> None:
    topology, (executor, _) = make_topology(), busy
    dead = TrainerRank(topology, tmp_path / "run")
    dead.train(random_batch(0))
    save(dead, step=1, incarnation=1)
    expected = dead.train(random_batch(1)).metrics["train/loss"]
    if window == "before a file":
        dead._executor = executor
    written = dead.begin_save(step=2, incarnation=1)
    folder = tmp_path / "run" / "checkpoints" / "0001"
    torn = folder / ".step-00000002"
    if window != "before a file":
        written.result(TIMEOUT_S)
        assert (torn / "__0_0.distcp").stat().st_size > 0
    if window == "between the ranks' files":
        (torn / "__0_0.distcp").rename(torn / "__1_0.distcp")
    assert torn.is_dir()
    again = TrainerRank(topology, tmp_path / "run")
    assert again.resume() == 1
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    assert again.train(random_batch(1)).metrics["train/loss"] == expected


def test_a_file_that_cannot_be_written_fails_the_checkpoint(make_topology: MakeTopology, tmp_path: Path) -> None:
    rank = TrainerRank(make_topology(), tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "0001").mkdir(parents=True)
    held = Event()
    rank._executor.submit(held.wait, TIMEOUT_S)
    rank.begin_save(step=1, incarnation=1)
    torn = tmp_path / "run" / "checkpoints" / "0001" / ".step-00000001"
    for file in torn.iterdir():
        file.unlink()
    torn.rmdir()
    held.set()
    with pytest.raises(OSError, match="No such file"):
        rank.finish_save()
    assert checkpoints_in(tmp_path / "run" / "checkpoints") == []


@pytest.mark.parametrize("harm", ["is not there", "is cut off"])
def test_a_checkpoint_without_a_file_of_a_rank_is_not_completed(
    make_topology: MakeTopology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    monkeypatch.setattr(saving, "SEEN_WITHIN_S", 0.5)
    rank = TrainerRank(make_topology(), tmp_path / "run")
    rank.begin_save(step=1, incarnation=1).result(TIMEOUT_S)
    torn = tmp_path / "run" / "checkpoints" / "0001" / ".step-00000001"
    file = torn / "__0_0.distcp"
    if harm == "is not there":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"1 of \d+ files? that the ranks wrote are not there \(__0_0.distcp\)"):
        rank.finish_save()
    assert checkpoints_in(tmp_path / "run" / "checkpoints") == []


def test_a_file_that_a_network_disk_shows_late_is_waited_for(
    make_topology: MakeTopology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = TrainerRank(make_topology(), tmp_path / "run")
    rank.begin_save(step=1, incarnation=1).result(TIMEOUT_S)
    file = tmp_path / "run" / "checkpoints" / "0001" / ".step-00000001" / "__0_0.distcp"
    hidden = file.rename(tmp_path / "hidden")
    monkeypatch.setattr(file_checksums.time, "sleep", lambda _: hidden.rename(file))
    path, _ = rank.finish_save()
    assert damage_of(path, thorough=True) is None


@pytest.mark.parametrize("room", ["none from the start", "taken meanwhile"])
def test_a_checkpoint_that_does_not_fit_on_the_disk_says_how_large_it_is_and_leaves_nothing(
    make_topology: MakeTopology, tmp_path: Path, busy: tuple[ThreadPoolExecutor, Event], room: str
) -> None:
    (executor, go), replica = busy, Replica(make_topology(), torch.device("cpu"))
    with small_disk(tmp_path / "small", 1 << 20) as place:
        path = place / "0001" / "step-00000001"
        if room == "none from the start":
            fill(place, 40_000)
            with pytest.raises(
                NoSpace, match=f"for {path.parent}/.{path.name}: [0-9,]* bytes needed, 3[0-9,]* bytes free"
            ):
                begin_save(replica, place, executor, step=1, incarnation=1)
        else:
            saving = begin_save(replica, place, executor, step=1, incarnation=1)
            filler = fill(place, 8192)
            go.set()
            with pytest.raises(NoSpace, match=r"bytes needed, [0-9,]* bytes free; free some, and the same command"):
                saving.finish()
            assert free_bytes(place) >= 8192
            filler.unlink()
            assert begin_save(replica, place, executor, step=1, incarnation=1).finish() == path
        assert not (path.parent / f".{path.name}").exists()


def test_a_rank_that_is_lost_while_a_checkpoint_is_completed_is_no_full_disk(
    make_topology: MakeTopology, tmp_path: Path, busy: tuple[ThreadPoolExecutor, Event]
) -> None:
    (executor, go), replica = busy, Replica(make_topology(), torch.device("cpu"))
    with small_disk(tmp_path / "small", 1 << 20) as place:
        saving = begin_save(replica, place, executor, step=1, incarnation=1)
        go.set()
        saving.written.result(TIMEOUT_S)
        fill(place, 8192)  # less than the checkpoint, and more than what is still to be written of it
        with (
            mock.patch.object(dist, "gather_object", side_effect=RuntimeError("Connection closed by peer")),
            pytest.raises(RuntimeError, match="Connection closed by peer"),
        ):
            saving.finish()


def test_weights_that_do_not_fit_on_the_disk_say_how_large_they_are(
    make_topology: MakeTopology, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "small", 1 << 20) as place:
        rank = TrainerRank(make_topology(), place)
        filler = fill(place, 8192)
        with pytest.raises(NoSpace, match=f"for {place}/weights/.v000001: [0-9,]* bytes needed"):
            rank.publish(1, confirmed=0)
        filler.unlink()
        assert rank.publish(1, confirmed=0).size_bytes > 8192
