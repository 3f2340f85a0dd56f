"""GLM-4 without experts: a norm before and after each module, and half of each head rotated in neighbouring pairs."""

from typing import ClassVar

from runtime.models.blocks import Mlp, Norms
from runtime.models.family import Family
from runtime.models.readers import HeadKeys
from runtime.models.readers import MlpKeys as Mlps


class AttentionKeys(HeadKeys, frozen=True, kw_only=True):
    """Keys of the attention."""

    rope_share: ClassVar[float] = 0.5
    is_interleaved: ClassVar[bool] = True
    without_keys: ClassVar = {"output_bias": False}


class MlpKeys(Mlps, frozen=True, kw_only=True):
    """Keys of the MLPs."""

    def block(self, index: int) -> Mlp:
        """Return the block of a layer."""
        del index
        return Mlp(size=self.intermediate_size, is_stored_joined=True)


FAMILY = Family(
    model_type="glm4",
    title="GLM-4-0414, GLM-Z1",
    architecture="Glm4ForCausalLM",
    attention=AttentionKeys,
    mlp=MlpKeys,
    norms=Norms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
)
