"""What a stranger may give to the functions: lists, arrays, tensors, ids of any kind; and what is refused, by name."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import torch

from actors.trainer.algorithms import (
    corrections,
    distillation,
    kl,
    length_penalties,
    policy_losses,
    preference,
    returns,
    values,
)
from actors.trainer.algorithms.advantage_inputs import AdvantageInputs
from actors.trainer.algorithms.group_baselines import (
    gdpo_advantages,
    gpg_advantages,
    grpo_advantages,
    maxrl_advantages,
    opo_advantages,
    passk_advantages,
    reinforce_advantages,
    remax_advantages,
    rloo_advantages,
)
from actors.trainer.algorithms.loss_inputs import LossInputs, Sequences
from actors.trainer.algorithms.reductions import reduction
from actors.trainer.algorithms.whitening import whiten
from tests.build.losses import inputs

REWARDS: Final = (1.0, 0.25, 0.0, 0.5)
IDS: Final = (0, 1, 0, 1)
GROUPED: Final[dict[str, Callable[..., np.ndarray]]] = {
    "grpo": grpo_advantages,
    "rloo": rloo_advantages,
    "gpg": gpg_advantages,
    "maxrl": maxrl_advantages,
    "passk": passk_advantages,
    "opo": lambda rewards, groups, rollouts=None: opo_advantages(rewards, groups, rollouts, [1, 2, 3, 4]),
    "gdpo": lambda rewards, groups, rollouts=None: gdpo_advantages({"one": rewards}, groups, rollouts),
    "linear": lambda rewards, groups, rollouts=None: length_penalties.linear_length_penalties(
        rewards, groups, rollouts, output_lens=[1, 2, 3, 4], input_lens=(1, 1, 1, 1), num_turns=np.ones(4)
    ),
}
ONE: Final = torch.tensor([-1.0, -2.0])
TWO: Final = Sequences(torch.tensor([0, 1]), count=2)


def given(**columns: Any) -> LossInputs:
    names = ("log_probs", "old_log_probs", "rollout_log_probs", "advantages", "entropy")
    return LossInputs(**dict.fromkeys(names, ONE) | {"sequences": TWO} | columns)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize(
    "rewards",
    [
        list(REWARDS),
        np.array(REWARDS, dtype=np.float16),
        torch.tensor(REWARDS),
        torch.tensor(REWARDS, dtype=torch.bfloat16),
        torch.tensor(REWARDS, requires_grad=True),
    ],
    ids=["list", "float16", "tensor", "bfloat16", "gradient"],
)
def test_rewards_may_be_lists_arrays_and_tensors(name: str, rewards: Any) -> None:
    found, expected = GROUPED[name](rewards, IDS), GROUPED[name](np.array(REWARDS), np.array(IDS))
    assert found.dtype == np.float64
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize(
    "ids",
    [["b", "a"] * 2, [2**70, 7] * 2, np.array([2**63 + 1, 2**63] * 2, dtype=np.uint64), [-5, 9] * 2],
    ids=["texts", "beyond int64", "uint64", "negative"],
)
def test_groups_and_rollouts_may_have_ids_of_any_kind(name: str, ids: Any) -> None:
    expected = GROUPED[name](REWARDS, IDS)
    assert GROUPED[name](REWARDS, ids).tolist() == expected.tolist()
    assert GROUPED[name](REWARDS, IDS, [f"{10**18 + place}" for place in range(4)]).tolist() == expected.tolist()
    assert GROUPED[name](REWARDS, IDS, ids).tolist() == GROUPED[name](REWARDS, IDS, IDS).tolist()


def test_reductions_take_ids_of_any_kind() -> None:
    expected = reduction([2, 2, 5], [4, 4, 9])
    for ids in (["x", "x", "y"], torch.tensor([1, 1, 0]), [2**70, 2**70, 3]):
        found = reduction([2, 2, 5], ids)
        assert (found.token_weights.tolist(), found.shares.tolist()) == (
            expected.token_weights.tolist(),
            expected.shares.tolist(),
        )


@pytest.mark.parametrize("name", GROUPED)
def test_columns_of_another_length_are_refused_by_name(name: str) -> None:
    for wrong, says in (
        ((REWARDS, IDS[:3]), r"groups has shape \(3,\), expected \(4,\)"),
        ((REWARDS, IDS, IDS[:1]), r"rollouts has shape \(1,\), expected \(4,\)"),
        (([REWARDS], [IDS]), r"has shape \(1, 4\), expected"),
    ):
        with pytest.raises(ValueError, match=says):
            GROUPED[name](*wrong)


REFUSED: Final[dict[str, tuple[Callable[[], Any], str]]] = {
    "one rollout of three": (lambda: reinforce_advantages([1.0, 0.0, 1.0], [0]), r"rollouts has shape \(1,\)"),
    "baselines": (lambda: remax_advantages([1.0, 0.0], [1.0]), r"baseline_rewards has shape \(1,\)"),
    "lengths": (lambda: opo_advantages([1.0, 0.0], [0, 0], None, [1]), r"lengths has shape \(1,\)"),
    "named rewards": (lambda: gdpo_advantages({"a": [1.0], "b": [1.0, 2.0]}, [0]), "differ in length"),
    "weights": (lambda: gdpo_advantages({"a": [1.0]}, [0], weights={"c": 1.0}), r"weights names \['c'\]"),
    "a mask": (lambda: whiten([1.0, 2.0], [True]), r"mask has shape \(1,\)"),
    "rollouts": (lambda: reduction([1, 2], [0]), r"rollouts has shape \(1,\)"),
    "turns": (
        lambda: length_penalties.linear_length_penalties(
            [1.0, 0.0], [0, 0], output_lens=[1, 1], input_lens=[1, 1], num_turns=[1]
        ),
        r"num_turns has shape \(1,\)",
    ),
    "a zone": (
        lambda: length_penalties.overlong_penalties([1], max_response_len=5, buffer_len=0),
        "buffer_len is 0, expected at least 1",
    ),
    "returns": (lambda: values.explained_variance([1.0, 2.0], [1.0], [True, True]), r"returns has shape \(1,\)"),
    "teacher": (lambda: distillation.opd_advantages([1.0], [1.0], [1.0, 2.0], [True]), "teacher_log_probs has shape"),
    "a column": (lambda: given(advantages=torch.ones(1)), r"advantages has shape \(1,\), expected \(2,\)"),
    "log-probs": (lambda: given(log_probs=ONE[None]), r"log_probs has shape \(1, 2\), expected one dimension"),
    "sequences": (lambda: given(sequences=Sequences(torch.tensor([0]), 1)), r"sequences has shape \(1,\)"),
    "reference": (lambda: kl.kl_divergence(ONE, ONE[:1]), r"ref_log_probs has shape \(1,\), expected \(2,\)"),
    "no rewards": (lambda: policy_losses.positive_nll_loss(given()), "rewards is None"),
    "no trainer": (lambda: corrections.mismatch_metrics(given()), "trainer_log_probs is None"),
    "no reference": (lambda: preference.dpo_loss(given(rollouts=TWO)), "ref_log_probs is None"),
    "no pairs": (lambda: preference.dpo_loss(given(ref_log_probs=ONE)), "rollouts is None"),
    "verl's kl": (lambda: kl.kl_divergence(ONE, ONE, "kl"), "estimator is 'kl'; allowed: 'k1', 'k2'"),  # type: ignore[arg-type]
    "verl's mse": (lambda: kl.kl_clamped(ONE, ONE, "mse"), "estimator is 'mse'; allowed: 'k1'"),  # type: ignore[arg-type]
    "token-sum": (lambda: reduction([1], [0], mode="token-sum"), "mode is 'token-sum'; allowed: 'rollout-mean'"),  # type: ignore[arg-type]
    "an unknown divergence": (lambda: policy_losses.dppo_loss(given(), divergence="js"), "'js'; allowed: 'tv', 'kl'"),  # type: ignore[arg-type]
    "icepop": (lambda: corrections.importance_weights(given(), mode="icepop"), "mode is 'icepop'; allowed"),  # type: ignore[arg-type]
    "a level": (lambda: corrections.importance_weights(given(), level="seq"), "level is 'seq'; allowed"),  # type: ignore[arg-type]
    "a metric": (lambda: corrections.rejections(given(), metric="k3"), "metric is 'k3'; allowed: 'ratio'"),  # type: ignore[arg-type]
    "another level": (lambda: corrections.mean_weight(given(), ONE, level="seq"), "level is 'seq'; allowed"),  # type: ignore[arg-type]
    "a preference": (lambda: preference.dpo_loss(given(), kind="hinge"), "kind is 'hinge'; allowed"),  # type: ignore[arg-type]
    "token rewards": (
        lambda: returns.token_rewards([1.0], [1, 1], [1, 1]),
        r"rewards has shape \(1,\), expected \(2,\)",
    ),
    "a divergence": (lambda: returns.token_rewards([1.0], [2], [1, 1], [0.5], kl_coef=1.0), r"kl has shape \(1,\)"),
    "values of a critic": (lambda: returns.gae([[1.0, 2.0]], [[0.0]]), r"shape \(1, 1\), expected \(1, 2\)"),
    "old log-probs": (lambda: kl.kl_divergence(ONE, ONE, old_log_probs=ONE[:1]), r"old_log_probs has shape \(1,\)"),
    "old values": (lambda: values.value_loss(ONE, ONE[:1], ONE), r"old_values has shape \(1,\), expected \(2,\)"),
    "signs": (lambda: preference.rm_loss(ONE, ONE[:1], TWO), r"signs has shape \(1,\), expected \(2,\)"),
    "factors": (lambda: corrections.mean_weight(given(), ONE[:1]), r"weights has shape \(1,\), expected \(2,\)"),
    "ids of a teacher": (
        lambda: distillation.topk_distillation_loss(ONE[None], ONE[None, :1]),
        r"teacher_topk_log_probs has shape \(1, 1\), expected \(1, 2\)",
    ),
    "a group of one": (lambda: rloo_advantages([1.0], [0], group_of_one="one"), "group_of_one is 'one'; allowed"),  # type: ignore[arg-type]
    "top-k": (
        lambda: distillation.topk_distillation_loss(ONE[None], ONE[None], kl_type="js"),  # type: ignore[arg-type]
        "kl_type is 'js'; allowed: 'forward'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_shapes_unknown_names_and_missing_columns_are_refused(name: str) -> None:
    call, says = REFUSED[name]
    with pytest.raises(ValueError, match=says):
        call()


def test_inputs_of_estimators_may_be_lists() -> None:
    found = AdvantageInputs(  # type: ignore[arg-type]
        rewards=[1, 0], groups=["a", "b"], rollouts=[0, 1], lengths=[2, 1], loss_mask=[0, 1, 1], response_mask=[1, 1, 1]
    )
    assert found.mask_sums.tolist() == [1, 1]
    assert (found.rewards.dtype, found.loss_mask.dtype) == (np.float64, np.bool_)


def test_other_functions_take_lists_and_tensors() -> None:
    found = returns.gae(
        torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16), torch.zeros(1, 2, requires_grad=True), lambd=0.5
    )
    assert found.advantages.tolist() == [[2.0, 2.0]]
    assert values.explained_variance(torch.tensor([1.0, 2.0]), [1.0, 2.0], [1, 1]) == 1.0
    found = distillation.opd_advantages([0.5, 0.5], [0.0, -1.0], torch.tensor([9.0, -1.5], requires_grad=True), [0, 1])
    assert found.tolist() == [0.5, 0.0]
    assert whiten(torch.tensor([1.0, 3.0], dtype=torch.bfloat16), [1, 1]).tolist() == pytest.approx(
        [-(0.5**0.5), 0.5**0.5]
    )
    assert length_penalties.overlong_penalties((5, 10), max_response_len=10, buffer_len=5).tolist() == [0.0, -1.0]


def test_the_cap_of_dppo_is_counted_as_verl_does() -> None:
    """Ratios of e^2 and e: the first one is above the cap of 3, and the third one, too, but it is dropped."""
    moved = inputs([-8.0, -9.0, -0.1], [-10.0, -10.0, -2.1], [-1.0, -1.0, 1.0])
    found = policy_losses.dppo_loss(moved, eps_clip_c=3.0)
    assert found.metrics["train/pg_clipfrac_lower"].tolist() == [1.0, 0.0, 0.0]
    assert found.metrics["train/pg_clipfrac"].tolist() == [0.0, 0.0, 1.0]


def test_the_factor_of_prime_rls_advantages_scales_the_first_term_alone() -> None:
    moved = inputs([-1.0, -1.2], [0.0, 0.0], [2.0, -1.0], rollout=[-1.1, -1.1])
    for loss in (policy_losses.prime_rl_loss, policy_losses.prime_rl_ipo_loss):
        plain, tripled, none = (loss(moved, adv_tau=tau).loss for tau in (1.0, 3.0, 0.0))
        assert torch.allclose(tripled - none, 3.0 * (plain - none))
        assert torch.allclose(none, 1e-3 * (moved.log_probs - moved.rollout_log_probs).square())
