"""docs/train/own-functions.md, verl_functions.py: functions of the trainer pass the dry run, compute what they say."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.trainer.algorithms.corrections import importance_weights
from actors.trainer.algorithms.loss_inputs import LossInputs
from actors.trainer.algorithms.reductions import ReductionInputs
from actors.trainer.plugins.dry_run import try_plugin
from actors.trainer.plugins.functions import custom_advantage, custom_loss, custom_reducer, custom_weights, hook
from actors.trainer.plugins.rollout_data import Postprocess, RolloutData, rollout_data
from runtime.functions.table import LOSS, POSTPROCESS, STEP_HOOK
from runtime.settings.reading.schema import functions_in
from tests.actors.trainer.algorithms.peers import GROUPS, LENGTHS, REWARDS, VERL, column
from tests.actors.trainer.tiny import random_batch
from tests.build.advantages import advantage_inputs
from tests.build.losses import inputs
from tests.build.topology import topology_with
from tests.docs.snippets import snippets

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "train" / "own-functions.md"
EXAMPLE = ROOT / "topologies" / "examples" / "verl_functions.py"
MORE = [
    ("algorithm.loss.function", "verl_functions.py:clip_cov", LOSS),
    ("algorithm.loss.function", "verl_functions.py:kl_cov", LOSS),
    ("algorithm.rollout_data_postprocess", "verl_functions.py:optimal_token_baseline", POSTPROCESS),
]
torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The page's files, each named in the first line of its block, and the example."""
    for block in snippets(PAGE, "python"):
        (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    (tmp_path / EXAMPLE.name).write_text(EXAMPLE.read_text())
    return tmp_path


def of_verl() -> LossInputs:
    """The inputs that verl's numbers are of."""
    return inputs(column("new", gradient=True), column("old"), column("advantages"), lengths=LENGTHS)


def test_the_settings_of_the_page_pass_the_dry_run(folder: Path) -> None:
    tables = [tomllib.loads(block) for block in snippets(PAGE, "toml")]
    of_trainer = [table for table in tables if table.keys() <= {"algorithm", "train"}]
    functions = (each for table in of_trainer for each in functions_in(topology_with(**table)))
    named = [each for each in functions if each[2].runs_in == "trainer"]
    assert [key.partition(".")[2] for key, _, _ in named] == [
        "loss.function",
        "tis.function",
        "reduction.function",
        "estimator.function",
        "rollout_data_postprocess",
        "custom_megatron_before_train_step_hook",
    ]
    for key, value, kind in [*named, *MORE]:
        try_plugin(topology_with(), kind, key, value, (folder,))


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_the_losses_are_those_of_verl(folder: Path, name: str) -> None:
    """All tokens between the bounds are left out there, so that nothing is random."""
    settings: dict[str, Any] = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 1.0}
    settings = settings if name == "clip_cov" else {"kl_cov_ratio": 0.2}
    scope: dict[str, Any] = {}
    exec(EXAMPLE.read_text(), scope)
    given, peer = of_verl(), VERL["own_losses"][name]
    loss, metrics = scope[name](given, **settings)
    mean = torch.stack([row.mean() for row in loss.split(LENGTHS)]).mean()
    mean.backward()
    assert mean.item() == pytest.approx(peer["loss"], abs=1e-6)
    assert given.log_probs.grad is not None
    assert given.log_probs.grad.tolist() == pytest.approx(peer["gradient"], abs=1e-6)
    reported = {f"actor/{key.partition('/')[2]}": values.mean().item() for key, values in metrics.items()}
    assert {key: reported[key] for key in peer["metrics"]} == pytest.approx(peer["metrics"], abs=1e-6)
    chosen = metrics["train/pg_clipfrac" if name == "clip_cov" else "train/kl_cov_frac"]
    assert 0 < chosen.sum() < len(chosen)


def test_random_tokens_of_clip_cov_are_few(folder: Path) -> None:
    loss = custom_loss("verl_functions.py:clip_cov", (folder,))
    advantages = torch.tensor([4.0, -4.0] * 10)
    given = inputs(torch.tensor([-0.1, -3.0] * 10, requires_grad=True), torch.tensor([-0.1, -3.0] * 10), advantages)
    assert loss(given).metrics["train/pg_clipfrac"].sum() == 0.0  # the covariances of 5.8 are beyond the bounds
    given = inputs(torch.tensor([-0.1, -1.0] * 10, requires_grad=True), torch.tensor([-0.1, -1.0] * 10), advantages)
    assert loss(given).metrics["train/pg_clipfrac"].sum() == 1.0


