"""Laws of the functions themselves, on any batch: equal rewards, groups by id, bounds at +-90 nats, gradients."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.algorithms import corrections, policy_losses
from actors.trainer.algorithms.distillation import topk_distillation_loss
from actors.trainer.algorithms.group_baselines import (
    gdpo_advantages,
    gpg_advantages,
    grpo_advantages,
    maxrl_advantages,
    opo_advantages,
    passk_advantages,
    reinforce_advantages,
    rloo_advantages,
)
from actors.trainer.algorithms.kl import kl_clamped, kl_divergence
from actors.trainer.algorithms.length_penalties import linear_length_penalties
from actors.trainer.algorithms.loss_inputs import LossInputs, Terms
from actors.trainer.algorithms.preference import dpo_loss
from actors.trainer.algorithms.reductions import reduction
from actors.trainer.algorithms.returns import reinforce_plus_plus_baseline_advantages
from actors.trainer.algorithms.values import value_loss
from actors.trainer.algorithms.whitening import whiten
from tests.actors.trainer.algorithms.peers import LENGTHS, column
from tests.build.losses import inputs

Grouped = Callable[[Any, Any, Any], np.ndarray]
GROUPED: Final[dict[str, Grouped]] = {
    "grpo": grpo_advantages,
    "Dr. GRPO": partial(grpo_advantages, normalize_std=False),
    "rloo": rloo_advantages,
    "opo": lambda rewards, groups, rollouts: opo_advantages(
        rewards, groups, rollouts, np.abs(rewards).astype(np.int64) % 5
    ),
    "gpg": gpg_advantages,
    "maxrl": maxrl_advantages,
    "grpo_passk": passk_advantages,
    "passk, no std": partial(passk_advantages, normalize_std=False),
    "reinforce_plus_plus_baseline": lambda rewards, groups, rollouts: (
        reinforce_plus_plus_baseline_advantages(rewards, groups, rollouts, np.ones(len(rewards))).advantages
    ),
    "gdpo": lambda rewards, groups, rollouts: gdpo_advantages({"a": rewards, "b": rewards}, groups, rollouts),
}
DTYPES: Final = (np.float16, np.float32, np.float64)
BATCHES: Final = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=20
)  # group, rollout in it
REWARDS: Final = st.floats(-1e4, 1e4, width=16)


def ids_of(batch: list[tuple[int, int]]) -> tuple[list[str], list[str]]:
    """Groups and rollouts; several samples may be parts of one rollout."""
    return [f"g{group}" for group, _ in batch], [f"{group}/{rollout}" for group, rollout in batch]


@pytest.mark.parametrize("name", GROUPED)
@given(BATCHES, st.lists(REWARDS, min_size=4, max_size=4), st.sampled_from(DTYPES))
def test_equal_rewards_within_groups_give_exactly_0(name: str, batch: list, of_groups: list, dtype: type) -> None:
    """Each group has a reward of its own. The number of samples and parts is any."""
    groups, rollouts = ids_of(batch)
    rewards = np.array([of_groups[group] / 3 for group, _ in batch], dtype=dtype)
    assert GROUPED[name](rewards, groups, rollouts).tolist() == [0.0] * len(batch)


@given(BATCHES, REWARDS, st.sampled_from(DTYPES))
def test_equal_rewards_of_a_batch_give_reinforce_exactly_0(batch: list, reward: float, dtype: type) -> None:
    found = reinforce_advantages(np.full(len(batch), reward / 3, dtype=dtype), ids_of(batch)[1])
    assert found.tolist() == [0.0] * len(batch)


@pytest.mark.parametrize("name", [name for name in GROUPED if name != "gpg"])  # alpha counts the whole batch
@given(BATCHES, st.data())
def test_a_sample_that_is_dropped_changes_no_other_group(name: str, batch: list, data: st.DataObject) -> None:
    rewards = data.draw(st.lists(REWARDS, min_size=len(batch), max_size=len(batch)))
    place = data.draw(st.integers(0, len(batch) - 1))
    groups, rollouts = ids_of(batch)
    whole = GROUPED[name](rewards, groups, rollouts)
    kept = [index for index in range(len(batch)) if index != place]
    rest = GROUPED[name](*([values[index] for index in kept] for values in (rewards, groups, rollouts)))
    others = [index for index in kept if groups[index] != groups[place]]
    assert [rest[kept.index(index)] for index in others] == [whole[index] for index in others]


@given(BATCHES, st.data())
def test_a_reduction_gives_every_vote_the_same_weight(batch: list, data: st.DataObject) -> None:
    """Losses of 1 make a loss of 1 where every vote has a token; siblings share a vote."""
    counts = data.draw(st.lists(st.integers(1, 9), min_size=len(batch), max_size=len(batch)))
    rollouts = ids_of(batch)[1]
    for mode in ("token-mean", "rollout-mean", "seq-mean-token-mean"):
        weights, shares = reduction(counts, rollouts, mode=mode)
        assert (weights * counts).sum() / shares.sum() == pytest.approx(1.0, rel=1e-12)
    weights, shares = reduction(counts, rollouts, mode="seq-mean-token-sum-norm", scale=7)
    assert (weights * counts).sum() / shares.sum() == pytest.approx(sum(counts) / 7 / len(set(rollouts)), rel=1e-12)


@pytest.mark.parametrize(("dtype", "offset", "tolerance"), [(np.float64, 1e6, 1e-6), (np.float32, 1e3, 1e-3)])
@given(st.integers(0, 2**32 - 1), st.integers(2, 300), st.floats(0.1, 10.0))
def test_whitening_bears_an_offset(
    dtype: type, offset: float, tolerance: float, seed: int, size: int, scale: float
) -> None:
    draw = np.random.default_rng(seed)
    values, mask = draw.normal(0, scale, size), draw.random(size) < 0.8
    mask[:2], values[:2] = True, (0.0, scale)  # two tokens, and a spread
    exact = (values - values[mask].mean()) / np.sqrt(values[mask].var(ddof=1) + 1e-8)
    found = whiten((values + offset).astype(dtype), mask)
    assert np.abs(found - exact)[mask].max() < tolerance * max(1.0, 1.0 / scale) * max(1.0, np.abs(exact).max())


LOSSES: Final[dict[str, Callable[[LossInputs], Terms]]] = {
    "ppo": policy_losses.ppo_loss,
    "ppo, dual clip": partial(policy_losses.ppo_loss, eps_clip_c=3.0),
    "gspo": policy_losses.gspo_loss,
    "decoupled_ppo": policy_losses.decoupled_ppo_loss,
    "cispo": policy_losses.cispo_loss,
    "dppo_tv": policy_losses.dppo_loss,
    "dppo_kl": partial(policy_losses.dppo_loss, divergence="kl"),
    "prime_rl": policy_losses.prime_rl_loss,
    "prime_rl_ipo": policy_losses.prime_rl_ipo_loss,
    "sapo": policy_losses.sapo_loss,
    "gmpo": policy_losses.gmpo_loss,
}
FAR: Final = st.sampled_from([-90.0, -20.1, 20.1, 90.0])


@pytest.mark.parametrize("name", LOSSES)
@given(FAR, FAR, st.sampled_from([-1.0, 0.0, 1.0]), st.sampled_from([torch.float32, torch.float64]))
def test_a_loss_is_finite_and_counts_clamped_tokens(
    name: str, log_ratio: float, behind: float, advantage: float, dtype: torch.dtype
) -> None:
    """With log-probs that a policy can have: none is above 0. The second sequence is not far from anything."""
    new = torch.tensor([min(log_ratio, 0.0) - 1.0, -1.0], dtype=dtype, requires_grad=True)
    old = (new.detach() - torch.tensor([log_ratio, 0.0], dtype=dtype)).clamp(max=0.0)
    engine = (old - torch.tensor([behind, 0.0], dtype=dtype)).clamp(max=0.0)
    given_columns = inputs(new, old, [advantage] * 2, rollout=engine, lengths=[1, 1])
    loss, metrics = LOSSES[name](given_columns)
    loss.sum().backward()
    assert new.grad is not None
    for values in (loss, new.grad, *metrics.values()):
        assert values.isfinite().all()
        assert values.dtype is dtype
    compared = engine if name.startswith("prime") else old
    far = abs((new - compared)[0].item()) > 20.0
    if name == "decoupled_ppo":
        far |= abs((old - engine)[0].item()) > 20.0
    capped = name.startswith("dppo") and (new - compared)[0].item() > np.log(20.0)
    assert metrics["train/ratio_clampfrac"].tolist() == [float(far or capped), 0.0]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
@given(FAR, st.sampled_from([torch.float32, torch.float64]))
def test_weights_are_finite_and_count_clamped_tokens(
    level: Any, mode: Any, log_ratio: float, dtype: torch.dtype
) -> None:
    old = torch.tensor([min(log_ratio, 0.0) - 1.0, -1.0], dtype=dtype)
    engine = old - torch.tensor([log_ratio, 0.0], dtype=dtype)
    found = corrections.importance_weights(
        inputs(old, old, rollout=engine, lengths=[1, 1]), level=level, mode=mode, low=0.5
    )
    assert found.metrics["train/tis_clampfrac"].tolist() == [1.0, 0.0]
    assert all(values.isfinite().all() for values in (found.factors, *found.metrics.values()))
    assert {values.dtype for values in (found.factors, *found.metrics.values())} == {dtype}
    kept = corrections.rejections(inputs(old, old, rollout=engine, lengths=[1, 1]), level=level)
    assert kept.factors.tolist() == [0.0, 1.0]  # a clamped log-ratio is beyond any bounds, which count it
    side = "high" if log_ratio > 0 else "low"
    assert kept.metrics[f"train/mis_rs_mask_fraction_{side}"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_var_kl", "k3+"])
@given(FAR)
def test_a_divergence_counts_clamped_tokens(estimator: Any, log_ratio: float) -> None:
    new, reference = torch.tensor([log_ratio - 100.0, -1.0], requires_grad=True), torch.tensor([-100.0, -1.0])
    found = kl_divergence(new, reference, estimator)
    found.sum().backward()
    assert new.grad is not None
    assert found.isfinite().all()
    assert new.grad.isfinite().all()
    limited = [0.0, 0.0] if estimator in ("k1", "k2") else [1.0, 0.0]
    assert kl_clamped(new, reference, estimator).tolist() == limited


def drawn() -> LossInputs:
    columns = {name: column(name).double() for name in ("rollout", "ref", "advantages")}
    new = column("new").double().requires_grad_()
    rewards = torch.repeat_interleave(torch.tensor([1.0, 0.0, 0.5, -1.0, 1.0, 0.0]), torch.tensor(LENGTHS))
    return inputs(new, column("old").double(), **columns, rewards=rewards.double(), lengths=LENGTHS)


SMOOTH: Final[dict[str, Callable[[LossInputs], torch.Tensor]]] = {
    **{
        name: lambda columns, loss=loss: loss(columns).loss
        for name, loss in LOSSES.items()
        if name not in ("cispo", "dppo_tv", "dppo_kl")  # of these the ratio has no gradient
    },
    "gpg": lambda columns: policy_losses.gpg_loss(columns).loss,
    "sft": lambda columns: policy_losses.sft_loss(columns.log_probs),
    "likelihood of good samples": policy_losses.positive_nll_loss,
}


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_are_those_of_the_loss(name: str) -> None:
    columns = drawn()
    assert torch.autograd.gradcheck(
        lambda new: SMOOTH[name](replace(columns, log_probs=new)), columns.log_probs, eps=1e-7
    )


@pytest.mark.parametrize("name", ["cispo", "dppo_tv", "dppo_kl"])
def test_the_gradient_of_a_weighted_log_prob_is_its_weight(name: str) -> None:
    """The loss is weight x log-prob, so that loss / log-prob is the gradient."""
    columns = drawn()
    loss = LOSSES[name](columns).loss
    (gradient,) = torch.autograd.grad(loss.sum(), columns.log_probs)
    assert torch.allclose(gradient * columns.log_probs, loss, atol=1e-12)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_gradients_of_preference_losses(kind: Any) -> None:
    columns = inputs(
        torch.tensor([-1.0, -2.0, -0.5, -1.5], dtype=torch.float64, requires_grad=True),
        advantages=[1.0, 1.0, -1.0, -1.0],
        ref=[-1.2, -1.5, -1.0, -1.0],
        lengths=[2, 2],
    )
    pairs = replace(columns, rollouts=inputs([0.0] * 4).sequences)
    loss = lambda new: dpo_loss(replace(pairs, log_probs=new), beta=0.4, label_smoothing=0.1, kind=kind).loss  # noqa: E731
    assert torch.autograd.gradcheck(loss, columns.log_probs)


@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_gradients_of_the_value_loss(value_clip: float | None) -> None:
    values = column("new").double().requires_grad_()
    old, returns = column("old").double(), column("ref").double()
    assert torch.autograd.gradcheck(lambda new: value_loss(new, old, returns, value_clip=value_clip).loss, values)


@pytest.mark.parametrize("kl_type", ["forward", "reverse", "mixed"])
@pytest.mark.parametrize("outside", [False, True])
def test_gradients_of_top_k_distillation(kl_type: Any, outside: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    policy, teacher = (torch.randn(3, 6, dtype=torch.float64, generator=draw).log_softmax(-1) for _ in range(2))
    highest, ids = teacher.topk(4)
    own = policy.gather(1, ids).requires_grad_()
    entropy = -(policy.exp() * policy).sum(-1).requires_grad_()

    def loss(given_own: torch.Tensor, given_entropy: torch.Tensor) -> torch.Tensor:
        return topk_distillation_loss(
            given_own, highest, given_entropy, kl_type=kl_type, zero_outside_topk=outside
        ).loss

    assert torch.autograd.gradcheck(loss, (own, entropy))


@given(BATCHES, st.data())
def test_length_penalties_of_a_group_see_no_other(batch: list, data: st.DataObject) -> None:
    lens = data.draw(st.lists(st.integers(0, 99), min_size=len(batch), max_size=len(batch)))
    groups, rollouts = ids_of(batch)

    def penalties(where: list[int]) -> list[float]:
        chosen = [lens[index] for index in where]
        own = [groups[index] for index in where], [rollouts[index] for index in where]
        rewards = [lens[index] % 2 for index in where]
        return linear_length_penalties(rewards, *own, output_lens=chosen, input_lens=chosen, num_turns=chosen).tolist()

    whole = penalties(list(range(len(batch))))
    for group in set(groups):
        where = [index for index in range(len(batch)) if groups[index] == group]
        assert penalties(where) == [whole[index] for index in where]
