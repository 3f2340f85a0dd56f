"""What functions of verl 0.9.1 return, for peer_numbers.py."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.actors.trainer.algorithms.peer_inputs import (
    BASELINES,
    GAMMA,
    GROUPS,
    KL_COEF,
    LAMBD,
    LENGTHS,
    MASK,
    REWARDS,
    SECOND,
    WEIGHTS,
    Options,
    divergence,
    functions,
    padded,
    trained,
    with_gradient,
)


def of_verl(directory: Path, columns: dict[str, list[float]]) -> dict[str, Any]:
    """Advantages per sample and token, losses with gradients."""
    masked = functions(
        (directory / "verl/utils/torch_functional.py").read_text(),
        ("masked_sum", "masked_mean", "masked_var", "masked_whiten", "clip_by_value"),
    )
    names = ("kl_penalty", "kl_penalty_forward", "agg_loss")
    estimators = {
        "rloo": "compute_rloo_outcome_advantage",
        "opo": "compute_opo_outcome_advantage",
        "gpg": "compute_gpg_outcome_advantage",
        "grpo": "compute_grpo_outcome_advantage",
        "grpo_passk": "compute_grpo_passk_outcome_advantage",
        "reinforce_plus_plus_baseline": "compute_reinforce_plus_plus_baseline_outcome_advantage",
    }
    losses = {
        "ppo": "compute_policy_loss_vanilla",
        "gspo": "compute_policy_loss_gspo",
        "cispo": "compute_policy_loss_cispo",
        "dppo_tv": "compute_policy_loss_dppo_tv",
        "dppo_kl": "compute_policy_loss_dppo_kl",
        "sapo": "compute_policy_loss_sapo",
        "gmpo": "compute_policy_loss_geo_mean",
        "gpg": "compute_policy_loss_gpg",
    }
    config = type("ActorConfig", (Options,), {})
    peer = functions(
        (directory / "verl/trainer/ppo/core_algos.py").read_text(),
        (*names, "compute_value_loss", *estimators.values(), *losses.values()),
        verl_F=masked,
        ActorConfig=config,
        AlgoConfig=type("AlgoConfig", (), {}),
    )
    rewards = torch.zeros_like(MASK)
    rewards[:, 0] = torch.tensor(REWARDS)
    found: dict[str, Any] = {"advantages": {}, "losses": {}, "kl": {}}
    index = np.array(GROUPS)
    for name, function in estimators.items():
        given = {"token_level_rewards": rewards.clone(), "response_mask": MASK, "index": index}
        advantages, _ = getattr(peer, function)(**given, config=Options(gamma=1.0))
        found["advantages"][name] = advantages[:, 0].tolist()
    found["advantages"] |= own_advantages_of_verl(directory, peer, masked)
    settings = config(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0, tau_pos=1.0)
    settings.tau_neg, settings.global_batch_info = 1.05, {"loss_scale_factor": None}
    for name, function in losses.items():
        new = torch.tensor(columns["new"], requires_grad=True)
        given = {"old_log_prob": padded(columns["old"]), "log_prob": padded(new), "response_mask": MASK}
        given |= {"advantages": padded(columns["advantages"]), "config": settings}
        loss, _ = getattr(peer, function)(**given, loss_agg_mode="seq-mean-token-mean")
        found["losses"][name] = with_gradient(loss, new)
    found["own_losses"] = own_losses_of_verl(directory, columns, masked, config)
    found["token_baseline"] = token_baseline_of_verl(directory, columns)
    found["returns"] = returns_of_verl(directory, columns, masked)
    for name in ("k1", "k2", "low_var_kl", "k3+"):
        new = torch.tensor(columns["new"], requires_grad=True)
        found["kl"][name] = with_gradient(peer.kl_penalty(new, torch.tensor(columns["ref"]), name).sum(), new)
    new = torch.tensor(columns["new"], requires_grad=True)
    given = padded(new), padded(columns["ref"]), padded(columns["old"]), MASK
    loss, _ = peer.compute_value_loss(*given, cliprange_value=0.2, loss_agg_mode="seq-mean-token-mean")
    found["value_loss"] = with_gradient(loss, new)
    return found


def own_advantages_of_verl(directory: Path, grpo: Any, masked: Any) -> dict[str, Any]:
    """GDPO of two rewards, whitened; ReMax; and DAPO's penalty for responses of 0 to 14 tokens of at most 10."""
    source = (directory / "verl/trainer/ppo/core_algos.py").read_text()
    names = ("compute_gdpo_outcome_advantage", "compute_remax_outcome_advantage")
    known = {"verl_F": masked, "compute_grpo_outcome_advantage": grpo.compute_grpo_outcome_advantage}
    peer = functions(source, names, Optional=Any, AlgoConfig=type("A", (), {}), **known)
    rewards = torch.zeros_like(MASK)
    rewards[:, 0] = torch.tensor(REWARDS)
    named = {"right": np.array(REWARDS, dtype=np.float32), "short": np.array(SECOND, dtype=np.float32)}
    prompts = torch.zeros(len(LENGTHS), 1)
    found, _ = peer.compute_gdpo_outcome_advantage(
        token_level_rewards=rewards,
        response_mask=MASK,
        index=np.array(GROUPS),
        config=Options(gdpo_reward_keys=list(named), gdpo_reward_weights=WEIGHTS),
        non_tensor_batch=named,
        batch={"prompts": prompts, "attention_mask": torch.cat([prompts + 1, MASK], 1).long()},
    )
    ended = torch.zeros_like(MASK)
    ended[torch.arange(len(LENGTHS)), torch.tensor(LENGTHS) - 1] = torch.tensor(REWARDS)
    baselines = torch.tensor(BASELINES)
    greedy, _ = peer.compute_remax_outcome_advantage(ended, baselines, MASK)
    manager = (directory / "verl/workers/reward_manager/dapo.py").read_text()
    (line,) = [line.strip() for line in manager.splitlines() if "overlong_reward = min(" in line]
    penalty = line.removeprefix("overlong_reward = ")
    overlong = [
        eval(penalty, {"exceed_len": length - (10 - 4), "overlong_buffer_len": 4, "overlong_penalty_factor": 0.5})
        for length in range(15)
    ]
    return {"gdpo": found[:, 0].tolist(), "remax": greedy[:, 0].tolist(), "overlong": overlong}


