"""Writes peer_numbers.json: what functions of slime, verl, prime-rl, AReaL and NeMo-RL return, in float32.

    python -m tests.actors.trainer.algorithms.peer_numbers --verl DIR --slime GIT --prime-rl GIT ...

All get the same inputs. DIR is an unpacked wheel of verl 0.9.1; GIT are clones that have the commits below. Single
functions are taken out of the files, so none of the packages' dependencies is needed. Only the numbers are committed.
"""

import argparse
import ast
import contextlib
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np
import torch

NUMBERS: Final = Path(__file__).with_suffix(".json")
SLIME: Final = "624b824a"
PRIME_RL: Final = "559b4477"
AREAL: Final = "cbff54d6"
NEMO_RL: Final = "7ea279ab"
LENGTHS: Final = (5, 3, 7, 1, 4, 6)
GROUPS: Final = (0, 1, 0, 1, 0, 1)
REWARDS: Final = (1.0, 0.25, 0.0, 0.75, 0.5, 0.25)
SECOND: Final = (0.5, 1.0, 0.5, 0.0, 0.25, 1.0)  # another reward of the same samples
WEIGHTS: Final = (1.0, 0.5)  # of the two
TURNS: Final = (2, 1, 3, 1, 2, 2)  # of each sample, with an input token each
SCORES: Final = (0.5, -1.25, -2.0, 0.75, 3.0, 2.5)  # of chosen and rejected responses in turn
TRAINS: Final = "11011 111 1001110 1 1011 111101"  # tokens of each response; 0: the output of a tool
GAMMA, LAMBD, KL_COEF = 0.9, 0.8, 0.25
OF_RETURNS, BY_LENGTH = 0.95, 0.5  # lambda of the returns, and its factor by length
BASELINES: Final = (0.5, 0.75, 0.5, 0.75, 0.5, 0.75)  # of the greedy sample of each sample's group


