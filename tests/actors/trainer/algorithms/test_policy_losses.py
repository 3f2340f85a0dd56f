"""Policy losses: by hand, and their invariants."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from actors.trainer.algorithms.loss_inputs import LossInputs, Terms
from actors.trainer.algorithms.policy_losses import (
    cispo_loss,
    decoupled_ppo_loss,
    dppo_loss,
    gmpo_loss,
    gpg_loss,
    gspo_loss,
    positive_nll_loss,
    ppo_loss,
    prime_rl_ipo_loss,
    prime_rl_loss,
    sapo_loss,
)
from tests.actors.trainer.algorithms.peers import LENGTHS, PRIME_RL, SLIME, VERL, column
from tests.build.losses import inputs

CLIP = {"eps_clip": 0.2, "eps_clip_high": 0.28}
LOSSES: dict[str, Callable[..., Terms]] = {
    "ppo": partial(ppo_loss, **CLIP),
    "ppo_dual": partial(ppo_loss, **CLIP, eps_clip_c=3.0),
    "gspo": partial(gspo_loss, **CLIP),
    "decoupled_ppo": partial(decoupled_ppo_loss, **CLIP, behav_imp_weight_cap=2.0),
    "cispo": partial(cispo_loss, **CLIP),
    "dppo_tv": partial(dppo_loss, divergence="tv", **CLIP, eps_clip_c=3.0),
    "dppo_kl": partial(dppo_loss, divergence="kl", **CLIP, eps_clip_c=3.0),
    "prime_rl": prime_rl_loss,
    "prime_rl_ipo": prime_rl_ipo_loss,
    "sapo": sapo_loss,
    "gmpo": partial(gmpo_loss, **CLIP),
    "gpg": lambda given, **_: gpg_loss(given),
}
BY_NAME = pytest.mark.parametrize("name", LOSSES)


def loss_of(log_prob: float, old: float, advantage: float, **options: float) -> tuple[float, float, float]:
    loss, metrics = ppo_loss(inputs([log_prob], [old], [advantage]), **options)
    return loss.item(), metrics["train/pg_clipfrac"].item(), metrics["train/ppo_kl"].item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [
        (1.0, 2.0, -2.0, 0.0),
        (1.5, 2.0, -2.0 * 1.28, 1.0),  # a good token counts up to 1 + eps_clip_high
        (0.5, 2.0, -1.0, 0.0),  # and has no lower bound
        (0.5, -2.0, 2.0 * 0.8, 1.0),  # a bad one counts down to 1 - eps_clip
        (1.5, -2.0, 3.0, 0.0),  # and has no upper bound
    ],
)
def test_clip_by_hand(ratio: float, advantage: float, expected: float, clipped: float) -> None:
    loss, was_clipped, ppo_kl = loss_of(math.log(ratio) - 1, -1, advantage, eps_clip=0.2, eps_clip_high=0.28)
    assert (loss, was_clipped, ppo_kl) == pytest.approx((expected, clipped, -math.log(ratio)))


def test_the_upper_clip_is_the_lower_one_unless_set() -> None:
    assert loss_of(math.log(1.5), 0, 1, eps_clip=0.2)[0] == pytest.approx(-1.2)


def test_dual_clip_bounds_the_loss_of_a_bad_token_and_leaves_good_ones() -> None:
    assert loss_of(math.log(9.0), 0, -1, eps_clip=0.2)[0] == pytest.approx(9.0)
    assert loss_of(math.log(9.0), 0, -1, eps_clip=0.2, eps_clip_c=3.0)[0] == pytest.approx(3.0)
    assert loss_of(math.log(0.1), 0, 1, eps_clip=0.2, eps_clip_c=3.0)[0] == pytest.approx(-0.1)


def test_a_clipped_token_has_no_gradient() -> None:
    log_probs = torch.tensor([0.5, 0.1], requires_grad=True)
    ppo_loss(inputs(log_probs, [0, 0], [1, 1]), eps_clip=0.2).loss.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([0.0, -math.exp(0.1)])


@pytest.mark.parametrize("ratio", [-150.0, 150.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_beyond_the_largest_log_ratio_the_loss_and_its_gradient_are_finite(advantage: float, ratio: float) -> None:
    """exp(20) is 4.9e8; without the bound exp(150) is infinite in float32 and 0 * inf is no number."""
    new = torch.tensor([ratio, 0.0], requires_grad=True)
    loss = ppo_loss(inputs(new, [0, 0], [advantage] * 2), eps_clip=0.2, max_log_ratio=20.0).loss
    loss.sum().backward()
    assert loss.isfinite().all()
    assert new.grad is not None
    assert new.grad.tolist() == [0.0, -advantage]


def one(name: str, ratio: float, advantage: float, *, old: float = -1.0, rollout: float | None = None) -> float:
    """The loss of one token with a ratio to the old policy."""
    engine = old if rollout is None else rollout
    return LOSSES[name](inputs([old + math.log(ratio)], [old], [advantage], rollout=[engine])).loss.item()


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "expected"),
    [
        ("gspo", 1.5, 2.0, -2.0 * 1.28),
        ("cispo", 1.5, 2.0, -1.28 * 2.0 * (math.log(1.5) - 1)),  # the weight is clipped, the log-prob is not
        ("cispo", 0.5, -2.0, 0.8 * 2.0 * (math.log(0.5) - 1)),
        ("dppo_tv", 1.5, 2.0, -2.0 * 1.5 * (math.log(1.5) - 1)),  # 0.5 / e = 0.18 is within 0.28
        ("dppo_tv", 2.0, 2.0, 0.0),  # 1 / e is not
        ("dppo_tv", 2.0, -1.0, 2.0 * (math.log(2.0) - 1)),  # likelier, though its advantage is negative
        ("prime_rl", 1.5, 2.0, -3.0 + 1e-3 * math.log(1.5) ** 2),
        ("prime_rl", 2.0, 2.0, 1e-3 * math.log(2.0) ** 2),  # 1 / e is above 0.2; the second term stays
        ("prime_rl", 2.0, -2.0, 4.0 + 1e-3 * math.log(2.0) ** 2),
        ("prime_rl_ipo", 1.2, 2.0, -2.4 + 1e-3 * math.log(1.2) ** 2),
        ("prime_rl_ipo", 1.5, -2.0, 1e-3 * math.log(1.5) ** 2),
        ("sapo", 1.0, 3.0, -3.0 * 0.5 * 4.0),
        ("sapo", 1.0, -3.0, 3.0 * 0.5 * 4.0 / 1.05),
        ("gmpo", 1.5, 1.0, -math.exp(0.28)),  # limits are of the log-ratio
        ("gmpo", 1.5, -1.0, 1.5),
        ("gmpo", 0.5, -1.0, math.exp(-0.2)),
        ("gpg", 1.5, 2.0, -2.0 * (math.log(1.5) - 1)),
    ],
)
def test_losses_by_hand(name: str, ratio: float, advantage: float, expected: float) -> None:
    assert one(name, ratio, advantage) == pytest.approx(expected, rel=1e-12)


def test_dppo_with_kl_drops_by_the_divergence_of_the_token_and_the_rest() -> None:
    p, q = 0.5 * 1.9, 0.5
    assert q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)) > 0.28
    assert one("dppo_kl", 1.9, 1.0, old=math.log(q)) == 0.0
    assert one("dppo_kl", 1.1, 1.0, old=math.log(q)) != 0.0


def test_decoupled_ppo_weighs_by_old_policy_over_engine_up_to_a_cap() -> None:
    assert one("decoupled_ppo", 1.1, 1.0, rollout=-1.5) == pytest.approx(-1.1 * math.exp(0.5))
    assert one("decoupled_ppo", 1.1, 1.0, rollout=-2.0) == 0.0  # e is above 2


def test_gspo_has_one_ratio_for_each_sequence() -> None:
    """Log-ratios 0.1 and 0.3 have the mean 0.2; those of the second sequence are -0.1."""
    given = inputs([0.1, 0.3, -0.1, -0.1], [0] * 4, [1.0, 1.0, 2.0, 2.0], lengths=[2, 2])
    loss, metrics = LOSSES["gspo"](given)
    assert loss.tolist() == pytest.approx([-math.exp(0.2)] * 2 + [-2 * math.exp(-0.1)] * 2)
    assert metrics["train/ppo_kl"].tolist() == pytest.approx([-0.2, -0.2, 0.1, 0.1])


def test_gmpo_has_the_geometric_mean_of_limited_ratios() -> None:
    given = inputs([0.5, 0.1, -0.5], [0] * 3, [2.0] * 3)
    assert LOSSES["gmpo"](given).loss.tolist() == pytest.approx([-2 * math.exp((0.28 + 0.1 - 0.5) / 3)] * 3)


def drawn(name: str = "new", dtype: torch.dtype = torch.float32) -> LossInputs:
    columns = {key: column(key).to(dtype) for key in ("old", "rollout", "ref", "advantages")}
    new = column(name).to(dtype).requires_grad_()
    return inputs(new, columns.pop("old"), columns.pop("advantages"), **columns, lengths=LENGTHS)


def mean_of_means(values: torch.Tensor) -> torch.Tensor:
    return torch.stack([row.mean() for row in values.split(LENGTHS)]).mean()


@pytest.mark.parametrize("name", ["ppo_dual", "gspo", "cispo", "dppo_tv", "dppo_kl", "sapo", "gmpo", "gpg"])
def test_losses_and_gradients_are_those_of_verl(name: str) -> None:
    """In the mean over samples of their means; verl's ppo always has the dual clip."""
    given, peer = drawn(), VERL["losses"]["ppo" if name == "ppo_dual" else name]
    loss = mean_of_means(LOSSES[name](given).loss)
    loss.backward()
    assert loss.item() == pytest.approx(peer["loss"], abs=1e-6)
    assert given.log_probs.grad is not None
    assert given.log_probs.grad.tolist() == pytest.approx(peer["gradient"], abs=1e-6)


