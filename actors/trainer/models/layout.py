"""Checks that a parallel layout can hold a model, before a start."""

from itertools import accumulate

from actors.trainer.models.config import HfConfig
from runtime.models.blocks import DeltaNet, Experts
from runtime.settings.tables.trainer import MegatronConfig
from runtime.util.formatting import count_of


def check_layout(model: HfConfig, layout: MegatronConfig) -> None:
    """Reject a parallel layout that cannot hold the model.

    Raises:
        ValueError: names the size that does not fit, and what would fit.
    """
    tensor = layout.tensor_model_parallel_size
    sizes = {"vocab_size": model.vocab_size}
    for layer in model.layers:
        sizes |= dict((*layer.attention.divided(), *layer.mlp.divided()))
    if model.num_mtp_layers:
        sizes["hidden_size"] = model.hidden_size  # output of the MTP layer's projection
    for name, size in sizes.items():
        _check_divides(name, size, tensor)
    if layout.context_parallel_size > 1 and any(isinstance(layer.attention, DeltaNet) for layer in model.layers):
        raise ValueError(
            f"context_parallel_size = {layout.context_parallel_size}: not supported for linear attention, whose state "
            f"passes from position to position"
        )
    if layout.context_parallel_size > 1 and model.has_indexers:
        raise ValueError(
            f"context_parallel_size = {layout.context_parallel_size}: not supported for sparse attention, whose "
            f"indexer compares each position with all before it"
        )
    if model.num_mtp_layers and model.tie_word_embeddings and layout.pipeline_model_parallel_size > 1:
        raise ValueError(
            "mtp_num_layers = 1: with pipeline stages the model's output weight must not be its embedding "
            "(tie_word_embeddings): Megatron-core would have both on the last stage"
        )
    _check_experts(model.experts, layout)
    _check_stages(model.num_layers, layout)
    _check_choices(model, layout)


def _check_divides(name: str, size: int, ranks: int) -> None:
    if size % ranks:
        raise ValueError(f"{name} = {size} of the model is not divisible by {ranks} ranks")


def _check_experts(experts: Experts | None, layout: MegatronConfig) -> None:
    """Check that Megatron-core can distribute the experts and gather their gradients."""
    ranks, tensor = layout.expert_model_parallel_size, layout.tensor_model_parallel_size
    of_each = layout.expert_tensor_parallel_size or tensor
    if experts is None:
        if ranks > 1:
            raise ValueError(f"expert_model_parallel_size = {ranks}: the model has no experts to distribute")
        return
    _check_divides("the number of experts", experts.num_experts, ranks)
    _check_divides("moe_intermediate_size", experts.size, of_each)
    _check_divides("the size of the shared expert", experts.shared_size, tensor)
    if experts.clamped is not None and of_each > 1:
        raise ValueError(
            f"expert_tensor_parallel_size = {of_each}: not implemented yet for experts with biases; supported: 1, and "
            f"distribute them by expert_model_parallel_size"
        )
    if tensor > 1 and not layout.sequence_parallel:
        raise ValueError("sequence_parallel = false: experts with tensor parallelism need sequence_parallel = true")
    if of_each != tensor and ranks == 1:
        raise ValueError(
            f"expert_tensor_parallel_size = {of_each} differs from tensor_model_parallel_size = {tensor}: set "
            f"expert_model_parallel_size above 1, as otherwise Megatron-core does not sum the experts' gradients"
        )


def _check_stages(num_layers: int, layout: MegatronConfig) -> None:
    """Check that Megatron-core can distribute the layers over the pipeline stages.

    The first and the last stage may have a number of layers of their own. The other stages share the rest evenly.
    """
    pipeline, virtual = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size or 1
    named = {
        name: size
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        if (size := getattr(layout, name)) is not None
    }
    for name, size in named.items():
        if pipeline == 1 or size % virtual:
            raise ValueError(f"{name} = {size}: needs several pipeline stages, and a multiple of their virtual stages")
    left, others = num_layers - sum(named.values()), pipeline - len(named)
    if left < others or (left % others if others else left) or (others and left // others % virtual):
        stages = f"{others} pipeline stages" + (f" of {virtual} virtual ones" if virtual > 1 else "")
        raise ValueError(
            f"num_hidden_layers = {num_layers} of the model: {count_of(left, 'layer')} cannot be split "
            f"equally over {stages}" + (f", after {', '.join(named)}" if named else "")
        )


def _check_choices(model: HfConfig, layout: MegatronConfig) -> None:
    """Check that each stage begins with a layer that does not need what one of another stage chose."""
    for start in _stage_starts(model.num_layers, layout) if model.has_indexers else ():
        if (source := model.source_of(start)) != start:
            raise ValueError(
                f"pipeline_model_parallel_size = {layout.pipeline_model_parallel_size}: not implemented yet for a "
                f"stage that begins with layer {start}, which sees the keys that layer {source} of another stage "
                f"chooses: set num_layers_in_first_pipeline_stage"
            )


def _stage_starts(num_layers: int, layout: MegatronConfig) -> list[int]:
    """Return the first layer of each stage, virtual ones included, counted from 0."""
    pipeline, virtual = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size or 1
    first, last = layout.num_layers_in_first_pipeline_stage, layout.num_layers_in_last_pipeline_stage
    others = pipeline - (first is not None) - (last is not None)
    sizes = [(num_layers - (first or 0) - (last or 0)) // max(others, 1)] * others
    sizes = [*([] if first is None else [first]), *sizes, *([] if last is None else [last])]
    return [0, *accumulate(size // virtual for size in sizes * virtual)][:-1]
