"""Every estimator, loss, correction, reduction and KL estimator, as settings of [algorithm].

They are taken from the declared choices, so that a new choice is trained in every layout without a change here.
"""

from typing import Any, Final, get_args

import msgspec

from runtime.settings.reading.config import type_of
from runtime.settings.rules.algorithm import allows
from runtime.settings.tables.algorithm import AlgorithmConfig, Kl, Reduction
from runtime.settings.tables.estimators import Estimator
from runtime.settings.tables.losses import Loss, LossTable
from tests.build.topology import joined

Settings = dict[str, Any]

BASE: Final[Settings] = {"entropy_coef": 0.05, "num_steps_per_rollout": 2, "estimator": {"type": "rloo"}}
CORRECTIONS: Final[dict[str, Settings]] = {
    "tokens, truncated": {"tis": {"type": "truncate", "upper_bound": 1.2}},
    "sequences, clipped": {"tis": {"type": "clip", "level": "sequence", "upper_bound": 1.5, "lower_bound": 0.6}},
    "sequences, masked, mean 1": {
        "tis": {"type": "mask", "level": "geometric", "lower_bound": 0.8, "upper_bound": 1.3, "batch_normalize": True}
    },
    "tokens rejected, veto": {"rs": {"type": "ratio", "lower_bound": 0.7, "upper_bound": 1.4, "veto_threshold": 0.5}},
    "sequences rejected": {"rs": {"type": "ratio", "level": "geometric", "lower_bound": 0.8, "upper_bound": 1.2}},
    "divergence": {"rs": {"type": "binary_kl", "level": "geometric", "upper_bound": 3e-3}},
    "OPSM": {"opsm_delta": 0.01},
    "current policy": {"bypass_mode": True, "tis": {"type": "clip", "level": "sequence", "upper_bound": 1.5}},
}
BYPASSED: Final = "gpg"  # reads no old log-probs
DISTILLED: Final = "distillation from likeliest tokens"  # reads log-probs of other tokens than the targets
FURTHER: Final[dict[str, Settings]] = {
    "likelihood of good samples": {"positive_example_nll_weight": 0.3},
    "mismatch metrics": {"get_mismatch_metrics": True},
    "engine's log-probs": {"use_rollout_logprobs": True},
    "on-policy distillation": {"normalize_advantages": True, "opd": {"type": "sglang"}},
    DISTILLED: {
        "opd": {
            "type": "sglang",
            "kl_coef": 0.5,
            "distillation": {"type": "mixed", "coef": 0.3, "zero_outside_topk": True},
        }
    },
    "critic, lambda by length": {
        "normalize_advantages": True,
        "estimator": {"type": "ppo", "critic_lambd": 0.7, "length_adaptive_alpha": 0.4},
    },
    "KL in the reward": {"kl": {"type": "k3", "reward_coef": 0.1}},
    "KL in the reward, before the group's mean": {
        "kl": {"type": "k1", "reward_coef": 0.1, "before_normalization": True}
    },
    "returns with KL": {
        "normalize_advantages": True,
        "estimator": {"type": "reinforce_plus_plus", "gamma": 0.9},
        "kl": {"type": "k1", "reward_coef": 0.1},
    },
    "length penalties": {"overlong_buffer_len": 4, "length_penalty": {"type": "linear"}},
    "not whitened, no std": {"estimator": {"type": "grpo", "normalize_std": False}},
}
NEEDED: Final[dict[str, Settings]] = {
    "reinforce_plus_plus": {"normalize_advantages": True, "estimator": {"gamma": 0.95}},
    "reinforce_plus_plus_baseline": {"normalize_advantages": True},
    "gdpo": {
        "normalize_advantages": True,
        "estimator": {"reward_keys": ["correct", "format"], "reward_weights": [1.0, 0.5]},
    },
}
PAIRS: Final[dict[str, Settings]] = {  # of pairs of responses, in one micro-batch each
    "pairs, DPO": {"num_steps_per_rollout": 2, "loss": {"type": "dpo", "beta": 0.4, "label_smoothing": 0.1}},
    "pairs, IPO": {"num_steps_per_rollout": 2, "loss": {"type": "preference_ipo"}},
    "pairs, reward model": {"num_steps_per_rollout": 2, "loss": {"type": "rm"}},
}


def cases() -> dict[str, Settings]:
    """All settings to train with, by name."""
    found = _losses() | {f"estimator {name}": _estimator(name) for name in types_of(Estimator)}
    for reduction in get_args(Reduction):
        if (mode := type_of(reduction)) == "custom":
            continue
        found[f"reduction {mode}"] = {"reduction": {"type": mode}}
        if "count_masked_rollouts" in reduction.__struct_fields__:
            masked = {"type": mode, "count_masked_rollouts": False}
            found[f"reduction {mode}, masked not counted"] = {"reduction": masked}
    for kl in get_args(Kl):
        name = type_of(kl)
        found[f"KL {name}"] = {"kl": {"type": name, "loss_coef": 0.1}}
        if "unbiased" in kl.__struct_fields__:
            found[f"KL {name}, unbiased"] = {"kl": {"type": name, "loss_coef": 0.1, "unbiased": True}}
    return {name: BASE | settings for name, settings in (found | FURTHER).items()} | PAIRS


def types_of(union: Any) -> list[str]:
    """The types of a table, but for a function of the user."""
    return [name for name in map(type_of, get_args(union)) if name != "custom"]


def _losses() -> dict[str, Settings]:
    """Every loss alone and with two corrections, and the first one with all of them."""
    found: dict[str, Settings] = {}
    losses = [table for table in get_args(Loss) if table.learns_from == "samples" and type_of(table) != "custom"]
    for number, table in enumerate(losses):
        loss = type_of(table)
        found[f"loss {loss}"] = {"loss": {"type": loss, **_options(table)}}
        if not allows(table, "tis"):
            continue
        names = [name for name in CORRECTIONS if name != "current policy"]
        chosen = names if number == 0 else [names[number % len(names)], names[(number + 3) % len(names)]]
        chosen += ["current policy"] if loss == BYPASSED else []
        found |= {f"loss {loss}, {name}": found[f"loss {loss}"] | CORRECTIONS[name] for name in chosen}
    return found


def _options(loss: type[LossTable]) -> Settings:
    """Bounds that some tokens exceed. Probabilities are near 1 / 32."""
    eps = {"dppo_tv": 0.01, "dppo_kl": 1e-3}.get(type_of(loss), 0.1)
    bounds: Settings = {"eps_clip": eps, "eps_clip_high": 1.5 * eps, "eps_clip_c": 1.2}
    bounds |= {"dppo_mask_low": 0.005, "dppo_mask_high": 0.01, "ipo_threshold": 0.01, "behav_imp_weight_cap": 1.3}
    return {name: value for name, value in bounds.items() if name in loss.__struct_fields__}


def _estimator(name: str) -> Settings:
    """With the settings that it needs."""
    return joined({"estimator": {"type": name}}, NEEDED.get(name, {}))


def algorithm(settings: Settings) -> AlgorithmConfig:
    """The table of a case."""
    return msgspec.convert(settings, AlgorithmConfig)
