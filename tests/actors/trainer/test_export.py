"""A run's model in Hugging Face's format, compared with transformers and with the trainer's own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from actors.trainer.commands import TrainerRank
from actors.trainer.export import CannotExport, export_run
from actors.trainer.models import shards as shards_module
from actors.trainer.models.files import file_source
from actors.trainer.models.shapes import VALUE_BIAS, VALUE_HEAD, hf_shapes
from runtime.settings.topology import encode_topology
from tests.actors.trainer.hf import write_model
from tests.actors.trainer.tiny import pairs, random_batch
from tests.build.topology import MakeTopology
from tests.support.checkpoints import save
from tests.support.published import flip


@pytest.fixture
def make_run(make_topology: MakeTopology, model_dir: Path, tmp_path: Path) -> Callable[..., TrainerRank]:
    """The trainer of a run on a model of transformers, in its run directory."""

    def make(*, tied: bool = False, dtype: str = "float32", **tables: Any) -> TrainerRank:
        write_model(model_dir, tied=tied)
        (model_dir / "tokenizer.json").write_text("{}")
        model, train = {"random_init": False, "dtype": dtype}, {"keep_checkpoints": 3}
        topology = make_topology(model=model, train=train, **tables)
        directory = tmp_path / "run"
        directory.mkdir()
        (directory / "topology.json").write_bytes(encode_topology(topology))
        return TrainerRank(topology, directory)

    return make


@pytest.mark.parametrize("tied", [False, True])
def test_an_exported_model_computes_in_transformers_what_the_trainer_does(
    make_run: Callable[..., TrainerRank], tmp_path: Path, tied: bool
) -> None:
    engine = make_run(tied=tied)
    engine.train(random_batch())
    save(engine, step=1, incarnation=1)
    expected = engine.publish(1, confirmed=0).probe
    assert expected is not None
    told = export_run(tmp_path / "run", tmp_path / "out").description
    assert told == "checkpoint of step 1"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.tensor([expected.token_ids])
    with torch.no_grad():
        log_probs = model(tokens).logits.float().log_softmax(-1)[0, :-1]
    found = log_probs.gather(-1, tokens[0, 1:, None])[:, 0]
    assert found.tolist() == pytest.approx(list(expected.log_probs[1:]), abs=1e-5)


def test_a_reward_model_is_exported_from_its_checkpoint_as_by_the_trainer(
    make_run: Callable[..., TrainerRank], tmp_path: Path
) -> None:
    algorithm, rollout = {"num_steps_per_rollout": 1, "loss": {"type": "rm"}}, {"n_samples_per_prompt": 1}
    engine = make_run(tied=True, algorithm=algorithm, rollout=rollout)
    engine.train(pairs(0))
    save(engine, step=1, incarnation=1)
    engine.export(tmp_path / "own")
    engine.close()
    export_run(tmp_path / "run", tmp_path / "out")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "own" / name).read_bytes()
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written[VALUE_HEAD].shape == (1, 16)
    assert not {"lm_head.weight", VALUE_BIAS} & written.keys()


def test_an_export_has_the_names_of_the_model_and_the_dtype_that_was_trained(
    make_run: Callable[..., TrainerRank], model_dir: Path, tmp_path: Path
) -> None:
    save(make_run(dtype="bfloat16"), step=0, incarnation=1)
    export_run(tmp_path / "run", tmp_path / "out")
    written, original = (load_file(place / "model.safetensors") for place in (tmp_path / "out", model_dir))
    assert {name: tensor.shape for name, tensor in written.items()} == {
        name: tensor.shape for name, tensor in original.items()
    }
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert ((tmp_path / "out").stat().st_mode & 0o777, modes) == (0o700, {0o600})


def test_a_step_is_chosen_and_the_newest_is_taken_else(make_run: Callable[..., TrainerRank], tmp_path: Path) -> None:
    engine = make_run()
    for step in range(3):
        engine.train(random_batch(step))
        save(engine, step=step + 1, incarnation=1)
        (tmp_path / str(step + 1)).mkdir()
        engine.export(tmp_path / str(step + 1) / "hf")
    export_run(tmp_path / "run", tmp_path / "two", step=2)
    export_run(tmp_path / "run", tmp_path / "newest")
    for out, step in (("two", 2), ("newest", 3)):
        expected = load_file(tmp_path / str(step) / "hf" / "model.safetensors")
        found = load_file(tmp_path / out / "model.safetensors")
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_without_a_checkpoint_the_newest_published_weights_are_taken(
    make_run: Callable[..., TrainerRank], tmp_path: Path
) -> None:
    engine = make_run()
    published = [engine.publish(version, confirmed=0).path for version in (1, 2)]
    assert export_run(tmp_path / "run", tmp_path / "out").description == "published weights of version 2"
    assert published[1] is not None
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (published[1] / "model.safetensors").read_bytes()
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_large_weights_are_split_into_shards_with_an_index(
    make_run: Callable[..., TrainerRank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_run()
    save(engine, step=0, incarnation=1)
    monkeypatch.setattr(shards_module, "SHARD_BYTES", 8000)
    out = tmp_path / "out"
    export_run(tmp_path / "run", out)
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 1
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    read = file_source(out)
    whole = {name: read(name) for name in hf_shapes(engine._replica.hf)}
    assert json.loads((out / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == sum(
        tensor.nbytes for tensor in whole.values()
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in whole.items())


def test_what_cannot_be_exported_is_refused_with_what_there_is(
    make_run: Callable[..., TrainerRank], model_dir: Path, tmp_path: Path
) -> None:
    engine, run, out = make_run(), tmp_path / "run", tmp_path / "out"
    with pytest.raises(CannotExport, match="has neither a checkpoint nor published weights"):
        export_run(run, out)
    with pytest.raises(CannotExport, match="no checkpoint of step 4, nor of any other"):
        export_run(run, out, step=4)
    for step in (2, 3):
        save(engine, step=step, incarnation=1)
    with pytest.raises(CannotExport, match="no checkpoint of step 4: it has those of 2, 3"):
        export_run(run, out, step=4)
    out.mkdir()
    (out / "precious").touch()
    with pytest.raises(CannotExport, match="already exists"):
        export_run(run, out)
    (model_dir / "config.json").unlink()
    with pytest.raises(CannotExport, match=r"model\.hf_checkpoint, has no config\.json any more"):
        export_run(run, tmp_path / "other")
    (run / "topology.json").unlink()
    with pytest.raises(CannotExport, match=r"topology\.json is missing"):
        export_run(run, tmp_path / "other")
    assert [path.name for path in out.iterdir()] == ["precious"]
    assert not (tmp_path / "other").exists()
    assert not (tmp_path / ".other").exists()


def test_published_weights_that_are_damaged_are_not_exported(
    make_run: Callable[..., TrainerRank], tmp_path: Path
) -> None:
    path = make_run().publish(1, confirmed=0).path
    assert path is not None
    flip(path / "model.safetensors", -1)
    with pytest.raises(CannotExport, match=r"weights/v000001 is damaged: its checksum is \w+, \w+ was published"):
        export_run(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
