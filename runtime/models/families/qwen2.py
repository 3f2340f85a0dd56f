"""Qwen2 and Qwen2.5: queries, keys and values with biases."""

from typing import ClassVar

from runtime.models.family import Family
from runtime.models.readers import LateWindowKeys, MlpKeys


class AttentionKeys(LateWindowKeys, frozen=True, kw_only=True):
    """Keys of the attention."""

    without_keys: ClassVar = {"qkv_bias": True, "output_bias": False}


FAMILY = Family(
    model_type="qwen2",
    title="Qwen2, Qwen2.5",
    architecture="Qwen2ForCausalLM",
    attention=AttentionKeys,
    mlp=MlpKeys,
    on_sglang="yes",
    ignored_by_sglang={"use_sliding_window": False},
    predicts_sums=True,
)
