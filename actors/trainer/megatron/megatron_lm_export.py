"""Writes a model's weights as Megatron-LM's programs save them: format torch_dist, names of its GPT model, arguments.

The directory is a release: Megatron-LM starts from it at iteration 0, without a state of optimizer or random numbers.
The names are those of TransformerEngine's layers, Megatron-LM's default. It reads layers with experts one by one.
"""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from actors.trainer.checkpoints import RELEASE, TRACKER
from actors.trainer.megatron.imports import dist_checkpointing, quiet
from actors.trainer.megatron.megatron_lm import ALIKE
from actors.trainer.megatron.saving import SaveInProcess
from actors.trainer.models.config import HfConfig
from runtime.models.blocks import Attention, Experts, Layer, Mla, Mlp, Norms
from runtime.models.rope import Rope, Yarn

CONTENT: Final = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
SAME: Final = (  # arguments of Megatron-LM that are named as fields of TransformerConfig
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("normalization", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "rotary_interleaved"),
    *("attention_dropout", "hidden_dropout", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("moe_layer_freq", "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax"),
    *("moe_router_topk_scaling_factor", "moe_router_enable_expert_bias", "moe_router_num_groups"),
    *("moe_router_group_topk", "moe_router_dtype"),
)
SAME_OF_MLA: Final = (
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type"),
    *("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale"),
    "mscale_all_dim",
)
HAS: Final[dict[type[Any], tuple[str, ...]]] = {  # fields of blocks that Megatron-LM's GPT model has, with any value
    Attention: ("heads", "kv_heads", "head_dim", "rope", "qkv_bias", "head_norms", "is_stored_joined"),
    Mla: ("heads", "query_rank", "key_value_rank", "plain_dim", "rotated_dim", "value_dim", "rope"),
    Mlp: ("size", "is_stored_joined"),
    Experts: (
        *("num_experts", "num_experts_per_tok", "size", "score", "has_bias", "norm_topk_prob", "routed_scaling_factor"),
        *("shared_size", "num_groups", "num_groups_per_tok", "router", "is_stacked"),
    ),
    Norms: ("before_attention", "before_mlp"),
    Rope: ("theta", "share", "factor", "is_interleaved"),
    Yarn: (*("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),),
}


def problems(model: HfConfig) -> Iterator[str]:
    """Yield the parts of a model that Megatron-LM's GPT model does not have, or that are not implemented yet here."""
    for layer in dict.fromkeys(model.layers):
        yield from _of_layer(layer)
    if len(model.ropes) > 1:
        yield "several rotary embeddings"
    if model.embedding_scale != 1:
        yield "embedding_scale"
    if model.has_centred_norms:
        yield "has_centred_norms"
    if model.num_mtp_layers:
        yield "MTP layers"
    if model.has_value_head:
        yield "a value head"


def _of_layer(layer: Layer) -> Iterator[str]:
    rope, yarn = layer.attention.rope, list[Yarn]()
    if isinstance(layer.attention, Mla) and rope is not None and rope.yarn is not None:  # of MLA alone
        rope, yarn = msgspec.structs.replace(rope, yarn=None), [rope.yarn]
    for block in (layer.attention, layer.mlp, layer.norms, rope, *yarn):
        kind: type[Any] = type(block)
        if kind not in HAS:
            yield "attention without positions" if block is None else kind.__name__
            continue
        for field in msgspec.structs.fields(kind):
            if field.name not in HAS[kind] and getattr(block, field.name) != field.default:
                yield f"{kind.__name__}.{field.name}"


def write_for_megatron_lm(chunk: Any, model: HfConfig, directory: Path) -> None:
    """Write the weights of a single rank's model.

    Args:
        chunk: its GPTModel.
        model: configuration of the model.
        directory: existing directory.

    Raises:
        ValueError: Megatron-LM's GPT model does not have a part of the model. The text names it.
    """
    if found := [*dict.fromkeys(problems(model))]:
        raise ValueError(f"{model.model_type} has no form of Megatron-LM's GPT model: {', '.join(found)}")
    path = directory / RELEASE
    path.mkdir()
    state: dict[str, Any] = chunk.sharded_state_dict()
    for name, leaf in state.items():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            leaf.key = _key(leaf.key, model.layers[int(parts[2])])
    common = {"args": arguments(chunk.config, model), "checkpoint_version": 3.0, "iteration": 0}
    common |= {"num_floating_point_operations_so_far": 0}
    with quiet():
        writer = SaveInProcess(FileSystemWriter(path))
        dist_checkpointing.save({**common, "model": state}, str(path), writer, content_metadata=CONTENT)
    (directory / TRACKER).write_text(RELEASE)


def _key(key: str, layer: Layer) -> str:
    """Return the name of a layer's tensor in TransformerEngine's layers, where some norms are part of a projection."""
    is_mla = isinstance(layer.attention, Mla)
    for engine, local in ALIKE.items():
        is_fused = not isinstance(layer.mlp, Experts) if engine.startswith("mlp.") else is_mla == ("_up_" in engine)
        key = key.replace(local, engine) if is_fused else key.replace(engine, local)
    return key


def arguments(config: Any, model: HfConfig) -> Namespace:
    """Return the arguments of Megatron-LM that describe the model, for its --use-checkpoint-args."""
    ((rope, _),) = model.ropes
    own: dict[str, Any] = {
        "num_experts": config.num_moe_experts,
        "norm_epsilon": config.layernorm_epsilon,
        "group_query_attention": config.num_query_groups != config.num_attention_heads,
        "seq_length": model.max_position_embeddings,
        "max_position_embeddings": model.max_position_embeddings,
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "add_position_embedding": True,
        "rotary_base": rope.theta,
        "rotary_percent": rope.share,
        "use_rope_scaling": rope.factor != 1,
        "rope_scaling_factor": rope.factor,
        "swiglu": True,
        "squared_relu": False,
        "untie_embeddings_and_output_weights": not model.tie_word_embeddings,
        "apply_layernorm_1p": False,
        "apply_query_key_layer_scaling": False,
        "multi_latent_attention": model.mla is not None,
        "transformer_impl": "transformer_engine",
        "bf16": config.bf16,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": model.vocab_size,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "ckpt_format": "torch_dist",
        "use_dist_ckpt": True,
        "no_save_optim": True,
        "no_save_rng": True,
        "iteration": 0,
    }
    same = SAME if model.mla is None else (*SAME, *SAME_OF_MLA)
    return Namespace(**{name: getattr(config, name) for name in same}, **own)
