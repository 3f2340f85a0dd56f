"""Qwen3-Next: a gated delta net in three of four layers, gated attention, and experts with a gated shared one."""

from typing import ClassVar

from runtime.models.expert_readers import SharedExpertKeys
from runtime.models.family import Family
from runtime.models.hybrid_readers import HybridKeys
from runtime.models.readers import DecoderKeys


class ModelKeys(DecoderKeys, frozen=True, kw_only=True):
    """Keys that belong to no block."""

    has_centred_norms: ClassVar[bool] = True


class AttentionKeys(HybridKeys, frozen=True, kw_only=True):
    """Keys of the attention."""

    is_fused: ClassVar[bool] = True
    head_dim: int | None = 256


FAMILY = Family(
    model_type="qwen3_next",
    title="Qwen3-Next",
    architecture="Qwen3NextForCausalLM",
    decoder=ModelKeys,
    attention=AttentionKeys,
    mlp=SharedExpertKeys,
    names={"mlp.shared_experts": "mlp.shared_expert"},
    copied=("mtp",),
)
