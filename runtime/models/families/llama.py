"""Llama 2 and 3, and models of others with its architecture, such as SmolLM2."""

from runtime.models.family import Family
from runtime.models.readers import BiasedMlpKeys, HeadKeys

FAMILY = Family(
    model_type="llama",
    title="Llama, SmolLM2",
    architecture="LlamaForCausalLM",
    attention=HeadKeys,
    mlp=BiasedMlpKeys,
    predicts_sums=True,
)
