"""What a run resumes from: its own model's newest checkpoint without damage."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.trainer.checkpoints import checkpoints_in, kept_of, set_aside_damaged
from actors.trainer.commands import TrainerRank
from actors.trainer.export import CannotExport, export_run, find_source
from runtime.models.checkpoint_files import CHECKPOINTS, CHECKSUMS_FILE
from runtime.report.summary import KeptCheckpoint
from runtime.settings.topology import Topology, encode_topology
from tests.actors.trainer.tiny import TINY, random_batch
from tests.build.topology import MakeTopology
from tests.support.checkpoints import save

FILES = (".metadata", "__0_0.distcp", "checksums.json", "common.pt", "metadata.json", "run.json")


def cut(file: Path) -> None:
    """Lose the last byte."""
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    """Change one bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {"cut": cut, "missing": Path.unlink, "one bit": flip}


@pytest.fixture
def topology(make_topology: MakeTopology) -> Topology:
    return make_topology(train={"num_steps": 8}, algorithm={"entropy_coef": 0.1})


@pytest.fixture
def saved(topology: Topology, tmp_path: Path) -> TrainerRank:
    """A run with checkpoints of steps 1 and 2."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "topology.json").write_bytes(encode_topology(topology))
    rank = TrainerRank(topology, run)
    for step in range(2):
        rank.train(random_batch(step))
        save(rank, step=step + 1, incarnation=1)
    return rank


def newest(run: Path) -> Path:
    return checkpoints_in(run / CHECKPOINTS)[-1].path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            r"rope\.theta is 10000\.0 in the checkpoint, .* 500000",
        ),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is false in the checkpoint, and true in config.json"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-6 in the checkpoint, and .* in config.json"),
        ({"max_position_embeddings": 128}, "max_position_embeddings is 64 in the checkpoint, and 128 in config.json"),
    ],
)
def test_a_run_resumes_with_its_own_model_alone(
    saved: TrainerRank, topology: Topology, model_dir: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    (model_dir / "config.json").write_text(json.dumps(TINY | change))
    with pytest.raises(ValueError, match=words):
        TrainerRank(topology, tmp_path / "run").resume()


def test_another_run_begins_with_the_same_model_or_a_longer_context(
    saved: TrainerRank, make_topology: MakeTopology, model_dir: Path, tmp_path: Path
) -> None:
    other = make_topology(trainer={"load": str(tmp_path / "run")}, run={"name": "other"})
    (model_dir / "config.json").write_text(json.dumps(TINY | {"max_position_embeddings": 128}))
    assert TrainerRank(other, tmp_path / "other").resume() == 0
    changed = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    (model_dir / "config.json").write_text(json.dumps(TINY | changed))
    with pytest.raises(
        ValueError, match=r"of another model: layers\.0\.attention\.rope\.theta is 10000\.0 in the checkpoint"
    ):
        TrainerRank(other, tmp_path / "other").resume()


@pytest.mark.parametrize("damage", DAMAGES)
def test_any_damage_to_any_file_sets_the_newest_checkpoint_aside(
    saved: TrainerRank, tmp_path: Path, damage: str
) -> None:
    for name in FILES:
        run = tmp_path / f"copy of {name}"
        shutil.copytree(tmp_path / "run", run)
        assert sorted(file.name for file in newest(run).iterdir()) == sorted(FILES)
        DAMAGES[damage](newest(run) / name)
        (aside,) = set_aside_damaged(run / CHECKPOINTS)
        assert (aside.step, aside.path.name) == (2, "damaged-step-00000002"), name
        assert name in aside.reason or name == CHECKSUMS_FILE  # in which a changed digit accuses another file
        assert aside.path.is_dir()
        assert [found.step for found in checkpoints_in(run / CHECKPOINTS)] == [1]


@pytest.mark.parametrize("damage", DAMAGES)
def test_training_goes_on_exactly_from_the_older_checkpoint(
    saved: TrainerRank, topology: Topology, tmp_path: Path, damage: str
) -> None:
    expected = saved.train(random_batch(2)).metrics["train/loss"]
    DAMAGES[damage](newest(tmp_path / "run") / "__0_0.distcp")
    again = TrainerRank(topology, tmp_path / "run")
    assert again.resume() == 1
    again.train(random_batch(1))
    assert again.train(random_batch(2)).metrics["train/loss"] == expected
    (aside,) = again.take_set_aside()
    assert aside.path == tmp_path / "run" / CHECKPOINTS / "0001" / "damaged-step-00000002"
    assert again.take_set_aside() == ()


def test_a_damaged_checkpoint_counts_neither_as_kept_nor_as_oldest(
    saved: TrainerRank, topology: Topology, tmp_path: Path
) -> None:
    flip(newest(tmp_path / "run") / "__0_0.distcp")
    again = TrainerRank(topology, tmp_path / "run")
    again.resume()
    _, kept = save(again, step=3, incarnation=2)
    assert [checkpoint.step for checkpoint in kept] == [1, 3]
    cut(newest(tmp_path / "run") / "common.pt")  # while the run goes on
    _, kept = save(again, step=4, incarnation=2)
    assert [checkpoint.step for checkpoint in kept] == [1, 4]
    asides = again.take_set_aside()
    assert [aside.step for aside in asides] == [2, 3]
    assert all(aside.path.is_dir() for aside in asides)


def test_a_checkpoint_of_an_earlier_version_is_named_and_stays(
    saved: TrainerRank, topology: Topology, tmp_path: Path
) -> None:
    path = newest(tmp_path / "run")
    (path / "checksums.json").unlink()
    said = json.loads((path / "run.json").read_text())
    del said["has_checksums"]
    (path / "run.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match="step-00000002 was written by an earlier version"):
        TrainerRank(topology, tmp_path / "run").resume()
    assert path.is_dir()


@pytest.mark.parametrize("damage", DAMAGES)
def test_any_damage_to_the_last_checkpoint_of_a_finished_run_is_told(
    saved: TrainerRank, tmp_path: Path, damage: str
) -> None:
    """`metadata.json` too, without which nothing lists the checkpoint as complete. The export passes it over."""
    for name in FILES:
        run = tmp_path / f"copy of {name}"
        shutil.copytree(tmp_path / "run", run)
        path = newest(run)
        DAMAGES[damage](path / name)
        kept = kept_of(run)
        assert kept is not None
        (told,) = kept.damages
        assert (kept.step, told.startswith(f"{path} is damaged: ")) == (1, True), name
        source = find_source(run, None)
        assert source.description.startswith("checkpoint of step 1 (that of step 2 is damaged: "), name
        with pytest.raises(CannotExport, match="the checkpoint of step 2 is damaged"):
            find_source(run, 2)
        assert path.is_dir()  # the run may be at work


def test_the_checkpoints_that_are_left_say_of_which_step_the_result_is(saved: TrainerRank, tmp_path: Path) -> None:
    run = tmp_path / "run"
    second, first = newest(run), newest(run).with_name("step-00000001")
    assert kept_of(run) == KeptCheckpoint(step=2)
    for file in second.iterdir():
        file.unlink()
    empty = f"{second} is damaged: checksums.json is missing"
    assert kept_of(run) == KeptCheckpoint(step=1, damages=(empty,))
    (first / "common.pt").unlink()
    both = (empty, f"{first} is damaged: common.pt is missing")
    assert kept_of(run) == KeptCheckpoint(step=0, damages=both)
    with pytest.raises(CannotExport, match=r"that of step 2 is damaged: .* is missing; that of step 1 is damaged"):
        find_source(run, None)
    shutil.rmtree(second)
    assert kept_of(run) == KeptCheckpoint(step=0, damages=both[1:])  # it was the only one
    shutil.rmtree(first)
    assert kept_of(run) is None


def test_an_export_passes_a_damaged_checkpoint_over_and_says_so(saved: TrainerRank, tmp_path: Path) -> None:
    flip(newest(tmp_path / "run") / "__0_0.distcp")
    told = export_run(tmp_path / "run", tmp_path / "out").description
    assert told.startswith("checkpoint of step 1 (that of step 2 is damaged: the sha256 of __0_0.distcp")
    assert newest(tmp_path / "run").name == "step-00000002"  # the run may be at work
    with pytest.raises(CannotExport, match=r"checkpoint of step 2 is damaged: the sha256 of __0_0\.distcp"):
        export_run(tmp_path / "run", tmp_path / "named", step=2)


def test_an_export_has_the_config_of_what_was_trained(saved: TrainerRank, model_dir: Path, tmp_path: Path) -> None:
    changed = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    (model_dir / "config.json").write_text(json.dumps(TINY | changed))
    with pytest.raises(ValueError, match=r"rope\.theta is 10000\.0 in the checkpoint"):
        export_run(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