class Options(SimpleNamespace):
    """Settings of a peer: attributes, and `get` as a dictionary has it."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def functions(source: str, names: tuple[str, ...], **known: Any) -> SimpleNamespace:
    """Take functions and classes out of a source text, without their decorators."""
    tree = ast.parse(source)
    body = [node for node in tree.body if getattr(node, "name", None) in names]
    for node in body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    future = ast.parse("from __future__ import annotations").body
    scope: dict[str, Any] = {"torch": torch, "np": np, "defaultdict": defaultdict, **known}
    exec(compile(ast.Module([*future, *body], []), "peer", "exec"), scope)
    return SimpleNamespace(**{name: scope[name] for name in names})


def drawn() -> dict[str, list[float]]:
    """Log-probs and a divergence that is often beyond clips and bounds. All tokens of a sequence share an advantage."""
    draw, total = np.random.default_rng(11), sum(LENGTHS)
    new = -np.abs(draw.normal(0, 1.2, total))
    columns = {
        "new": new,
        "old": np.minimum(new + draw.normal(0, 0.3, total), -1e-3),
        "rollout": np.minimum(new + draw.normal(0, 0.6, total), -1e-3),
        "ref": np.minimum(new + draw.normal(0, 0.8, total), -1e-3),
        "advantages": np.repeat([0.9, -0.4, -1.1, 0.6, 0.3, -0.7], LENGTHS),
    }
    return {name: [float(np.float32(value)) for value in values] for name, values in columns.items()}


def padded(values: list[float] | torch.Tensor) -> torch.Tensor:
    """Lay tokens out as rows of the longest length."""
    rows = torch.tensor(values).split(LENGTHS) if isinstance(values, list) else values.split(LENGTHS)
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


MASK: Final = padded([1.0] * sum(LENGTHS))


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


def trained() -> list[float]:
    """The loss mask of all responses."""
    return [float(flag) for flag in TRAINS.replace(" ", "")]


def divergence(columns: dict[str, list[float]]) -> list[float]:
    """k1 of the old policy and the reference, 0 where the token does not train."""
    found = (torch.tensor(columns["old"]) - torch.tensor(columns["ref"])) * torch.tensor(trained())
    return found.tolist()


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


def of_slime(git: Path, columns: dict[str, list[float]]) -> dict[str, Any]:
    """Losses per token as sums, with gradients; weights of the mismatch corrections."""
    names = ("compute_approx_kl", "compute_opsm_mask", "compute_gspo_kl", "compute_policy_loss", "compute_cispo_loss")
    peer = functions(shown(git, SLIME, "slime/utils/ppo_utils.py"), names)
    found: dict[str, Any] = {"losses": {}, "kl": {}, "mis": {}}
    old, advantages = torch.tensor(columns["old"]), torch.tensor(columns["advantages"])
    for name, options in {"ppo": (0.2, 0.28), "ppo_dual": (0.2, 0.28, 3.0), "gspo": (0.2, 0.28)}.items():
        new = torch.tensor(columns["new"], requires_grad=True)
        rows, masks = [old.split(LENGTHS), new.split(LENGTHS)], [torch.ones(length) for length in LENGTHS]
        kl = peer.compute_gspo_kl(rows[1], rows[0], rows[1], masks) if name == "gspo" else old - new
        loss, clipped = peer.compute_policy_loss(kl, advantages, *options)
        found["losses"][name] = with_gradient(loss.sum(), new) | {"clipped": clipped.tolist()}
    new = torch.tensor(columns["new"], requires_grad=True)
    loss, _ = peer.compute_cispo_loss(old - new, new, advantages, 0.2, 0.28)
    found["losses"]["cispo"] = with_gradient(loss.sum(), new)
    kept, _ = peer.compute_opsm_mask(
        SimpleNamespace(opsm_delta=1e-4),
        torch.tensor(columns["new"]).split(LENGTHS),
        old.split(LENGTHS),
        advantages.split(LENGTHS),
        [torch.ones(length) for length in LENGTHS],
    )
    found["opsm"] = kept.tolist()
    for name in ("k1", "k2", "k3", "low_var_kl"):
        for unbiased in (False, True):
            new = torch.tensor(columns["new"], requires_grad=True)
            ratio = torch.exp(new - old) if unbiased else None
            loss = peer.compute_approx_kl(new, torch.tensor(columns["ref"]), name, ratio)
            found["kl"][f"{name} unbiased" if unbiased else name] = with_gradient(loss.sum(), new)
    found["mis"] = mis_of_slime(git, columns)
    found["returns"] = returns_of_slime(git, columns)
    distilled = functions(shown(git, SLIME, "slime/backends/megatron_utils/loss.py"), ("apply_opd_kl_to_advantages",))
    found["opd"] = {}
    for coef in (0.5, 1.0):
        rows = [torch.tensor(columns["advantages"])]
        data = {"teacher_log_probs": [torch.tensor(columns["ref"])]}
        settings = SimpleNamespace(opd_kl_coef=coef, opd_type="sglang")
        distilled.apply_opd_kl_to_advantages(settings, data, rows, [torch.tensor(columns["new"])])
        found["opd"][str(coef)] = rows[0].tolist()
    new = torch.tensor(columns["new"], requires_grad=True)
    source = shown(git, SLIME, "slime/backends/megatron_utils/loss.py")
    critic = functions(
        source, ("value_loss_function",), get_values=lambda *_args, **_options: (None, {"values": [new]})
    )
    batch = {"values": [old], "returns": [torch.tensor(columns["ref"])]}
    batch |= dict.fromkeys(("unconcat_tokens", "total_lengths", "response_lengths"))
    loss, metrics = critic.value_loss_function(SimpleNamespace(value_clip=0.2), batch, None, torch.sum)
    found["value_loss"] = with_gradient(loss, new) | {"clipped": metrics["value_clipfrac"].item()}
    return found


def returns_of_slime(git: Path, columns: dict[str, list[float]]) -> dict[str, Any]:
    """REINFORCE++ of both kinds, and GAE by its chunks, over all tokens of the responses. Nothing is whitened."""
    baseline, discounted = "get_reinforce_plus_plus_baseline_advantages", "get_reinforce_plus_plus_returns"
    batch, scans = "get_advantages_and_returns_batch", ("chunked_gae", "chunked_discounted_returns", "vanilla_gae")
    core = ModuleType("megatron.core")
    core.mpu = SimpleNamespace(get_context_parallel_world_size=lambda: 1)  # type: ignore[attr-defined]
    sys.modules["megatron"], sys.modules["megatron.core"] = ModuleType("megatron"), core
    source = shown(git, SLIME, "slime/utils/ppo_utils.py")
    peer = functions(source, (baseline, discounted, batch, *scans), F=torch.nn.functional)
    kl, masks = torch.tensor(divergence(columns)).split(LENGTHS), torch.tensor(trained()).split(LENGTHS)
    rewards = torch.tensor(REWARDS)
    returns = getattr(peer, discounted)(rewards, kl, masks, LENGTHS, LENGTHS, KL_COEF, GAMMA)
    means = torch.stack([rewards[torch.tensor(GROUPS) == group].mean() for group in GROUPS])
    centred = getattr(peer, baseline)(rewards - means, kl, masks, KL_COEF)
    tokens = [-KL_COEF * one for one in kl]
    for one, reward in zip(tokens, REWARDS, strict=True):
        one[-1] += reward
    values = torch.tensor(columns["rollout"]).split(LENGTHS)
    advantages, goals = getattr(peer, batch)(LENGTHS, LENGTHS, values, tokens, GAMMA, LAMBD)
    return {
        "reinforce_plus_plus": torch.cat(returns).tolist(),
        "reinforce_plus_plus_baseline": torch.cat(centred).tolist(),
        "gae": {"advantages": torch.cat(advantages).tolist(), "returns": torch.cat(goals).tolist()},
    }


def mis_of_slime(git: Path, columns: dict[str, list[float]]) -> dict[str, Any]:
    """Products of weights and masks, by level and mode."""
    names = ("masked_sum", "masked_mean", "masked_min", "masked_max", "metrics_append", "calculate_veto_mask")
    names += ("truncate", "clip", "mask", "compute_mis_weights", "add_ppl_metrics")
    peer = functions(shown(git, SLIME, "examples/train_infer_mismatch_helper/mis.py"), names)
    rows = {name: list(torch.tensor(columns[name]).split(LENGTHS)) for name in ("old", "rollout")}
    masks = [torch.ones(length) for length in LENGTHS]
    found: dict[str, Any] = {}
    for level in ("token", "sequence", "geometric"):
        for mode in ("truncate", "clip", "mask"):
            for normalize in (False, True):
                if normalize and level == "geometric":
                    continue  # raises there
                options = {"use_tis": True, "use_rs": True, "tis_level": level, "rs_level": "geometric"}
                options |= {"tis_lower_bound": 0.5, "tis_upper_bound": 2.0, "rs_lower_bound": 0.8}
                options |= {"rs_upper_bound": 1.3, "rs_veto_threshold": 0.3, "tis_mode": mode}
                weights, kept, metrics = peer.compute_mis_weights(
                    SimpleNamespace(**options, tis_batch_normalize=normalize),
                    train_log_probs=rows["old"],
                    rollout_log_probs=rows["rollout"],
                    loss_masks=masks,
                )
                name = f"{level} {mode}{' normalized' if normalize else ''}"
                found[name] = {"weights": (torch.cat(weights) * torch.cat(kept)).tolist()}
                if mode == "clip" and not normalize:
                    found[name]["metrics"] = {name: torch.cat(values).tolist() for name, values in metrics.items()}
    return found


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


def with_gradient(loss: torch.Tensor, new: torch.Tensor) -> dict[str, Any]:
    """The loss, and its gradient by token."""
    (gradient,) = torch.autograd.grad(loss, new)
    return {"loss": loss.item(), "gradient": gradient.tolist()}


def shown(git: Path, commit: str, path: str) -> str:
    """Read a file of a commit."""
    return subprocess.run(
        ["git", "show", f"{commit}:{path}"], cwd=git, check=True, capture_output=True, text=True
    ).stdout


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


def rounded(value: Any) -> Any:
    """Keep nine digits of each number, which are all that float32 has."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    main()
