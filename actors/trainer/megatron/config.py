"""Megatron's configs: the TransformerConfig for a Hugging Face config, and the OptimizerConfig."""

import math
from functools import partial
from typing import Any

import msgspec
import torch
import torch.nn.functional as F

from actors.trainer.megatron.imports import MLATransformerConfig, OptimizerConfig, TransformerConfig
from actors.trainer.models.config import HfConfig
from actors.trainer.models.layout import check_layout
from runtime.models.blocks import Attention, DeltaNet, Experts, Mla
from runtime.settings.tables.trainer import MegatronConfig
from runtime.settings.topology import Topology

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(model: HfConfig, layout: MegatronConfig, *, dtype: torch.dtype) -> Any:
    """Build Megatron's TransformerConfig of a model.

    Raises:
        ValueError: The layout does not fit the model, or is not implemented yet.
    """
    check_layout(model, layout)
    pipeline = layout.pipeline_model_parallel_size
    attention = model.attention
    config_type = MLATransformerConfig if isinstance(attention, Mla) else TransformerConfig
    config: Any = config_type(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.intermediate_size,
        num_attention_heads=attention.heads,
        num_query_groups=attention.kv_heads,
        kv_channels=attention.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        layernorm_zero_centered_gamma=model.has_centred_norms,
        gated_linear_unit=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        **_named(layout),
        **_linear(model),
        hetereogenous_dist_checkpoint=not model.has_equal_heads,  # a checkpoint has the tensors of each layer apart
        **_experts(model),
        **_activation(model),
        **(_mla(attention) if isinstance(attention, Mla) else _heads(attention)),
        calculate_per_token_loss=True,  # the loss function returns a sum and its divisor, for both reductions
        variable_seq_lengths=pipeline > 1,  # micro-batches differ in length
        # no first values: the weights are read. On the CPU Megatron-core's way would draw a whole matrix on each rank
        use_cpu_initialization=False,
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        batch_p2p_comm=False,
        cuda_graph_scope=[],
    )
    if model.experts is not None:  # set afterwards: Megatron's check refuses biases of softmax scores
        config.moe_router_enable_expert_bias = model.experts.has_bias
    return config


def _leave(_weight: Any) -> None:
    """Leave a new weight as its memory is."""


def _linear(model: HfConfig) -> dict[str, Any]:
    """Say which layers are linear, so that a checkpoint has the tensors of each layer by themselves."""
    kinds = [int(isinstance(layer.attention, DeltaNet)) for layer in model.layers]
    return {"linear_attention_freq": kinds} if any(kinds) else {}


def _heads(attention: Attention) -> dict[str, Any]:
    return {
        "add_qkv_bias": attention.qkv_bias,
        "qk_layernorm": attention.head_norms,
        "attention_output_gate": attention.has_gate,
        "rotary_interleaved": attention.rope is not None and attention.rope.is_interleaved,
    }


def _activation(model: HfConfig) -> dict[str, Any]:
    clamped = None if model.experts is None else model.experts.clamped
    if clamped is None and model.activation == "silu":
        return {"add_bias_linear": False, "activation_func": F.silu, "bias_activation_fusion": True}  # layers/fused.py
    if clamped is None:
        geglu = partial(F.gelu, approximate="tanh")
        return {"add_bias_linear": False, "activation_func": geglu, "bias_activation_fusion": False}
    return {
        "add_bias_linear": True,
        "activation_func": partial(_sigmoid_unit, gain=clamped.gain),
        "activation_func_clamp_value": clamped.limit,
        "glu_linear_offset": 1.0,
        "bias_activation_fusion": False,
    }


def _sigmoid_unit(gate: torch.Tensor, *, gain: float) -> torch.Tensor:
    return gate * torch.sigmoid(gate * gain)


def _experts(model: HfConfig) -> dict[str, Any]:
    experts = model.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.num_experts,
        "moe_layer_freq": [int(isinstance(layer.mlp, Experts)) for layer in model.layers],
        "moe_ffn_hidden_size": experts.size,
        "moe_shared_expert_intermediate_size": experts.shared_size or None,
        "moe_shared_expert_gate": experts.has_shared_gate,
        "moe_router_topk": experts.num_experts_per_tok,
        "moe_router_score_function": experts.score,
        # a softmax over the top k alone sums to one
        "moe_router_pre_softmax": experts.min_sum is not None or not experts.norm_topk_prob,
        "moe_router_topk_scaling_factor": experts.routed_scaling_factor,
        "moe_router_dtype": "fp32",
        "moe_router_num_groups": experts.num_groups,
        "moe_router_group_topk": experts.num_groups_per_tok,
    }


def _mla(mla: Mla) -> dict[str, Any]:
    """Settings of MLA. Megatron applies its rotary embedding in each layer."""
    rope = mla.rope
    named: dict[str, Any] = {
        "q_lora_rank": mla.query_rank,
        "kv_lora_rank": mla.key_value_rank,
        "qk_head_dim": mla.plain_dim,
        "qk_pos_emb_head_dim": mla.rotated_dim,
        "v_head_dim": mla.value_dim,
        "rotary_base": rope.theta,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
    }
    if rope.yarn is None:
        return named
    stretched = msgspec.structs.asdict(rope.yarn)
    for of_heads in ("is_truncated", "attention_factor"):
        del stretched[of_heads]
    return named | {"rope_type": "yarn", "rotary_scaling_factor": stretched.pop("factor"), **stretched}


def _named(layout: MegatronConfig) -> dict[str, Any]:
    """Settings with the same name in Megatron, as its arguments."""
    named = msgspec.structs.asdict(layout)
    if named["virtual_pipeline_model_parallel_size"] == 1:  # Megatron's interleaved schedule needs at least two
        named["virtual_pipeline_model_parallel_size"] = None
    if layout.recompute_modules is not None:
        named["recompute_modules"] = list(layout.recompute_modules)
    return named


def optimizer_config(topology: Topology, dtype: torch.dtype) -> Any:
    """Build Megatron's OptimizerConfig from the recipe and the topology."""
    config, megatron = topology.optimizer, topology.trainer
    named = msgspec.structs.asdict(megatron.optimizer)
    # Megatron's own offload needs GPUs and moves the gradients, too; `Replica.rest` moves the state instead.
    del named["optimizer_cpu_offload"]
    return OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad or math.inf,  # with 0 Megatron would not compute the norm
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        overlap_param_gather=megatron.ddp.overlap_param_gather,
        **named,
    )
