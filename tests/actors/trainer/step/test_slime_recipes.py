"""topologies/slime: the algorithms of slime's scripts can start on this machine, and train a step."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.train_step import TrainStep
from bin.start_topology import main
from runtime.settings.load import load_topology
from tests.actors.trainer.tiny import random_batch

ROOT = Path(__file__).parents[4]
RECIPES = sorted((ROOT / "topologies" / "slime").glob("*.toml"))
PAGE = ROOT / "docs" / "reference" / "slime-recipes.md"
VOCAB = 16  # of the demo model


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_of_slime_can_start_and_trains_a_step(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(path), "--check", "--set", f"run.dir={tmp_path}"]) == 0
    assert "valid; the run can start" in capsys.readouterr().out
    topology = load_topology(path, [f"run.dir={tmp_path}", "optimizer.lr=1e-3"]).topology
    replica, batch = Replica(topology, torch.device("cpu")), random_batch()
    before = [parameter.detach().clone() for chunk in replica.complete_chunks() for parameter in chunk.parameters()]
    trained = TrainStep(topology, replica)(replace(batch, tokens_N=batch.tokens_N % VOCAB))
    after = [parameter for chunk in replica.complete_chunks() for parameter in chunk.parameters()]
    assert np.isfinite([*trained.metrics.values()]).all()
    assert trained.metrics["train/grad_norm"] > 0
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    algorithm = topology.algorithm
    assert ("train/tis" in trained.metrics) == algorithm.use_tis
    assert ("train/kl_loss" in trained.metrics) == (algorithm.kl_loss_coef > 0)
    assert (topology.rollout.dynamic_filter == "nonzero_std") == path.stem.endswith("-filter")


def test_the_page_lists_every_recipe() -> None:
    text = PAGE.read_text()
    assert RECIPES
    assert [path.name for path in RECIPES if f"topologies/slime/{path.name})" not in text] == []
