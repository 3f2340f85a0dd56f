"""Writes peer_numbers.json: what functions of slime, verl, prime-rl, AReaL and NeMo-RL return, in float32.

    python -m tests.actors.trainer.algorithms.peer_numbers --verl DIR --slime GIT --prime-rl GIT ...

All get the same inputs. DIR is an unpacked wheel of verl 0.9.1; GIT are clones that have the commits of
peer_inputs.py. Single functions are taken out of the files, so none of the packages' dependencies is needed. Only the
numbers are committed.
"""

import argparse
import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

from tests.actors.trainer.algorithms.peer_inputs import (
    AREAL,
    BY_LENGTH,
    GAMMA,
    GROUPS,
    LAMBD,
    LENGTHS,
    MASK,
    NEMO_RL,
    OF_RETURNS,
    PRIME_RL,
    REWARDS,
    SCORES,
    SLIME,
    TURNS,
    divergence,
    drawn,
    functions,
    padded,
    rounded,
    shown,
    trained,
    with_gradient,
)
from tests.actors.trainer.algorithms.peer_slime import of_slime
from tests.actors.trainer.algorithms.peer_verl import of_verl

NUMBERS: Final = Path(__file__).with_suffix(".json")


def of_prime_rl(git: Path, columns: dict[str, list[float]]) -> dict[str, Any]:
    """Losses per token as sums, with gradients."""
    peer = functions(
        shown(git, PRIME_RL, "src/prime_rl/trainer/rl/loss.py"),
        ("default_loss_fn", "ipo_loss_fn", "_safe_mean", "compute_importance_ratio_and_mismatch_kl"),
        LossOutputs=SimpleNamespace,
    )
    settings = SimpleNamespace(dppo_mask_low=0.2, dppo_mask_high=0.2, ipo_threshold=0.1, adv_tau=1.0, kl_tau=1e-3)
    found: dict[str, Any] = {"losses": {}}
    for name, function in {"prime_rl": peer.default_loss_fn, "prime_rl_ipo": peer.ipo_loss_fn}.items():
        new = torch.tensor(columns["new"], requires_grad=True)
        inputs = SimpleNamespace(
            trainer_logprobs=new,
            inference_logprobs=torch.tensor(columns["rollout"]),
            advantages=torch.tensor(columns["advantages"]),
            loss_mask=torch.ones(len(new), dtype=torch.bool),
            loss_weights=None,
        )
        found["losses"][name] = with_gradient(function(inputs, settings).loss, new)
    found["length_penalty"] = length_penalty_of_prime_rl(git)
    return found


def length_penalty_of_prime_rl(git: Path) -> list[float]:
    """Advantages of one group after the length penalty."""
    given: dict[str, float] = {}
    peer = functions(
        shown(git, PRIME_RL, "src/prime_rl/orchestrator/algo/grpo.py"),
        ("GRPOAlgorithm",),
        Algorithm=type("Algorithm", (), {}),
        iter_trainable_traces=lambda traces: [(None, trace) for trace in traces],
        assign_advantages=lambda trace, advantage: given.update({trace.name: advantage}),
    )
    algorithm = peer.GRPOAlgorithm.__new__(peer.GRPOAlgorithm)
    algorithm.length_penalty = SimpleNamespace(
        num_output_tokens_weight=0.25, num_input_tokens_weight=0.1, num_turns_weight=0.1
    )
    traces = [
        SimpleNamespace(
            name=name, reward=reward, num_output_tokens=length, num_total_tokens=length + more, num_turns=more
        )
        for name, (reward, length, more) in enumerate(zip(REWARDS, LENGTHS, TURNS, strict=True))
    ]
    with contextlib.suppress(StopIteration):
        algorithm.score_group(traces).send(None)
    return [given[name] for name in range(len(traces))]


def of_areal(git: Path, columns: dict[str, list[float]]) -> dict[str, Any]:
    """The divergence of KPop per token, in both directions."""
    peer = functions(shown(git, AREAL, "areal/utils/functional/functional.py"), ("compute_binary_kl_divergence",))
    old, rollout = torch.tensor(columns["old"]), torch.tensor(columns["rollout"])
    both = [peer.compute_binary_kl_divergence(*pair) for pair in ((old, rollout), (rollout, old))]
    return {"kpop": torch.maximum(*both).tolist()}


