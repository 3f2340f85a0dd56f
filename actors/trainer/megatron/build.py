"""Builds Megatron's GPTModel from a Hugging Face config, with our attention, head and sequence-parallel norms."""

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import structlog
import torch
from torch import Tensor, nn

from actors.bfloat16 import multiply_in_float32
from actors.trainer.megatron import cpu
from actors.trainer.megatron.imports import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    Float16Module,
    IdentityOp,
    ModuleSpec,
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
    get_transformer_layer_offset,
    parallel_state,
)
from actors.trainer.megatron.layers.attention import CoreAttention, MlaAttention
from actors.trainer.megatron.layers.delta_net import GatedAttention, GatedDeltaNet
from actors.trainer.megatron.layers.experts import GroupedExperts, NormedExperts
from actors.trainer.megatron.layers.fused import rms_norm
from actors.trainer.megatron.layers.head import Embedding, Model, MtpLayer, ValueHead
from actors.trainer.megatron.layers.heads import HeadAttention, JointNorm, Rotary
from actors.trainer.megatron.layers.router import BiasedRouter, Router, ScaledRouter
from actors.trainer.megatron.layers.sparse import SparseAttention
from actors.trainer.models.config import HfConfig
from runtime.models.blocks import Attention, DeltaNet, Experts, Layer
from runtime.models.rope import Rope
from runtime.settings.tables.trainer import TrainerConfig

log = structlog.get_logger()


