"""Our functions against those of slime, verl, prime-rl and NeMo-RL, on many kinds of inputs, to 1e-6 in float32.

peer_edges.py writes what the others return. Results above 1 are compared relatively. Where a result is known to
differ, the test says how.
"""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from actors.trainer.algorithms import group_baselines, policy_losses, returns
from actors.trainer.algorithms.corrections import importance_weights
from actors.trainer.algorithms.kl import kl_divergence
from actors.trainer.algorithms.loss_inputs import LossInputs
from actors.trainer.algorithms.reductions import reduction
from tests.build.losses import inputs

EDGES: Final[dict[str, Any]] = json.loads(Path(__file__).with_name("peer_edges.json").read_text())
TOLERANCE: Final = {"rel": 2e-6, "abs": 1e-6}


def by_name(part: str) -> dict[str, dict[str, Any]]:
    """Cases of a part, with names that tell them apart."""
    cases: dict[str, dict[str, Any]] = {}
    for case in EDGES[part]:
        name = " ".join(str(case[key]) for key in ("peer", "ours", "kind", "reduced") if key in case)
        cases[f"{name} {len(cases)}"] = case
    return cases


LOSSES: Final = by_name("losses")
ADVANTAGES: Final = by_name("advantages")
RETURNS: Final = by_name("returns")


def given_of(case: dict[str, Any]) -> LossInputs:
    columns = {
        name: torch.tensor(values) for name, values in EDGES["columns"][case["kind"]].items() if name != "lengths"
    }
    new, old, advantages = columns.pop("new").requires_grad_(), columns.pop("old"), columns.pop("advantages")
    return inputs(new, old, advantages, **columns, lengths=EDGES["columns"][case["kind"]]["lengths"])


def token_losses(case: dict[str, Any], given: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    options = dict(case["options"])
    if case["ours"] == "kl_divergence":
        old = given.old_log_probs if options.get("unbiased") else None
        return kl_divergence(
            given.log_probs, given.needed("ref_log_probs"), options["estimator"], old_log_probs=old
        ), {}
    weights = options.pop("weights", None)
    loss, metrics = getattr(policy_losses, case["ours"])(given, **options)
    return loss if weights is None else loss * importance_weights(given, **weights).factors, dict(metrics)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_gradients_and_metrics_are_those_of_the_others(name: str) -> None:
    case = LOSSES[name]
    given, lengths = given_of(case), EDGES["columns"][case["kind"]]["lengths"]
    losses, metrics = token_losses(case, given)
    loss = losses.sum()
    if case["reduced"] != "sum":
        found = reduction(lengths, range(len(lengths)), mode=case["reduced"], scale=max(lengths), count_masked=False)
        weights = torch.tensor(np.repeat(found.token_weights, lengths), dtype=losses.dtype)
        loss = (losses * weights).sum() / found.shares.sum()
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], **TOLERANCE)
    assert given.log_probs.grad is not None
    assert given.log_probs.grad.tolist() == pytest.approx(case["gradient"], **TOLERANCE)
    for key, value in case.get("metrics", {}).items():
        if key in metrics:  # a clip that a loss has not is a constant 0 in verl
            assert metrics[key].mean().item() == pytest.approx(value, **TOLERANCE), key
        else:
            assert value == 0.0, key


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_those_of_the_others(name: str) -> None:
    """verl divides the reward of a group of one by 1 + 1e-6."""
    case = ADVANTAGES[name]
    more = (None, case["lengths"]) if case["ours"] == "opo_advantages" else ()
    rewards = np.array(case["rewards"], dtype=np.float32)
    found = getattr(group_baselines, case["ours"])(rewards, case["groups"], *more, **case["options"])
    assert found.tolist() == pytest.approx(case["found"], rel=3e-6, abs=1e-6)


@pytest.mark.parametrize("name", RETURNS)
def test_returns_are_those_of_the_others(name: str) -> None:
    """Tokens outside of the mask are 0 here; verl leaves numbers there."""
    case = RETURNS[name]
    mask = np.array(case["mask"]) > 0
    rewards = np.array(case["rewards"], dtype=np.float32)
    if case["ours"] == "gae":
        values = np.array(case["values"], dtype=np.float32)
        found = returns.gae(rewards, values, None, mask, gamma=case["gamma"], lambd=case["lambd"])
        for ours, theirs in zip(found, case["found"], strict=True):
            assert ours is not None
            assert ours[mask].tolist() == pytest.approx(np.array(theirs)[mask].tolist(), rel=5e-6, abs=5e-6)
    else:
        found = returns.discounted_returns(rewards, None, mask, gamma=case["gamma"])
        assert found[mask].tolist() == pytest.approx(np.array(case["found"])[mask].tolist(), rel=5e-6, abs=5e-6)


def test_the_numbers_have_every_project_and_kind() -> None:
    assert {case["kind"] for case in EDGES["losses"]} == set(EDGES["columns"])
    assert (len(LOSSES), len(ADVANTAGES), len(RETURNS)) == (325, 69, 20)
