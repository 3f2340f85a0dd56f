"""Corrections for the distance between engine and trainer: by hand, as slime has them, and their edges."""

import math

import pytest
import torch

from actors.trainer.algorithms.corrections import (
    Level,
    Mode,
    importance_weights,
    mean_weight,
    mismatch_metrics,
    off_policy_mask,
    rejections,
)
from actors.trainer.algorithms.loss_inputs import LossInputs
from tests.actors.trainer.algorithms.peers import AREAL, LENGTHS, SLIME, column
from tests.build.losses import inputs

LEVELS = pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
MODES = pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])


def between(log_ratios: list[float], lengths: list[int] | None = None) -> LossInputs:
    """Old log-probs of -1, and log-ratios to the engine's."""
    ones = [-1.0] * len(log_ratios)
    return inputs(ones, ones, rollout=[-1.0 - each for each in log_ratios], lengths=lengths)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("truncate", [2.0, 0.25, 1.0]), ("clip", [2.0, 0.5, 1.0]), ("mask", [0.0, 0.0, 1.0])],
)
def test_weights_of_tokens_by_hand(mode: Mode, expected: list[float]) -> None:
    given = between([math.log(4), math.log(0.25), 0.0])
    weights, metrics = importance_weights(given, level="token", mode=mode, low=0.5, high=2.0)
    assert weights.tolist() == pytest.approx(expected)
    assert metrics["train/tis"].tolist() == pytest.approx([4.0, 0.25, 1.0])
    assert metrics["train/tis_abs"].tolist() == pytest.approx([3.0, 0.75, 0.0])
    assert metrics["train/tis_clampfrac"].tolist() == [0.0, 0.0, 0.0]
    assert metrics["train/tis_clipfrac"].tolist() == [1.0, 0.0 if mode == "truncate" else 1.0, 0.0]


def test_weights_of_sequences_by_hand() -> None:
    given = between([0.1, 0.3, -0.2], [2, 1])
    product = importance_weights(given, level="sequence", mode="clip", low=0.0, high=9.0).factors
    mean = importance_weights(given, level="geometric", mode="clip", low=0.0, high=9.0).factors
    assert product.tolist() == pytest.approx([math.exp(0.4)] * 2 + [math.exp(-0.2)])
    assert mean.tolist() == pytest.approx([math.exp(0.2)] * 2 + [math.exp(-0.2)])


def test_rejections_by_hand() -> None:
    """The last sequence has a catastrophic token, so that all of it is rejected."""
    given = between([math.log(3), 0.0, math.log(0.1), 0.0, math.log(1e-5), 0.0], [2, 2, 2])
    kept, metrics = rejections(given, level="token", low=0.5, high=2.0, veto_threshold=1e-4)
    assert kept.tolist() == [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    assert metrics["train/mis_rs_mask_fraction_high"].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert metrics["train/mis_rs_mask_fraction_low"].tolist() == [0.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert metrics["train/mis_rs_catastrophic_token_fraction"].tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert metrics["train/mis_rs_catastrophic_seq_fraction"].tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]


def test_the_off_policy_mask_rejects_bad_tokens_of_sequences_that_moved_away() -> None:
    new, old = [-1.2, -1.0, -0.9, -1.0, -1.3], [-1.0, -1.0, -1.0, -1.0, -1.0]
    given = inputs(new, old, [-1.0, 1.0, -1.0, -1.0, 0.0], lengths=[2, 2, 1])
    kept, metrics = off_policy_mask(given, delta=0.05)
    assert kept.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert metrics["train/opsm_clipfrac"].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]


def drawn() -> LossInputs:
    columns = {name: column(name) for name in ("rollout", "advantages")}
    return inputs(column("new", gradient=True), column("old"), **columns, lengths=LENGTHS)


@pytest.mark.parametrize("name", SLIME["mis"])
def test_weights_and_rejections_are_those_of_slime(name: str) -> None:
    level, mode, *normalized = name.split()
    given = drawn()
    weights, metrics = importance_weights(given, level=level, mode=mode, low=0.5, high=2.0)  # type: ignore[arg-type]
    kept, more = rejections(given, level="geometric", low=0.8, high=1.3, veto_threshold=0.3)
    if normalized:  # with "mask" slime takes the mean before it sets weights to 0
        counted = metrics["train/tis"] if mode == "mask" else weights
        weights = weights / mean_weight(given, counted, level=level)  # type: ignore[arg-type]
    assert (weights * kept).tolist() == pytest.approx(SLIME["mis"][name]["weights"], rel=2e-6, abs=1e-7)
    for key, values in SLIME["mis"][name].get("metrics", {}).items():
        if key.startswith("rs_"):
            assert more[f"train/mis_{key}"].tolist() == values
        elif key.endswith(("fraction", "fraction_low", "fraction_high")):
            assert metrics[f"train/mis_{key}"].tolist() == values


@MODES
def test_weights_out_of_bounds_are_counted_by_side(mode: Mode) -> None:
    given = between([math.log(4), math.log(0.25), 0.0])
    weights, metrics = importance_weights(given, mode=mode, low=0.5, high=2.0)
    assert torch.equal(metrics["train/mis_tis_weight_after_bound"], weights)
    counted = {name: values.tolist() for name, values in metrics.items() if "_fraction" in name}
    low, high = [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]
    assert (
        counted
        == {
            "truncate": {"train/mis_tis_truncate_fraction": high},
            "clip": {"train/mis_tis_clip_fraction_low": low, "train/mis_tis_clip_fraction_high": high},
            "mask": {"train/mis_tis_mask_fraction_low": low, "train/mis_tis_mask_fraction_high": high},
        }[mode]
    )