@pytest.mark.parametrize("name", ["ppo", "ppo_dual", "gspo", "cispo"])
def test_losses_and_gradients_are_those_of_slime(name: str) -> None:
    compared(name, SLIME["losses"][name])


@pytest.mark.parametrize("name", ["prime_rl", "prime_rl_ipo"])
def test_losses_and_gradients_are_those_of_prime_rl(name: str) -> None:
    compared(name, PRIME_RL["losses"][name])


def compared(name: str, peer: dict) -> None:
    given = drawn()
    loss, metrics = LOSSES[name](given)
    loss.sum().backward()
    assert loss.sum().item() == pytest.approx(peer["loss"], rel=1e-6, abs=1e-6)
    assert given.log_probs.grad is not None
    assert given.log_probs.grad.tolist() == pytest.approx(peer["gradient"], abs=1e-6)
    if "clipped" in peer:
        assert metrics["train/pg_clipfrac"].tolist() == peer["clipped"]


@BY_NAME
@pytest.mark.parametrize("log_ratio", [-90.0, 90.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_loss_and_gradient_are_finite_at_any_log_ratio(name: str, log_ratio: float, advantage: float) -> None:
    """In float32, with the default limit. A metric counts the token."""
    new = torch.tensor([min(log_ratio, 0.0) - 1.0, -1.0], requires_grad=True)
    given = inputs(new, [new[0].item() - log_ratio, -1.0], [advantage] * 2)
    loss, metrics = LOSSES[name](given, max_log_ratio=20.0)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert new.grad is not None
    assert new.grad.isfinite().all()
    assert all(values.isfinite().all() for values in metrics.values())
    if name == "gspo":  # its mean over the two tokens is the log-ratio
        assert metrics["train/ratio_clampfrac"].tolist() == [1.0, 1.0]
    elif name != "gpg":
        assert metrics["train/ratio_clampfrac"].tolist() == [1.0, 0.0]


@BY_NAME
def test_no_tokens_have_no_loss(name: str) -> None:
    assert LOSSES[name](inputs([])).loss.tolist() == []


@BY_NAME
def test_an_advantage_of_0_leaves_no_gradient_of_the_policy_term(name: str) -> None:
    new = torch.tensor([-1.0, -0.5], requires_grad=True)
    LOSSES[name](inputs(new, [-1.0, -0.5], [0.0, 0.0])).loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["ppo", "gspo", "sapo", "gmpo", "prime_rl", "gpg"])
def test_gradients_are_those_of_the_loss(name: str) -> None:
    """Of losses without a stopped gradient, at points where they are smooth, in float64."""
    given = drawn(dtype=torch.float64)

    def loss(new: torch.Tensor) -> torch.Tensor:
        return LOSSES[name](replace(given, log_probs=new)).loss

    assert torch.autograd.gradcheck(loss, given.log_probs, eps=1e-7)


@BY_NAME
def test_float64_stays_float64(name: str) -> None:
    loss, metrics = LOSSES[name](drawn(dtype=torch.float64))
    assert loss.dtype is torch.float64
    assert {values.dtype for values in metrics.values()} <= {torch.float64}


def test_the_dual_clip_is_counted_apart() -> None:
    given = inputs([math.log(9.0) - 9, math.log(2.0) - 9, math.log(9.0) - 9], [-9.0] * 3, [-1.0, -1.0, 1.0])
    metrics = ppo_loss(given, eps_clip=0.2, eps_clip_c=3.0).metrics
    assert metrics["train/pg_clipfrac_lower"].tolist() == [1.0, 0.0, 0.0]
    assert "train/pg_clipfrac_lower" not in ppo_loss(given, eps_clip=0.2).metrics


def test_ratios_at_a_cap_are_counted() -> None:
    given = inputs([-1.0, -1.0], [-1.0 - math.log(30.0), -1.0], [1.0, 1.0], rollout=[-1.0, -31.0])
    dropped_none = {"eps_clip": 1.0, "eps_clip_c": 20.0, "max_log_ratio": 20.0}
    assert dppo_loss(given, divergence="tv", **dropped_none).metrics["train/ratio_clampfrac"].tolist() == [1.0, 0.0]
    decoupled = decoupled_ppo_loss(given, eps_clip=0.2, max_log_ratio=20.0)
    assert decoupled.metrics["train/ratio_clampfrac"].tolist() == [0.0, 1.0]


def test_the_likelihood_of_good_samples_by_hand() -> None:
    new = torch.tensor([-0.5, -2.0, -1.0], dtype=torch.float64, requires_grad=True)
    loss = positive_nll_loss(inputs(new, rewards=[1.0, 0.0, -1.0]))
    assert loss.tolist() == [0.5, 0.0, 0.0]
    loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [-1.0, 0.0, 0.0]
