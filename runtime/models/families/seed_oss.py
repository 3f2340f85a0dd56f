"""Seed-OSS: queries, keys and values with biases, and an output of attention that may have one."""

import msgspec

from runtime.models.blocks import Attention
from runtime.models.family import Family
from runtime.models.readers import BiasedMlpKeys, HeadKeys
from runtime.models.rope import Rope


class AttentionKeys(HeadKeys, frozen=True, kw_only=True):
    """Keys of the attention."""

    head_dim: int | None = 128
    attention_bias: bool = True
    attention_out_bias: bool = False

    def block(self, rope: Rope) -> Attention:
        """Return the block of a layer."""
        return msgspec.structs.replace(super().block(rope), output_bias=self.attention_out_bias)


FAMILY = Family(
    model_type="seed_oss",
    title="Seed-OSS",
    architecture="SeedOssForCausalLM",
    attention=AttentionKeys,
    mlp=BiasedMlpKeys,
    without_effect=("residual_dropout",),
)
