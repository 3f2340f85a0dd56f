"""All imports from Megatron-core. The package is untyped, so type checking ends here."""

import warnings
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any, Final

from actors.trainer.megatron import cpu
from actors.trainer.megatron.layers import fused
from actors.trainer.megatron.reading import checked_reader, load_common, load_plain


@contextmanager
def quiet() -> Generator[None]:
    """Suppress deprecation and user warnings of Megatron and torch."""
    with warnings.catch_warnings():
        for category in (UserWarning, DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        yield


_NAMES: Final = {
    "GPTModel": "models.gpt",
    "RotaryEmbedding": "models.common.embeddings.rotary_pos_embedding",
    "SelfAttention": "transformer.attention",
    "TransformerConfig": "transformer.transformer_config",
    "MLATransformerConfig": "transformer.transformer_config",
    "MLASelfAttention": "transformer.multi_latent_attention",
    "Float16Module": "transformer.module",
    "get_gpt_decoder_block_spec": "models.gpt.gpt_layer_specs",
    "ModuleSpec": "transformer.spec_utils",
    "PackedSeqParams": "packed_seq_params",
    "DistributedDataParallel": "distributed",
    "DistributedDataParallelConfig": "distributed",
    "finalize_model_grads": "distributed",
    "get_megatron_optimizer": "optimizer",
    "OptimizerConfig": "optimizer",
    "get_forward_backward_func": "pipeline_parallel",
    "ColumnParallelLinear": "tensor_parallel",
    "VocabParallelEmbedding": "tensor_parallel",
    "RowParallelLinear": "tensor_parallel",
    "copy_to_tensor_model_parallel_region": "tensor_parallel",
    "gather_from_sequence_parallel_region": "tensor_parallel",
    "reduce_from_tensor_model_parallel_region": "tensor_parallel",
    "reduce_scatter_to_sequence_parallel_region": "tensor_parallel",
    "initialize_rng_tracker": "tensor_parallel.random",
    "model_parallel_cuda_manual_seed": "tensor_parallel.random",
    "TorchDistSaveShardedStrategy": "dist_checkpointing.strategies.torch",
    "FullyParallelSaveStrategyWrapper": "dist_checkpointing.strategies.fully_parallel",
    "TorchCommonLoadStrategy": "dist_checkpointing.strategies.common",
    "MCoreSavePlanner": "dist_checkpointing.strategies.torch",
    "mcore_to_pyt_state_dict": "dist_checkpointing.strategies.torch",
    "_replace_state_dict_keys_with_sharded_keys": "dist_checkpointing.strategies.torch",
    "make_sharded_tensors_for_checkpoint": "transformer.utils",
    "extract_sharded_base": "dist_checkpointing.utils",
    "dict_list_map_inplace": "dist_checkpointing.dict_utils",
    "merge": "dist_checkpointing.dict_utils",
    "MoELayer": "transformer.moe.moe_layer",
    "TopKRouter": "transformer.moe.router",
    "SequentialMLP": "transformer.moe.experts",
    "weighted_bias_swiglu_impl": "fusions.fused_bias_swiglu",
    "MoEAuxLossAutoScaler": "transformer.moe.moe_utils",
    "MultiTokenPredictionLayer": "transformer.multi_token_prediction",
    "get_gpt_mtp_block_spec": "models.gpt.gpt_layer_specs",
    "TransformerLayer": "transformer.transformer_layer",
    "get_transformer_layer_offset": "transformer.transformer_layer",
    "checkpoint": "tensor_parallel",
    "IdentityOp": "transformer.identity_op",
    "set_tensor_model_parallel_attributes": "tensor_parallel.layers",
    "MegatronModule": "transformer.module",
    "sharded_state_dict_default": "transformer.utils",
}


def _import() -> dict[str, Any]:
    if cpu.needed():
        cpu.install()
    with (
        cpu.eager_imports() if cpu.needed() else nullcontext(),
        quiet(),
    ):  # Megatron warns four times that TransformerEngine and Apex are missing
        parts = {name: getattr(import_module(f"megatron.core.{module}"), name) for name, module in _NAMES.items()} | {
            module: import_module(f"megatron.core.{module}") for module in ("parallel_state", "dist_checkpointing")
        }
    _read_checked()
    rope: Any = import_module("megatron.core.models.common.embeddings.rope_utils")
    rope._apply_rotary_pos_emb_thd = fused.packed_rotary(rope._apply_rotary_pos_emb_bshd)
    rope._apply_rotary_pos_emb_bshd = fused.rotary(rope._apply_rotary_pos_emb_bshd)
    activation: Any = import_module("megatron.core.fusions.fused_bias_swiglu")
    activation.swiglu, activation.swiglu_back = fused.swiglu, fused.swiglu_back  # Megatron's need a compiler
    _without_transformer_engine()
    if cpu.needed():
        dispatcher: Any = import_module("megatron.core.transformer.moe.token_dispatcher")
        dispatcher.maybe_move_tensor_to_cpu = cpu.on_host
        for name, replaced in (("gather_from", cpu.gather), ("reduce_scatter_to", cpu.sum_parts)):
            name = f"{name}_sequence_parallel_region"
            setattr(dispatcher, name, replaced(getattr(dispatcher, name)))
        cpu.install_random_state(import_module("megatron.core.tensor_parallel.random"))
    return parts


def _read_checked() -> None:
    """Patch Megatron to read checkpoints without executing anything that they name."""
    strategies: Any = import_module("megatron.core.dist_checkpointing.strategies.torch")
    strategies._get_filesystem_reader, strategies.MCoreLoadPlanner.load_bytes = checked_reader, load_plain
    common: Any = import_module("megatron.core.dist_checkpointing.strategies.common")
    common.TorchCommonLoadStrategy.load_common = load_common


def _without_transformer_engine() -> None:
    """Patch Megatron's uses of TransformerEngine names that fail without the package."""
    experts: Any = import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(experts, "te_general_gemm"):
        experts.te_general_gemm = None
    mla: Any = import_module("megatron.core.transformer.multi_latent_attention")
    mla.HAVE_TE = isinstance(mla.TELinear, type)  # without the package, TELinear is not a class


_parts = _import()

parallel_state: Any = _parts["parallel_state"]
dist_checkpointing: Any = _parts["dist_checkpointing"]
GPTModel: Any = _parts["GPTModel"]
RotaryEmbedding: Any = _parts["RotaryEmbedding"]
TransformerConfig: Any = _parts["TransformerConfig"]
MLATransformerConfig: Any = _parts["MLATransformerConfig"]
MLASelfAttention: Any = _parts["MLASelfAttention"]
Float16Module: Any = _parts["Float16Module"]
get_gpt_decoder_block_spec: Any = _parts["get_gpt_decoder_block_spec"]
ModuleSpec: Any = _parts["ModuleSpec"]
PackedSeqParams: Any = _parts["PackedSeqParams"]
DistributedDataParallel: Any = _parts["DistributedDataParallel"]
DistributedDataParallelConfig: Any = _parts["DistributedDataParallelConfig"]
finalize_model_grads: Any = _parts["finalize_model_grads"]
get_megatron_optimizer: Any = _parts["get_megatron_optimizer"]
OptimizerConfig: Any = _parts["OptimizerConfig"]
get_forward_backward_func: Any = _parts["get_forward_backward_func"]
ColumnParallelLinear: Any = _parts["ColumnParallelLinear"]
VocabParallelEmbedding: Any = _parts["VocabParallelEmbedding"]
RowParallelLinear: Any = _parts["RowParallelLinear"]
copy_to_tensor_model_parallel_region: Any = _parts["copy_to_tensor_model_parallel_region"]
gather_from_sequence_parallel_region: Any = _parts["gather_from_sequence_parallel_region"]
reduce_from_tensor_model_parallel_region: Any = _parts["reduce_from_tensor_model_parallel_region"]
reduce_scatter_to_sequence_parallel_region: Any = _parts["reduce_scatter_to_sequence_parallel_region"]
initialize_rng_tracker: Any = _parts["initialize_rng_tracker"]
model_parallel_cuda_manual_seed: Any = _parts["model_parallel_cuda_manual_seed"]
TorchDistSaveShardedStrategy: Any = _parts["TorchDistSaveShardedStrategy"]
FullyParallelSaveStrategyWrapper: Any = _parts["FullyParallelSaveStrategyWrapper"]
TorchCommonLoadStrategy: Any = _parts["TorchCommonLoadStrategy"]
MCoreSavePlanner: Any = _parts["MCoreSavePlanner"]
mcore_to_pyt_state_dict: Any = _parts["mcore_to_pyt_state_dict"]
make_sharded_tensors_for_checkpoint: Any = _parts["make_sharded_tensors_for_checkpoint"]
extract_sharded_base: Any = _parts["extract_sharded_base"]
dict_list_map_inplace: Any = _parts["dict_list_map_inplace"]
merge: Any = _parts["merge"]
MoELayer: Any = _parts["MoELayer"]
TopKRouter: Any = _parts["TopKRouter"]
SequentialMLP: Any = _parts["SequentialMLP"]
weighted_bias_swiglu_impl: Any = _parts["weighted_bias_swiglu_impl"]
MoEAuxLossAutoScaler: Any = _parts["MoEAuxLossAutoScaler"]
MultiTokenPredictionLayer: Any = _parts["MultiTokenPredictionLayer"]
get_gpt_mtp_block_spec: Any = _parts["get_gpt_mtp_block_spec"]
TransformerLayer: Any = _parts["TransformerLayer"]
get_transformer_layer_offset: Any = _parts["get_transformer_layer_offset"]
IdentityOp: Any = _parts["IdentityOp"]
recomputed: Any = _parts["checkpoint"]
MegatronModule: Any = _parts["MegatronModule"]
SelfAttention: Any = _parts["SelfAttention"]
sharded_state_dict_default: Any = _parts["sharded_state_dict_default"]
set_tensor_model_parallel_attributes: Any = _parts["set_tensor_model_parallel_attributes"]
replace_state_dict_keys_with_sharded_keys: Any = _parts["_replace_state_dict_keys_with_sharded_keys"]
