"""A tiny model's configuration, topologies that train it, and random batches for it."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np

from actors.trainer.data.batch import TrainBatch
from runtime.models.family import families

VOCAB = 32
TINY = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # ten times the usual: else a tiny model predicts all tokens alike
}

ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}, "rms_norm_eps": 1e-3}
SIGMOIDS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
}
OF_KIND: dict[str, dict[str, Any]] = {  # keys of each family, with values that differ from its defaults
    "qwen2": {"head_dim": None},  # no such key: the hidden size over the heads
    "glm4": {"attention_bias": True, "tie_word_embeddings": True, **ROPE},
    "qwen2_moe": {
        **{"head_dim": None, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, **ROPE},
        **{"norm_topk_prob": True, "shared_expert_intermediate_size": 12, "qkv_bias": False, "mlp_only_layers": [0]},
    },
    "mistral": {"sliding_window": 5, "num_key_value_heads": 4, "head_dim": 6, **ROPE},
    "glm4_moe_lite": {
        **LATENTS,
        **SIGMOIDS,
        **ROPE,
        **{"n_group": 2, "topk_group": 1, "mlp_layer_types": ["sparse", "dense"], "routed_scaling_factor": 2.5},
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "glm4_moe": {
        **SIGMOIDS,
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "deepseek_v3": {**LATENTS, **SIGMOIDS, "n_group": 2, "topk_group": 1},
}
INDEXERS: dict[str, Any] = {"index_topk": 4, "index_head_dim": 6, "index_n_heads": 24}
OF_KIND["glm_moe_dsa"] = {
    **{**LATENTS, **SIGMOIDS, **INDEXERS, **ROPE, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.8},
    **{"mlp_layer_types": ["sparse", "dense"], "indexer_types": ["full", "shared"]},
}
OF_KIND["gemma3_text"] = {
    **{"head_dim": 6, "query_pre_attn_scalar": 5, "sliding_window": 5, "rms_norm_eps": 1e-3, "initializer_range": 0.3},
    "layer_types": ["full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
    },
}
SIZED: dict[str, Any] = {
    **{"head_dim": 6, "global_head_dim": 12, "num_global_key_value_heads": 4, "attention_k_eq_v": True},
    **{"sliding_window": 5, "rms_norm_eps": 1e-3, "layer_types": ["sliding_attention", "full_attention"]},
    **{"hidden_size_per_layer_input": 0, "final_logit_softcapping": 4.0, "initializer_range": 0.3},
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
    },
}
OF_KIND["gemma4_text"] = {
    **{**SIZED, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
}
OF_KIND["gemma4_text, dense"] = SIZED
OF_KIND |= {
    "smollm3": {
        **{"head_dim": None, "no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 5, **ROPE},
    },
    "olmo2": {"head_dim": None, "tie_word_embeddings": True, **ROPE},
    "olmo3": {
        **{"head_dim": None, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
        **{"tie_word_embeddings": True, "rms_norm_eps": 1e-3, "initializer_range": 0.3},
        "rope_parameters": {
            "full_attention": {
                **{"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16},
                **{"beta_fast": 4.0, "beta_slow": 1.0, "attention_factor": 1.2},
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
        },
    },
    "seed_oss": {"head_dim": 6, "attention_bias": False, "tie_word_embeddings": True, **ROPE},
    "phi3": {"head_dim": None, "sliding_window": 5, "tie_word_embeddings": True, **ROPE},
    "exaone4": {
        **{"head_dim": 6, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"], **ROPE},
        "tie_word_embeddings": True,
    },
    "ministral3": {
        **{"head_dim": 6, "sliding_window": 5, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 4},
            **{"beta_fast": 2.0, "beta_slow": 0.1, "mscale": 0.7, "mscale_all_dim": 1.3, "llama_4_scaling_beta": 0.4},
        },
    },
    "ernie4_5": {"head_dim": 6, **ROPE},
    "ernie4_5_moe": {
        **{"head_dim": None, "moe_num_experts": 4, "moe_k": 3, "moe_intermediate_size": 24, **ROPE},
        **{"moe_num_shared_experts": 3, "moe_layer_start_index": 0, "moe_layer_end_index": 1},
        **{"moe_layer_interval": 2, "moe_norm_min": 0.9},
    },
    "dots1": {
        **{"head_dim": 6, "sliding_window": 5, "max_window_layers": 1, "norm_topk_prob": True, **SIGMOIDS, **ROPE},
        **{"n_group": 2, "topk_group": 1},
    },
}
OF_KIND["minimax_m2"] = {
    **{"head_dim": 6, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-3},
    "rope_parameters": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 2 / 3},
}
OF_KIND["gpt_oss"] = {
    "intermediate_size": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 6,
    "sliding_window": 5,
    "swiglu_alpha": 1.3,
    "swiglu_limit": 0.8,
    "rms_norm_eps": 1e-4,
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16},
        **{"beta_fast": 4.0, "beta_slow": 1.0, "truncate": False},
    },
}
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5},
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED: dict[str, Any] = {**EXPERTS, "shared_expert_intermediate_size": 12}
OF_KIND["qwen3_next"] = {**HYBRID, **SHARED, "norm_topk_prob": False, "mlp_only_layers": [0]}
OF_KIND["qwen3_5_text"] = {**HYBRID, "tie_word_embeddings": True}
OF_KIND["qwen3_5_moe_text"] = {**HYBRID, **SHARED}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
OF_KIND["deepseek_v32"] = {**LATENTS, **SIGMOIDS, **INDEXERS, "n_group": 2, "topk_group": 1, "rope_parameters": YARN}


def kinds() -> list[str]:
    """Tiny models of all families: the model types, and further forms of some, behind a comma."""
    return [*families(), *(kind for kind in OF_KIND if type_of(kind) in families() and "," in kind)]


def type_of(kind: str) -> str:
    """The model type of a tiny model."""
    return kind.partition(",")[0]


def config_of(kind: str, **changes: Any) -> dict[str, Any]:
    """A tiny model's config.json."""
    return TINY | {"model_type": type_of(kind)} | OF_KIND.get(kind, {}) | changes


