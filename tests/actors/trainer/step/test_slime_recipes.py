"""topologies/slime: the algorithms of slime's scripts can start on this machine, and train a step."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.train_step import TrainStep
from bin.slime_scripts.script import read_script
from bin.start_topology import main
from runtime.settings.load import load_topology
from tests.actors.trainer.tiny import random_batch
from tests.support.slime_effective import differences

ROOT = Path(__file__).parents[4]
RECIPES = sorted((ROOT / "topologies" / "slime").glob("*.toml"))
PAGE = ROOT / "docs" / "reference" / "slime-recipes.md"
VOCAB = 16  # of the demo model
# What all scripts have, with the sizes of a tiny model; then what each recipe adds, as its page says
SCRIPT = """--rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-max-prompt-len 16 --rollout-max-response-len 4
--rollout-shuffle --label-key label --apply-chat-template --rm-type positional_match --num-rollout 3 --lr 1e-6
--lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98"""
CLIP, FILTER = "--eps-clip 0.2 --eps-clip-high 0.28", "--over-sampling-batch-size 32"
FLAGS = {
    "grpo": CLIP,
    "grpo-filter": f"{CLIP} {FILTER}",
    "grpo-kl": f"{CLIP} --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl",
    "grpo-mis": f"{CLIP} --use-tis",
    "grpo-per-token": "--eps-clip 0.2 --calculate-per-token-loss",
    "grpo-per-token-clip-higher": f"{CLIP} --calculate-per-token-loss",
    "grpo-rollout-logprobs": f"{CLIP} --use-rollout-logprobs",
    "grpo-symmetric": "--eps-clip 0.2",
    "grpo-tis": f"{CLIP} --use-tis",
    "grpo-tis-bounded": f"{CLIP} --use-tis --tis-clip-low 0.5",
    "grpo-tis-filter": f"{CLIP} --use-tis {FILTER}",
    "gspo": "--advantage-estimator gspo --eps-clip 4e-4",
    "gspo-tis-filter": f"--advantage-estimator gspo --eps-clip 1e-4 --eps-clip-high 2e-4 --use-tis {FILTER}",
}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_with_the_values_of_slime(path: Path, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python3 train.py {SCRIPT} {FLAGS[path.stem]}".replace("\n", " "))
    assert list(differences(read_script(script, {}), set(), load_topology(path).topology)) == []


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
    assert ("train/tis" in trained.metrics) == (algorithm.tis is not None)
    assert ("train/kl_loss" in trained.metrics) == (algorithm.kl.loss_coef > 0)
    assert (topology.rollout.dynamic_filter == "nonzero_std") == path.stem.endswith("-filter")


def test_the_page_lists_every_recipe() -> None:
    text = PAGE.read_text()
    assert RECIPES
    assert [path.name for path in RECIPES if f"topologies/slime/{path.name})" not in text] == []
