"""What functions of slime return, for peer_numbers.py."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.actors.trainer.algorithms.peer_inputs import (
    GAMMA,
    GROUPS,
    KL_COEF,
    LAMBD,
    LENGTHS,
    REWARDS,
    SLIME,
    divergence,
    functions,
    shown,
    trained,
    with_gradient,
)


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
