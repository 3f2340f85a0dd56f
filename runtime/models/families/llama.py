"""Llama 2 and 3, and models of others with its architecture, such as SmolLM2."""

from runtime.models.blocks import Mlp
from runtime.models.family import Family
from runtime.models.readers import HeadKeys, MlpKeys


class BiasedMlpKeys(MlpKeys, frozen=True, kw_only=True):
    """Keys of the MLPs."""

    mlp_bias: bool = False

    def block(self, index: int) -> Mlp:
        """Return the block of a layer."""
        del index
        return Mlp(size=self.intermediate_size, bias=self.mlp_bias)


FAMILY = Family(
    model_type="llama",
    title="Llama, SmolLM2",
    architecture="LlamaForCausalLM",
    attention=HeadKeys,
    mlp=BiasedMlpKeys,
    predicts_sums=True,
)
