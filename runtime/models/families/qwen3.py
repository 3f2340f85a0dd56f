"""Qwen3: a norm of each head's query and key."""

from typing import ClassVar

from runtime.models.family import Family
from runtime.models.readers import LateWindowKeys, MlpKeys


class AttentionKeys(LateWindowKeys, frozen=True, kw_only=True):
    """Keys of the attention."""

    without_keys: ClassVar = {"head_norms": True}
    head_dim: int | None = 128


FAMILY = Family(
    model_type="qwen3",
    title="Qwen3",
    architecture="Qwen3ForCausalLM",
    attention=AttentionKeys,
    mlp=MlpKeys,
    on_sglang="yes",
    ignored_by_sglang={"use_sliding_window": False},
    predicts_sums=True,
)
