"""Qwen3-MoE: a norm of each head's query and key, and experts of a softmax router in some layers."""

from typing import ClassVar

from runtime.models.expert_readers import SoftmaxExpertKeys
from runtime.models.family import Family
from runtime.models.readers import SwitchedWindowKeys


class AttentionKeys(SwitchedWindowKeys, frozen=True, kw_only=True):
    """Keys of the attention."""

    without_keys: ClassVar = {"head_norms": True}
    layer_kinds: ClassVar = ("full_attention",)


FAMILY = Family(
    model_type="qwen3_moe",
    title="Qwen3-MoE",
    architecture="Qwen3MoeForCausalLM",
    attention=AttentionKeys,
    mlp=SoftmaxExpertKeys,
    on_sglang="yes",
    ignored_by_sglang={"mlp_only_layers": [], "decoder_sparse_step": 1, "use_sliding_window": False},
    predicts_sums=True,
)