REWARD_KEYS = ("right", "short")  # names of the rewards of a random batch


def random_batch(step: int = 0, *, num_groups: int = 4, group_size: int = 4, seed: int = 0) -> TrainBatch:
    """Samples of all lengths; some responses have tokens that do not train, some rollouts have two parts."""
    generator = np.random.default_rng(1000 * seed + step)
    groups, rollouts, parts, rewards, lengths = [], [], [], [], []
    columns: dict[str, list[Any]] = {"tokens": [], "mask": [], "log_probs": []}
    for rollout in range(num_groups * group_size):
        for part in range(2 if rollout % 5 == 0 else 1):
            prompt, response = generator.integers(1, 6), generator.integers(1, 9)
            mask = np.concatenate([np.zeros(prompt), generator.random(response) < 0.8])
            groups.append(rollout // group_size)
            rollouts.append(rollout)
            parts.append(part)
            rewards.append(float(generator.integers(0, 3)))
            lengths.append(prompt + response)
            columns["tokens"].append(generator.integers(0, VOCAB, prompt + response))
            columns["mask"].append(mask)
            columns["log_probs"].append(-generator.random(prompt + response) * 5 * mask)
    mask_N = np.concatenate(columns["mask"]).astype(np.uint8)
    later = np.random.default_rng(2000 * seed + step)  # apart, so that the columns above stay as they are
    given, taken = later.integers(1, 3, len(groups)), later.integers(1, 9, len(groups))
    return TrainBatch(
        step=step,
        groups_B=np.array(groups, dtype=np.int64),
        rollouts_B=np.array(rollouts, dtype=np.int64),
        indices_B=np.array(rollouts, dtype=np.int64) % group_size,
        parts_B=np.array(parts, dtype=np.int64),
        rewards_B=np.array(rewards),
        raw_rewards_B=np.array(rewards),
        truncated_B=np.zeros(len(groups), dtype=np.uint8),
        left_out_B=np.zeros(len(groups), dtype=np.uint8),
        lengths_B=np.array(lengths, dtype=np.int64),
        tokens_N=np.concatenate(columns["tokens"]).astype(np.int32),
        loss_mask_N=mask_N,
        rollout_log_probs_N=np.concatenate(columns["log_probs"]).astype(np.float32),
        staleness_N=np.where(mask_N, 0, -1).astype(np.int32),
        named_rewards_B=later.integers(0, 3, (len(groups), len(REWARD_KEYS))) / 2,
        baseline_rewards_B=later.integers(0, 3, num_groups)[groups].astype(np.float64),
        baseline_lens_B=later.integers(1, 9, num_groups)[groups],
        response_lens_B=taken,
        output_lens_B=taken,
        input_lens_B=given,
        num_turns_B=given,
    )


def with_prompts(batch: TrainBatch, *, longest: int = 6) -> TrainBatch:
    """The batch with one prompt for the samples of each group: they have as many tokens before their first trained."""
    draw = np.random.default_rng(batch.step + 50)
    columns: dict[str, list[Any]] = {"tokens_N": [], "loss_mask_N": [], "rollout_log_probs_N": [], "staleness_N": []}
    prompts = {group: draw.integers(0, VOCAB, draw.integers(1, longest)) for group in batch.groups_B.tolist()}
    lengths: list[int] = []
    for sample, start in enumerate(batch.starts_B.tolist()):
        own = slice(start, start + int(batch.lengths_B[sample]))
        first = int(np.argmax(batch.loss_mask_N[own])) if batch.loss_mask_N[own].any() else own.stop - own.start - 1
        prompt = prompts[int(batch.groups_B[sample])]
        lengths.append(len(prompt) + own.stop - start - first)
        for name, column in columns.items():
            before = prompt if name == "tokens_N" else np.full(len(prompt), -1 if name == "staleness_N" else 0)
            column.append(np.concatenate([before, getattr(batch, name)[own][first:]]))
    joined = {name: np.concatenate(column).astype(getattr(batch, name).dtype) for name, column in columns.items()}
    return replace(batch, lengths_B=np.array(lengths), **joined)


def pairs(step: int, num_pairs: int = 8) -> TrainBatch:
    """Preference pairs of random samples: a rollout with two parts, rewards 1 and 0."""
    batch = random_batch(step, num_groups=num_pairs, group_size=2)
    kept_B = batch.parts_B == 0
    kept_N = np.repeat(kept_B, batch.lengths_B)
    columns = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name[-2:] in ("_B", "_N")}
    own: dict[str, Any] = {
        name: values[kept_B if name.endswith("_B") else kept_N]
        for name, values in columns.items()
        if values is not None
    }
    own |= {"rollouts_B": own["groups_B"], "parts_B": own["indices_B"], "rewards_B": 1.0 - own["indices_B"]}
    return replace(batch, **own)


def groups_of(batch: TrainBatch) -> Iterator[tuple[int, TrainBatch]]:
    """Each group, and it as a batch of its own."""
    for group in dict.fromkeys(batch.groups_B.tolist()):
        member_B = batch.groups_B == group
        member_N = np.repeat(member_B, batch.lengths_B)
        columns = {field.name: getattr(batch, field.name) for field in fields(batch)}
        own = {
            name: values[member_B if name.endswith("_B") else member_N]
            for name, values in columns.items()
            if name != "step" and values is not None
        }
        yield group, TrainBatch(step=batch.step, **own)


def with_topk(batch: TrainBatch, width: int = 5) -> TrainBatch:
    """Add a teacher's likeliest tokens at each place, with log-probs from a random spread over the vocabulary."""
    draw = np.random.default_rng(100 + batch.step)
    logits = draw.normal(0, 2, (len(batch.tokens_N), VOCAB))
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    ids = np.argsort(-log_probs, axis=1)[:, :width]
    found = np.take_along_axis(log_probs, ids, axis=1)
    return replace(batch, teacher_topk_ids_N=ids.astype(np.int32), teacher_topk_log_probs_N=found.astype(np.float32))
