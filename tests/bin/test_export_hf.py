"""bin/export-hf, as a person calls it. What it writes: tests/actors/trainer/test_export.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from actors.trainer.models.config import read_hf_config
from actors.trainer.models.files import random_source, set_format, write_model
from actors.trainer.models.shapes import hf_shapes
from bin.export_hf import main
from runtime.settings.topology import encode_topology
from tests.actors.trainer.tiny import TINY
from tests.build.topology import trainer_topology
from tests.support.commands import called

COMMAND = Path(__file__).parents[2] / "bin" / "physarum.py"


def export(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(COMMAND), "export-hf", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a run that has published weights."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "topology.json").write_bytes(
        encode_topology(trainer_topology(model, tmp_path / "runs", run={"name": "mine"}))
    )
    shape = read_hf_config(model)
    draw = random_source(shape, 0)
    weights = {name: draw(name) for name in hf_shapes(shape)}
    (run / "weights" / "v000003").mkdir(parents=True)
    write_model(weights, run / "weights" / "v000003", model_directory=model)
    return tmp_path


@pytest.mark.slow
def test_a_run_is_exported_by_its_name_and_a_second_time_refused(folder: Path) -> None:
    done = export(folder, "mine", "--out", "hf")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hf: published weights of version 3 of run mine\n", "")
    assert {path.name for path in (folder / "hf").iterdir()} == {"config.json", "model.safetensors"}
    again = export(folder, "mine", "--out", "hf")
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == "--out hf already exists: name a new or an empty directory\n"


@pytest.mark.slow
def test_weights_that_were_published_in_another_form_keep_the_config_that_says_so(folder: Path) -> None:
    run = folder / "runs" / "mine"
    topology = json.loads((run / "topology.json").read_bytes())
    topology["engines"] = {"policy": {"kind": "sglang", "weight_format": "fp8"}}
    (run / "topology.json").write_text(json.dumps(topology))
    published = run / "weights" / "v000003"
    shapes = {"lm_head.weight": (4, 4), "model.layers.0.mlp.up_proj.weight": (4, 4)}
    set_format(published / "config.json", "fp8", shapes)
    done = export(folder, "mine", "--out", "hf")
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / "hf" / "config.json").read_bytes() == (published / "config.json").read_bytes()
    config = json.loads((folder / "hf" / "config.json").read_bytes())
    assert (config["torch_dtype"], config["quantization_config"]["quant_method"]) == ("bfloat16", "fp8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("other", "--out", "hf"), "no run 'other'"),
        (("mine", "--out", "hf", "--step", "7"), "has no checkpoint of step 7, nor of any other"),
    ],
)
def test_a_run_or_step_that_is_not_there_is_wrong_input(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    done = called(main, *arguments, cwd=folder)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "hf").exists()
