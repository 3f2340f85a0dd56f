"""Which parallel layouts can hold a model. What is not built at all is refused before a start."""

from actors.trainer.models.config import HfConfig
from runtime.settings.topology import MegatronConfig


def check_layout(model: HfConfig, layout: MegatronConfig) -> None:
    """Refuse a parallel layout that cannot hold the model.

    Raises:
        ValueError: says which size, and what would fit.
    """
    tensor, pipeline = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    divisible = {"num_key_value_heads": tensor, "vocab_size": tensor, "intermediate_size": tensor}
    divisible["num_hidden_layers"] = pipeline
    for name, size in divisible.items():
        if getattr(model, name) % size:
            raise ValueError(f"{name} = {getattr(model, name)} of the model does not divide by {size} ranks")