class RmsNorm(nn.RMSNorm):
    """Torch's RMSNorm with Megatron's mark that its gradient is partial under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_options: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        self._eps = eps
        self._is_centred: bool = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self._eps, is_centred=self._is_centred)


class MlaNorm(RmsNorm):
    """RMSNorm of MLA latents. Transformers does not take its epsilon from config.json."""

    def __init__(self, config: Any, hidden_size: int, **_options: Any) -> None:
        super().__init__(config, hidden_size, 1e-6)


class AddNormed(RmsNorm):
    """RMSNorm of what a module adds to the residual, in the place of Megatron's bias, dropout and add."""

    def __init__(self, config: Any, hidden_size: int, eps: float, *, has_scale: bool) -> None:
        super().__init__(config, hidden_size, eps)
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False) if has_scale else None  # of the sum

    def forward(self, *_options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - Megatron calls it so
        """Return the function that adds an output, normalized, to the residual."""
        return self._added

    def _added(self, output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, _dropout: float) -> Tensor:
        output, bias = output_and_bias
        added = residual + super().forward(output if bias is None else output + bias)
        return added if self.scale is None else added * self.scale


def build_chunks(model: HfConfig, config: Any) -> list[Any]:
    """Build this rank's model chunks, without weights: one chunk, or the virtual pipeline stages in order.

    Args:
        model: Config of the model.
        config: Its TransformerConfig.

    Returns:
        Megatron GPTModels in config.params_dtype, on the CPU or, with CUDA, on the current device.
    """
    if config.params_dtype is torch.bfloat16 and cpu.needed():
        multiply_in_float32()
    num_virtual = config.virtual_pipeline_model_parallel_size
    return [_build(model, config, stage) for stage in (range(num_virtual) if num_virtual else (None,))]


def _build(model: HfConfig, config: Any, virtual_stage: int | None) -> Any:
    where = {"ignore_virtual": False, "vp_stage": virtual_stage}
    layers, ropes = _layer_spec(model, config, virtual_stage), model.ropes
    rope = ropes[0][0] if ropes else Rope()
    built = Model(
        config=config,
        transformer_layer_spec=layers,
        mtp_block_spec=_mtp_layer_spec(config, layers, virtual_stage),
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=model.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=rope.theta,
        rotary_percent=rope.share,
        parallel_output=True,
        vp_stage=virtual_stage,
    )
    if model.has_value_head and built.post_process:
        built.output_layer = ValueHead(config, bias=model.has_value_bias)
    built.shares_choices = model.has_indexers
    if built.post_process:
        built.output_layer.cap = model.logit_cap
    if model.mla is None:
        _set_frequencies(built.rotary_pos_emb, ropes)
    if built.pre_process:
        built.embedding.word_embeddings.scale = model.embedding_scale
    built.to(torch.cuda.current_device(), config.params_dtype)  # Megatron makes a gate of experts on the CPU
    for _, bias in expert_biases(built):
        bias.data = bias.data.float()  # Megatron keeps them in float32
    if reasons := {module.one_by_one for module in built.modules() if isinstance(module, GroupedExperts)} - {None}:
        log.info("experts_one_by_one", reason=reasons.pop())
    return built


def expert_biases(built: Any) -> list[tuple[str, Tensor]]:
    """Return the expert biases of the routers by Megatron's names. No gradient updates them."""
    return [(name, buffer) for name, buffer in built.named_buffers() if name.endswith("router.expert_bias")]


def _set_frequencies(embedding: Any, ropes: Sequence[tuple[Rope, int]]) -> None:
    """Set scaled frequencies, or several sets of them. Megatron's own options fix some of their parameters."""
    frequencies = [_frequencies(rope, int(size * rope.share) // 2) for rope, size in ropes]
    if len(ropes) > 1:
        embedding.__class__ = Rotary
        embedding.sets = [own.to(embedding.inv_freq.device) for own in frequencies]
    elif ropes and ropes[0][0].is_stretched:
        embedding.inv_freq = frequencies[0].to(embedding.inv_freq.device)


def _frequencies(rope: Rope, number: int) -> Tensor:
    """Return the frequencies of the rotated planes of a head."""
    exponents = torch.arange(number, dtype=torch.float32) / number
    return torch.tensor(rope.stretched((1.0 / rope.theta**exponents).tolist()))


def _layer_spec(model: HfConfig, config: Any, virtual_stage: int | None) -> Any:
    """Build Megatron's local layer spec with our attention and norms. Specs are Megatron's extension point."""
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=virtual_stage
    )
    first = get_transformer_layer_offset(config, vp_stage=virtual_stage)
    block.layer_specs = [deepcopy(spec) for spec in block.layer_specs]  # Megatron's equal layers are one object
    for index, (spec, of_model) in enumerate(zip(block.layer_specs, model.layers[first:], strict=False), first):
        layer = spec.submodules
        attention = layer.self_attention.submodules
        _set_norms(layer, of_model, config)
        if isinstance(of_model.attention, DeltaNet):
            layer.self_attention = ModuleSpec(GatedDeltaNet, params={"block": of_model.attention})
        elif isinstance(of_model.attention, Attention) and of_model.attention.has_gate:
            layer.self_attention.module = GatedAttention
        values: dict[str, Any] = _core_values(of_model.attention) if isinstance(of_model.attention, Attention) else {}
        if (source := model.source_of(index)) is not None:
            layer.self_attention.params |= {"block": of_model.attention, "source": source}
            values = {"source": source}
        attention.core_attention = ModuleSpec(CoreAttention, params=values)
        if isinstance(of_model.attention, Attention) and _is_special(of_model.attention, model):
            layer.self_attention.module = HeadAttention
            layer.self_attention.params |= {
                "block": of_model.attention,
                "rope": _place(of_model.attention, model.ropes),
            }
        if isinstance(of_model.mlp, Experts):
            _set_experts(layer, of_model.mlp)
        if config.multi_latent_attention:
            layer.self_attention.module = MlaAttention if source is None else SparseAttention
            attention.q_layernorm = attention.kv_layernorm = MlaNorm
        elif config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RmsNorm
        elif isinstance(of_model.attention, Attention) and of_model.attention.joint_norms:
            heads, kv_heads = of_model.attention.heads, of_model.attention.kv_heads
            attention.q_layernorm = ModuleSpec(JointNorm, params={"heads": heads})
            attention.k_layernorm = ModuleSpec(JointNorm, params={"heads": kv_heads})
    block.layer_norm = RmsNorm
    return block


def _is_special(attention: Attention, model: HfConfig) -> bool:
    """Whether a layer's attention differs from that of other layers, or has what Megatron's has not."""
    has_other_rope = ((attention.rope, attention.head_dim),) != model.ropes
    return has_other_rope or not model.has_equal_heads or attention.has_value_norms or attention.has_one_projection


def _place(attention: Attention, ropes: Sequence[tuple[Rope, int]]) -> int | None:
    """Return the place of a layer's rotary embedding among those of all layers. None: the layer has none."""
    return None if attention.rope is None else ropes.index((attention.rope, attention.head_dim))


def _set_experts(layer: Any, block: Experts) -> None:
    """Set router and experts of a layer's spec."""
    parts = layer.mlp.submodules
    parts.router = ScaledRouter if block.has_norms else Router
    if block.min_sum is not None:
        parts.router = partial(BiasedRouter, min_sum=block.min_sum)
    parts.experts.module = GroupedExperts
    if block.has_norms:  # of a ModuleSpec with another class than its own, Megatron warns
        layer.mlp = SimpleNamespace(module=NormedExperts, submodules=parts, params={"norm": RmsNorm})


def _set_norms(layer: Any, of_model: Layer, config: Any) -> None:
    """Set the norms around the attention and the MLP of a layer's spec."""
    norms = of_model.norms
    layer.input_layernorm = RmsNorm if norms.before_attention else IdentityOp
    layer.pre_mlp_layernorm = RmsNorm if norms.before_mlp else IdentityOp
    options = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
    if norms.after_attention:
        layer.self_attn_bda = ModuleSpec(module=AddNormed, params={**options, "has_scale": False})
    if norms.after_mlp:
        layer.mlp_bda = ModuleSpec(module=AddNormed, params={**options, "has_scale": of_model.has_scale})


def _core_values(attention: Attention) -> dict[str, Any]:
    """Return the values that Megatron does not pass to the attention of a layer.

    Queries and keys are rotated as a whole, so that a factor of both is one of their products.
    """
    amplitude = 1.0 if attention.rope is None else attention.rope.amplitude
    scale, growth = attention.scale, None if attention.rope is None else attention.rope.growth
    if amplitude != 1.0:
        scale = (attention.head_dim**-0.5 if scale is None else scale) * amplitude**2
    return {"window": attention.window, "has_sinks": attention.has_sinks, "scale": scale, "growth": growth}


def _mtp_layer_spec(config: Any, layers: Any, virtual_stage: int | None) -> Any:
    """Build the spec of the MTP layer, whose inner layer is like the last of `layers`. None: there is no MTP layer."""
    if not config.mtp_num_layers:
        return None
    block = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False, vp_stage=virtual_stage)
    for spec in () if block is None else block.layer_specs:  # None except on the last pipeline stage
        spec.module = MtpLayer
        spec.submodules.enorm = spec.submodules.hnorm = spec.submodules.layer_norm = RmsNorm
    return block


def with_gradients(chunk: Any, config: Any, trainer: TrainerConfig) -> Any:
    """Wrap a model chunk in Megatron's DDP, which holds the gradients and sums them over replicas."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=trainer.optimizer.use_distributed_optimizer,
        **msgspec.structs.asdict(trainer.ddp),
    )
    inner = Float16Module(config, chunk) if config.params_dtype is torch.bfloat16 else chunk
    wrapped = DistributedDataParallel(config, ddp, inner)
    for module in chunk.modules():
        if isinstance(module, Embedding):
            module.adds_rows = not trainer.ddp.overlap_grad_reduce
    alone = (
        parallel_state.get_data_parallel_world_size(with_context_parallel=True) == 1
        and parallel_state.get_expert_data_parallel_group().size() == 1
    )
    if alone and not trainer.ddp.overlap_grad_reduce:
        wrapped.finish_grad_sync = nothing  # Megatron would reduce over a group of one rank, too, and wait for it
    return wrapped


def nothing(*_args: Any, **_options: Any) -> None:
    """Do nothing, in place of a call that is not needed here."""