def test_the_loss_is_that_of_a_limited_ratio(folder: Path) -> None:
    loss = custom_loss("my_losses.py:limited", (folder,))
    new = torch.log(torch.tensor([0.5, 1.0, 3.0])).requires_grad_()
    terms = loss(inputs(new, torch.zeros(3), torch.tensor([1.0, -2.0, 1.0])))
    assert terms.loss.tolist() == pytest.approx([-0.5, 2.0, -2.0])
    assert terms.metrics["train/pg_clipfrac"].tolist() == [0.0, 0.0, 1.0]
    terms.loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-0.5, 2.0, 0.0])


def test_the_weights_are_those_of_truncated_importance_sampling(folder: Path) -> None:
    weights = custom_weights("my_weights.py:truncated", (folder,))
    olds, rollouts = torch.zeros(3), torch.log(torch.tensor([0.25, 1.0, 4.0]))
    given = inputs(olds, olds, torch.ones(3), rollout=rollouts)
    factors, metrics = weights(given)
    expected = importance_weights(given, level="token", mode="truncate", low=0.0, high=2.0).factors
    assert torch.equal(factors, expected)
    assert factors.tolist() == pytest.approx([2.0, 1.0, 0.25])
    assert metrics["train/tis_clipfrac"].tolist() == [1.0, 0.0, 0.0]


def test_the_advantages_are_above_the_median_of_a_prompt(folder: Path) -> None:
    estimate = custom_advantage("my_advantages.py:above_median", (folder,))
    rewards, groups = np.array([1.0, 4.0, 0.5, 0.25, 5.0]), np.array([3, 1, 3, 3, 1])
    found = estimate(advantage_inputs([1] * 5, rewards=rewards, groups=groups))
    assert found.advantages.tolist() == [0.5, -0.5, 0.0, -0.25, 0.5]


def test_the_hook_writes_a_line_for_each_train_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    topology = topology_with(train={"custom_megatron_before_train_step_hook": "my_norms.py:log_norms"})
    run = hook(topology, STEP_HOOK)
    layer = torch.nn.Linear(1, 1)
    with torch.no_grad():
        layer.weight.fill_(3.0)
        layer.bias.fill_(4.0)
    for step_id in range(2):
        run(5, step_id, [layer], None)
    assert (folder / "t-norms.csv").read_text() == "5,5.000000\n"


def test_the_data_lose_tokens_on_which_engine_and_trainer_disagree(folder: Path) -> None:
    batch = random_batch()
    old_N = batch.rollout_log_probs_N.copy()
    trained = np.flatnonzero(batch.loss_mask_N)
    old_N[trained[3]] -= 2.5
    columns: dict[str, Any] = {"old_log_probs": old_N, "ref_log_probs": None, "advantages": np.zeros_like(old_N)}
    data = Postprocess("my_masks.py:without_mismatch", (folder,)).changed(rollout_data(batch, **columns))
    assert np.flatnonzero(data.loss_mask).tolist() == [token for token in trained if token != trained[3]]


def test_the_optimal_token_baseline_is_that_of_verl(folder: Path) -> None:
    """Each sample has a prompt of two tokens here."""
    lengths, old = np.array(LENGTHS) + 2, column("old").double().numpy()
    trains = np.concatenate([np.arange(length) >= 2 for length in lengths])
    found, squares = np.zeros((2, len(trains)))
    found[trains], squares[trains] = old, np.exp(2 * old) + 0.1 * (1 - np.exp(old))
    data = RolloutData(
        step=0,
        groups=GROUPS,
        rollouts=np.arange(len(lengths)),
        rewards=REWARDS,
        lengths=lengths,
        tokens=np.zeros(len(trains), dtype=np.int32),
        loss_mask=trains,
        rollout_log_probs=found.astype(np.float32),
        old_log_probs=found.astype(np.float32),
        ref_log_probs=None,
        advantages=np.zeros(len(trains)),
    )
    scope: dict[str, Any] = {}
    exec(EXAMPLE.read_text(), scope)
    advantages = scope["optimal_token_baseline"](data, squares).advantages
    assert advantages[trains].tolist() == pytest.approx(VERL["token_baseline"], abs=1e-6)
    assert not advantages[~trains].any()
    alone = replace(data, groups=np.arange(len(lengths)))
    assert scope["optimal_token_baseline"](alone).advantages[trains].tolist() == np.repeat(REWARDS, LENGTHS).tolist()
    plugin = Postprocess("verl_functions.py:optimal_token_baseline", (folder,))
    assert plugin.changed(data).advantages.std() > 0


def test_the_reduction_is_a_mean_over_prompts(folder: Path) -> None:
    reduce = custom_reducer("my_reduction.py:prompt_mean", (folder,))
    groups = np.array([7, 7, 9, 9])
    reduced = reduce(ReductionInputs(np.array([1, 3, 0, 2]), np.arange(4), groups))
    assert reduced.token_weights.tolist() == [0.25, 0.25, 0.5, 0.5]
    assert reduced.shares.tolist() == [1, 0, 1, 0]
