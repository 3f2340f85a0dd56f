"""The recipe of these tests, without a server of SGLang."""

import os
from pathlib import Path

import pytest

from runtime.settings.load import load_topology
from tests.sglang.recipe import DEMO, RECIPE
from tests.sglang.server import ROOT, SHIM


def test_the_recipe_finds_all_its_files_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    topology = load_topology(RECIPE).topology
    assert topology.model.hf_checkpoint == str(DEMO / "models/reverse-digits")
    assert [item.path for item in topology.data] == [str(DEMO / "data/reverse-digits/train.jsonl")]
    assert [item.path for item in topology.eval] == [str(DEMO / "data/reverse-digits/eval.jsonl")]
    engine = topology.engines["policy"]
    assert engine.env["PYTHONPATH"] == str(SHIM)
    assert os.path.normpath(RECIPE.parent / str(engine.python)) == str(ROOT / ".venv-sglang/bin/python")
