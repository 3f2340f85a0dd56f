"""Qwen3: a norm of each head's query and key."""

from runtime.models.blocks import Attention
from runtime.models.family import Family
from runtime.models.readers import HeadKeys, MlpKeys
from runtime.models.rope import Rope


class AttentionKeys(HeadKeys, frozen=True, kw_only=True):
    """Keys of the attention."""

    head_dim: int | None = 128

    def block(self, rope: Rope) -> Attention:
        """Return the block of a layer."""
        return self.heads(rope, head_norms=True)


FAMILY = Family(
    model_type="qwen3",
    title="Qwen3",
    architecture="Qwen3ForCausalLM",
    attention=AttentionKeys,
    mlp=MlpKeys,
    without_effect=("sliding_window", "max_window_layers"),
    on_sglang="yes",
    predicts_sums=True,
)