def test_weights_and_rejections_of_the_current_policy_by_hand() -> None:
    given = inputs([-1.0, -2.0], [-9.0, -9.0], rollout=[-1.0 - math.log(4), -2.0])
    weights, metrics = importance_weights(given, level="token", mode="clip", low=0.5, high=2.0, current=True)
    assert weights.tolist() == pytest.approx([2.0, 1.0])
    assert "train/ois" not in metrics
    assert rejections(given, level="token", low=0.5, high=2.0, current=True).factors.tolist() == [0.0, 1.0]


def test_kpop_by_hand() -> None:
    """D(0.5, 0.25) = 0.1438 nats and D(0.25, 0.5) = 0.1308 nats: the larger one decides."""
    old, rollout = [math.log(0.5), math.log(0.25), math.log(0.5)], [math.log(0.25), math.log(0.5), math.log(0.5)]
    given = inputs(old, old, rollout=rollout, lengths=[2, 1])
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    for level, high, kept in (
        ("token", expected + 1e-12, [1.0, 1.0, 1.0]),
        ("token", expected - 1e-12, [0.0, 0.0, 1.0]),
        ("sequence", 2 * expected - 1e-12, [0.0, 0.0, 1.0]),
        ("geometric", expected + 1e-12, [1.0, 1.0, 1.0]),
    ):
        found = rejections(given, level=level, metric="binary_kl", low=0.0, high=high)  # type: ignore[arg-type]
        assert found.factors.tolist() == kept
        assert found.metrics["train/mis_rs_mask_fraction_low"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("token", range(sum(LENGTHS)))
def test_the_divergence_of_kpop_is_that_of_areal(token: int) -> None:
    value = AREAL["kpop"][token]
    bounds = (value * (1 + 1e-5) + 1e-6, max(value * (1 - 1e-5) - 1e-6, -1.0))
    kept = [
        rejections(drawn(), level="token", metric="binary_kl", low=-1.0, high=high).factors[token].item()
        for high in bounds
    ]
    assert kept == [1.0, 0.0]


def test_the_mismatch_is_that_of_slime() -> None:
    expected = SLIME["mis"]["token clip"]["metrics"]
    names = [name for name in expected if not name.startswith(("tis_", "rs_", "is_"))]
    found = mismatch_metrics(drawn())
    assert {f"train/mis_{name}" for name in names} == set(found)
    for name in names:
        if name == "chi2_token":  # slime has a mean over the sequence at each token, which its reduction keeps
            means = drawn().sequences.means(found["train/mis_chi2_token"]).tolist()
            assert means == pytest.approx(expected[name], rel=1e-5)
        else:
            assert found[f"train/mis_{name}"].tolist() == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("log_ratio", [-90.0, 90.0])
def test_the_mismatch_is_finite_at_any_log_ratio(log_ratio: float) -> None:
    old, rollout = torch.tensor([min(log_ratio, -1e-3)] * 2), torch.tensor([min(-log_ratio, -1e-3), 0.0])
    given = inputs(old, old, rollout=rollout)
    assert all((values.abs() < 1e18).all() for values in mismatch_metrics(given).values())
    for level in ("token", "sequence", "geometric"):
        found = rejections(given, level=level, metric="binary_kl", low=0.0, high=0.1)  # type: ignore[arg-type]
        assert found.factors.isfinite().all()


def test_the_off_policy_mask_is_that_of_slime() -> None:
    assert off_policy_mask(drawn(), delta=1e-4).factors.tolist() == SLIME["opsm"]


@LEVELS
@MODES
@pytest.mark.parametrize("log_ratio", [-90.0, 90.0])
def test_corrections_are_finite_at_any_log_ratio(level: Level, mode: Mode, log_ratio: float) -> None:
    given = inputs(torch.tensor([-1.0, -1.0]), [-1.0, -1.0], rollout=[-1.0 - log_ratio, -1.0])
    for found in (
        importance_weights(given, level=level, mode=mode, low=0.0, high=2.0),
        rejections(given, level=level, low=0.5, high=2.0, veto_threshold=1e-4),
    ):
        assert found.factors.isfinite().all()
        assert all(values.isfinite().all() for values in found.metrics.values())


def test_a_correction_has_no_gradient_and_no_tokens_have_none() -> None:
    given = drawn()
    for found in (
        importance_weights(given, level="token", mode="clip", low=0.0, high=2.0),
        rejections(given, level="sequence", low=0.5, high=2.0),
        off_policy_mask(given, delta=0.0),
    ):
        assert not found.factors.requires_grad
        assert not any(values.requires_grad for values in found.metrics.values())
    assert importance_weights(inputs([]), level="sequence", mode="clip", low=0.0, high=2.0).factors.tolist() == []


def test_the_mean_weight_counts_tokens_or_sequences_and_is_never_0() -> None:
    given = between([0.0] * 3, [2, 1])
    weights = torch.tensor([3.0, 3.0, 1.0], dtype=torch.float64)
    assert mean_weight(given, weights, level="token") == pytest.approx(7 / 3)
    assert mean_weight(given, weights, level="sequence") == pytest.approx(2.0)
    assert mean_weight(given, weights * 0, level="token") == 1.0
    assert mean_weight(inputs([]), torch.empty(0), level="token") == 1.0
