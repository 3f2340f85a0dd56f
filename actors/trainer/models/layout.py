"""Which parallel layouts can hold a model. What is not built at all is refused before a start."""

from actors.trainer.models.config import HfConfig
from runtime.settings.topology import MegatronConfig
from runtime.wording import count_of


def check_layout(model: HfConfig, layout: MegatronConfig) -> None:
    """Refuse a parallel layout that cannot hold the model.

    Raises:
        ValueError: says which size, and what would fit.
    """
    tensor = layout.tensor_model_parallel_size
    divisible = {"num_key_value_heads": tensor, "vocab_size": tensor, "intermediate_size": tensor}
    for name, size in divisible.items():
        if getattr(model, name) % size:
            raise ValueError(f"{name} = {getattr(model, name)} of the model does not divide by {size} ranks")
    _check_stages(model.num_hidden_layers, layout)


def _check_stages(num_layers: int, layout: MegatronConfig) -> None:
    """As Megatron-core shares layers: what the first and last stage do not name is shared evenly among the others."""
    pipeline, virtual = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size or 1
    named = {
        name: size
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        if (size := getattr(layout, name)) is not None
    }
    for name, size in named.items():
        if pipeline == 1 or size % virtual:
            raise ValueError(f"{name} = {size}: is for several pipeline stages, and divides by their virtual stages")
    left, others = num_layers - sum(named.values()), pipeline - len(named)
    if left < others or (left % others if others else left) or (others and left // others % virtual):
        stages = f"{others} pipeline stages" + (f" of {virtual} virtual ones" if virtual > 1 else "")
        raise ValueError(
            f"num_hidden_layers = {num_layers} of the model: {count_of(left, 'layer')} cannot be shared by {stages}"
            + (f", {', '.join(named)} taken off" if named else "")
        )