def returns_of_verl(directory: Path, columns: dict[str, list[float]], masked: Any) -> dict[str, Any]:
    """GAE and REINFORCE++, which skip tokens that do not train. Both advantages are whitened."""
    source = (directory / "verl/trainer/ppo/core_algos.py").read_text()
    gae, discounted = "compute_gae_advantage_return", "compute_reinforce_plus_plus_outcome_advantage"
    peer = functions(source, (gae, discounted), verl_F=masked, Optional=Any, AlgoConfig=type("A", (), {}))
    trains, there = padded(trained()), MASK > 0
    rewards = -KL_COEF * padded(divergence(columns)) * trains
    for row, reward in enumerate(REWARDS):
        rewards[row, trains[row].nonzero()[-1]] += reward
    advantages, returns = getattr(peer, gae)(rewards, padded(columns["rollout"]), trains, GAMMA, LAMBD)
    whitened, plain = getattr(peer, discounted)(rewards, trains, Options(gamma=GAMMA))
    return {
        "gae": {"advantages": advantages[there].tolist(), "returns": returns[there].tolist()},
        "reinforce_plus_plus": {"advantages": whitened[there].tolist(), "returns": plain[there].tolist()},
    }


def token_baseline_of_verl(directory: Path, columns: dict[str, list[float]]) -> list[float]:
    """Advantages per token that a page has as an example."""
    name = "compute_optimal_token_baseline_advantage"
    peer = functions((directory / "verl/trainer/ppo/core_algos.py").read_text(), (name,))
    rewards, old = torch.zeros_like(MASK), padded(columns["old"])
    for row, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True)):
        rewards[row, length - 1] = reward
    squares = torch.exp(2 * old) + 0.1 * (1 - torch.exp(old))
    advantages, _ = getattr(peer, name)(rewards, MASK, np.array(GROUPS), old, squares)
    return advantages[MASK > 0].tolist()


def own_losses_of_verl(directory: Path, columns: dict[str, list[float]], masked: Any, config: Any) -> dict[str, Any]:
    """Losses that a page has as examples. All tokens between the bounds are chosen, so that nothing is random."""
    names = ("compute_policy_loss_clip_cov", "compute_policy_loss_kl_cov")
    source = (directory / "verl/trainer/ppo/core_algos.py").read_text()
    peer = functions(source, ("agg_loss", *names), verl_F=masked, ActorConfig=config, AlgoConfig=type("A", (), {}))
    policy_loss = Options(clip_cov_ratio=1.0, clip_cov_lb=0.2, clip_cov_ub=1.0, kl_cov_ratio=0.2, ppo_kl_coef=1.0)
    settings = config(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, policy_loss=policy_loss)
    settings.global_batch_info = {"loss_scale_factor": None}
    found: dict[str, Any] = {}
    for name in names:
        new = torch.tensor(columns["new"], requires_grad=True)
        given = {"old_log_prob": padded(columns["old"]), "log_prob": padded(new), "response_mask": MASK}
        given |= {"advantages": padded(columns["advantages"]), "config": settings}
        loss, metrics = getattr(peer, name)(**given, loss_agg_mode="seq-mean-token-mean")
        found[name.removeprefix("compute_policy_loss_")] = with_gradient(loss, new) | {"metrics": metrics}
    return found