def of_nemo_rl(git: Path) -> dict[str, Any]:
    """Divergences over the teacher's four likeliest of nine tokens, as means over tokens with gradients."""
    peer = functions(
        shown(git, NEMO_RL, "nemo_rl/algorithms/loss/loss_functions.py"),
        ("DistillationLossFn",),
        LossFunction=object,
        LossType=SimpleNamespace(TOKEN_LEVEL=None),
        LossInputType=SimpleNamespace(DISTILLATION=None),
    )
    draw = torch.Generator().manual_seed(5)
    policy, teacher = (torch.randn(6, 9, generator=draw).log_softmax(-1) for _ in range(2))
    highest, ids = teacher.topk(4)
    own, minus_entropy = policy.gather(1, ids), (policy.exp() * policy).sum(-1)
    topk = {"policy": own.tolist(), "teacher": highest.tolist(), "entropy": (-minus_entropy).tolist()}
    found: dict[str, Any] = {"topk": topk, "distillation": {}}
    for kind in ("forward", "reverse", "mixed"):
        for outside in (False, True):
            loss = peer.DistillationLossFn(
                SimpleNamespace(kl_type=kind, mixed_kl_weight=0.3, zero_outside_topk=outside)
            )
            new = own.clone().requires_grad_()
            value, _ = loss(new, highest, minus_entropy, {"input_ids": own}, None, None)
            found["distillation"][f"{kind} outside" if outside else kind] = with_gradient(value, new)
    return found | preferences_of_nemo_rl(git)


def preferences_of_nemo_rl(git: Path) -> dict[str, Any]:
    """Loss of a reward model on three pairs, whose responses alternate; its metrics and gradient."""
    peer = functions(
        shown(git, NEMO_RL, "nemo_rl/algorithms/loss/loss_functions.py"),
        ("PreferenceLossFn",),
        LossFunction=object,
        LossType=SimpleNamespace(SEQUENCE_LEVEL=None),
        LossInputType=SimpleNamespace(LOGIT=None),
        Tensor=torch.Tensor,
        masked_mean=lambda values, mask, global_normalization_factor: (
            (values * mask).sum() / global_normalization_factor
        ),
    )
    scores = torch.tensor([SCORES], requires_grad=True)
    loss, metrics = peer.PreferenceLossFn()(scores.T, {"sample_mask": torch.ones(len(SCORES))}, len(SCORES), None)
    (gradient,) = torch.autograd.grad(loss, scores)
    return {"preference": {**metrics, "gradient": gradient[0].tolist()}, "scores": SCORES}


def gae_of_nemo_rl(git: Path, columns: dict[str, list[float]]) -> dict[str, Any]:
    """GAE with a lambda of its own for the returns, and one by length. It skips tokens that do not train."""
    name = "GeneralizedAdvantageEstimator"
    source = shown(git, NEMO_RL, "nemo_rl/algorithms/advantage_estimator.py")
    peer = functions(source, (name,))
    lambdas = {"gae_lambda": LAMBD, "gae_lambda_value": OF_RETURNS, "gae_lambda_policy": None}
    config = {"gae_gamma": GAMMA, "normalize_advantages": False, "length_adaptive_alpha": BY_LENGTH, **lambdas}
    loss = SimpleNamespace(use_kl_in_reward=False, reference_policy_kl_penalty=0.0, reference_policy_kl_type="k1")
    estimator = getattr(peer, name)(config, loss)
    given = torch.tensor(REWARDS), padded(trained()), padded(columns["rollout"])
    advantages, returns = estimator.compute_advantage(None, *given)
    return {"advantages": advantages[MASK > 0].tolist(), "returns": returns[MASK > 0].tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--verl", "--slime", "--prime-rl", "--areal", "--nemo-rl"):
        parser.add_argument(name, type=Path, required=True)
    given = parser.parse_args()
    columns = drawn()
    numbers = {
        "lengths": LENGTHS,
        "groups": GROUPS,
        "rewards": REWARDS,
        "columns": columns,
        "trains": trained(),
        "kl": divergence(columns),
        "verl 0.9.1": of_verl(given.verl, columns),
        f"slime {SLIME}": of_slime(given.slime, columns),
        f"prime-rl {PRIME_RL}": of_prime_rl(given.prime_rl, columns),
        f"AReaL {AREAL}": of_areal(given.areal, columns),
        f"NeMo-RL {NEMO_RL}": of_nemo_rl(given.nemo_rl) | {"gae": gae_of_nemo_rl(given.nemo_rl, columns)},
    }
    NUMBERS.write_text(json.dumps(rounded(numbers)) + "\n")


if __name__ == "__main__":
    main()
