"""Every estimator, loss, correction, reduction and KL estimator, as settings of [algorithm].

They are taken from the declared choices, so that a new choice is trained in every layout without a change here.
"""

from typing import Any, Final, get_args

import msgspec

from runtime.settings.rules.algorithm import APPLIES, refusal
from runtime.settings.tables.algorithm import AggMode, AlgorithmConfig, Estimator, LossMode

Settings = dict[str, Any]

BASE: Final[Settings] = {"entropy_coef": 0.05, "num_steps_per_rollout": 2, "advantage_estimator": "rloo"}
CORRECTIONS: Final[dict[str, Settings]] = {
    "tokens, truncated": {"use_tis": True, "tis_mode": "truncate", "tis_clip": 1.2},
    "sequences, clipped": {"use_tis": True, "tis_level": "sequence", "tis_clip": 1.5, "tis_clip_low": 0.6},
    "sequences, masked, mean 1": {
        "use_tis": True,
        "tis_level": "geometric",
        "tis_mode": "mask",
        "tis_clip_low": 0.8,
        "tis_clip": 1.3,
        "tis_batch_normalize": True,
    },
    "tokens rejected, veto": {"use_rs": True, "rs_lower_bound": 0.7, "rs_upper_bound": 1.4, "rs_veto_threshold": 0.5},
    "sequences rejected": {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.8, "rs_upper_bound": 1.2},
    "divergence": {"use_rs": True, "rs_metric": "binary_kl", "rs_level": "geometric", "rs_upper_bound": 3e-3},
    "OPSM": {"use_opsm": True, "opsm_delta": 0.01},
    "current policy": {"use_tis": True, "tis_level": "sequence", "tis_clip": 1.5, "bypass_mode": True},
}
BYPASSED: Final = "gpg"  # reads no old log-probs
DISTILLED: Final = "distillation from likeliest tokens"  # reads log-probs of other tokens than the targets
FURTHER: Final[dict[str, Settings]] = {
    "likelihood of good samples": {"positive_example_nll_weight": 0.3},
    "mismatch metrics": {"get_mismatch_metrics": True},
    "engine's log-probs": {"use_rollout_logprobs": True},
    "on-policy distillation": {"use_opd": True, "opd_type": "sglang", "normalize_advantages": True},
    DISTILLED: {
        "use_opd": True,
        "opd_type": "sglang",
        "opd_kl_coef": 0.5,
        "distillation_loss_coef": 0.3,
        "distillation_kl_type": "mixed",
        "zero_outside_topk": True,
    },
    "critic, lambda by length": {
        "advantage_estimator": "ppo",
        "gae_lambda_value": 0.7,
        "length_adaptive_alpha": 0.4,
        "normalize_advantages": True,
    },
    "KL in the reward": {"kl_coef": 0.1, "kl_loss_type": "k3"},
    "KL in the reward, before the group's mean": {"kl_coef": 0.1, "kl_before_normalization": True},
    "returns with KL": {
        "advantage_estimator": "reinforce_plus_plus",
        "gamma": 0.9,
        "kl_coef": 0.1,
        "normalize_advantages": True,
    },
    "length penalties": {"overlong_buffer_len": 4, "length_penalty": "linear"},
    "not whitened, no std": {"advantage_estimator": "grpo", "disable_grpo_std_normalization": True},
}
NEEDED: Final[dict[str, Settings]] = {
    "reinforce_plus_plus": {"normalize_advantages": True, "gamma": 0.95},
    "reinforce_plus_plus_baseline": {"normalize_advantages": True},
    "gdpo": {
        "normalize_advantages": True,
        "gdpo_reward_keys": ["correct", "format"],
        "gdpo_reward_weights": [1.0, 0.5],
    },
}
PAIRS: Final[dict[str, Settings]] = {  # of pairs of responses, in one micro-batch each
    "pairs, DPO": {"loss_type": "dpo_loss", "dpo_beta": 0.4, "label_smoothing": 0.1, "num_steps_per_rollout": 2},
    "pairs, IPO": {"loss_type": "dpo_loss", "preference_loss": "ipo", "num_steps_per_rollout": 2},
    "pairs, reward model": {"loss_type": "rm_loss", "num_steps_per_rollout": 2},
}
KL_TYPES: Final = ("k1", "k2", "k3", "low_var_kl", "k3+")


def cases() -> dict[str, Settings]:
    """All settings to train with, by name."""
    found = _losses() | {f"estimator {name}": _estimator(name) for name in get_args(Estimator)}
    for mode in get_args(AggMode):
        found[f"reduction {mode}"] = {"loss_agg_mode": mode}
        if mode in APPLIES["count_masked_rollouts"].choices:
            found[f"reduction {mode}, masked not counted"] = {"loss_agg_mode": mode, "count_masked_rollouts": False}
    for name in KL_TYPES:
        found[f"KL {name}"] = {"kl_loss_coef": 0.1, "kl_loss_type": name}
        if name != "k3+":
            found[f"KL {name}, unbiased"] = found[f"KL {name}"] | {"use_unbiased_kl": True}
    return {name: BASE | settings for name, settings in (found | FURTHER).items()} | PAIRS


def _losses() -> dict[str, Settings]:
    """Every loss alone and with two corrections, and the first one with all of them."""
    found: dict[str, Settings] = {}
    for number, loss in enumerate(get_args(LossMode)):
        found[f"loss {loss}"] = {"loss_mode": loss, **_options(loss)}
        if loss not in APPLIES["use_tis"].choices:
            continue
        names = [name for name in CORRECTIONS if name != "current policy"]
        chosen = names if number == 0 else [names[number % len(names)], names[(number + 3) % len(names)]]
        chosen += ["current policy"] if loss == BYPASSED else []
        found |= {f"loss {loss}, {name}": found[f"loss {loss}"] | CORRECTIONS[name] for name in chosen}
    return found


def _options(loss: str) -> Settings:
    """Bounds that some tokens exceed. Probabilities are near 1 / 32."""
    eps = 0.01 if loss == "dppo_tv" else 1e-3 if loss == "dppo_kl" else 0.1
    bounds: Settings = {"eps_clip": eps, "eps_clip_high": 1.5 * eps, "eps_clip_c": 1.2}
    bounds |= {"dppo_mask_low": 0.005, "dppo_mask_high": 0.01, "ipo_threshold": 0.01, "behav_imp_weight_cap": 1.3}
    return {name: value for name, value in bounds.items() if loss in APPLIES[name].choices}


def _estimator(name: Estimator) -> Settings:
    """With the loss of PPO where the estimator does not name its own, and settings that it needs."""
    loss = {} if refusal(name, "ppo") else {"loss_mode": "ppo"}
    return {"advantage_estimator": name, **loss, **NEEDED.get(name, {})}


def algorithm(settings: Settings) -> AlgorithmConfig:
    """The table of a case."""
    return msgspec.convert(settings, AlgorithmConfig)
