"""The gated delta net, a layer of linear attention, and full attention whose output has a gate.

Both are Megatron's self-attention to its layers. Tensor-parallel ranks have some of the heads.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actors.trainer.data.context import Context
from actors.trainer.megatron.imports import (
    ColumnParallelLinear,
    MegatronModule,
    RowParallelLinear,
    SelfAttention,
    copy_to_tensor_model_parallel_region,
    make_sharded_tensors_for_checkpoint,
    parallel_state,
    set_tensor_model_parallel_attributes,
    sharded_state_dict_default,
)
from actors.trainer.megatron.layers.blockwise import Row
from actors.trainer.megatron.layers.delta_rule import Chunks, convolved, delta_rule
from actors.trainer.megatron.layers.fused import rms_norm
from actors.trainer.megatron.layers.rows import PackedRow
from runtime.models.blocks import DeltaNet


class GatedDeltaNet(MegatronModule):
    """Linear attention by the gated delta rule, behind a short convolution, with a gated RMSNorm of each head.

    The fused rows of both input projections are groups, one of each key head.
    """

    def __init__(self, config: Any, layer_number: int, *, block: DeltaNet, pg_collection: Any, **_options: Any) -> None:
        super().__init__(config=config)
        del layer_number
        self._block, self._eps, self._groups = block, config.layernorm_epsilon, pg_collection
        ranks = pg_collection.tp.size()
        self._heads = block.key_heads // ranks
        made = {
            "config": config,
            "bias": False,
            "skip_bias_add": False,
            "is_expert": False,
            "tp_group": pg_collection.tp,
        }
        inside = made | {"init_method": config.init_method, "gather_output": False}
        first, second = (sum(rows.values()) for rows in block.projected())
        self.linear_qkv = ColumnParallelLinear(config.hidden_size, first, **inside)
        self.linear_gates = ColumnParallelLinear(config.hidden_size, second, **inside)
        self.linear_proj = RowParallelLinear(
            block.value_heads * block.value_dim,
            config.hidden_size,
            **made,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
        )
        options: dict[str, Any] = {
            "dtype": config.params_dtype,
            "device": torch.cuda.current_device(),
        }
        channels, heads = block.channels // ranks, block.value_heads // ranks
        self.conv = nn.Parameter(torch.empty(channels, 1, block.width, **options))
        self.A_log = nn.Parameter(torch.empty(heads, **options))
        self.dt_bias = nn.Parameter(torch.empty(heads, **options))
        for parameter in (self.conv, self.A_log, self.dt_bias):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        self.norm = nn.Parameter(torch.empty(block.value_dim, **options))

    def forward(self, hidden_states: Tensor, *, packed_seq_params: Any = None, **_options: Any) -> tuple[Tensor, Any]:
        """Map [s, b, h] to [s, b, h]; return it and the bias, which is none."""
        block = self._block
        parts = [linear(hidden_states)[0] for linear in (self.linear_qkv, self.linear_gates)]
        length, batch = parts[0].shape[:2]
        chunks = _chunks(packed_seq_params, length, batch, parts[0].device)
        rows = [part.transpose(0, 1).reshape(length * batch, self._heads, -1) for part in parts]  # of each key head
        key, value = block.key_dim, block.shared * block.value_dim
        mixed, gate, rate, step = torch.cat(rows, -1).split([2 * key + value, value, block.shared, block.shared], -1)
        mixed = F.silu(convolved(mixed.flatten(1), self.conv[:, 0], chunks)).view(mixed.shape)
        queries, keys, values = mixed.split([key, key, value], -1)
        speed = -self.A_log.float().exp().view(self._heads, block.shared)
        decay = speed * F.softplus(step.float() + self.dt_bias.float().view(self._heads, block.shared))
        values = values.unflatten(-1, (block.shared, block.value_dim))
        read = delta_rule(queries, keys, values, decay, rate.sigmoid(), chunks).to(mixed.dtype)
        # Each rank normalizes its own heads: the gradients of the copies are summed.
        normal = rms_norm(read, copy_to_tensor_model_parallel_region(self.norm, self._groups.tp), self._eps)
        gated = (normal * F.silu(gate.unflatten(-1, values.shape[2:]).float())).to(mixed.dtype)
        return self.linear_proj(gated.reshape(batch, length, -1).transpose(0, 1).contiguous())

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Describe the tensors of a checkpoint: tensor-parallel ranks have those of their heads."""
        groups = {
            "tp_group": self._groups.tp,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        own = {name: parameter for name, parameter in self.named_parameters(recurse=False)}
        sharded = dict.fromkeys(("conv", "A_log", "dt_bias"), 0)
        found = make_sharded_tensors_for_checkpoint(own, prefix, sharded, sharded_offsets, **groups)
        for name, module in self.named_children():
            found |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata)
        return found


def _chunks(row: PackedRow | None, length: int, batch: int, device: torch.device) -> Chunks:
    return _padded_chunks(length, batch, device) if row is None else row.chunks


@lru_cache(maxsize=16)
def _padded_chunks(length: int, batch: int, device: torch.device) -> Chunks:
    """Chunks of padded rows, one after the other. Padding is on the right, where nothing reads it."""
    return Chunks.of(Row.of(np.full(batch, length), Context(), None), device)


class GatedAttention(SelfAttention):
    """Megatron's attention with a sigmoid gate on each head's output, whose rows follow those of the head's query."""

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *_others: Any, output_gate: bool = False, **_options: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys, values, and gates, each [s, b, heads, d]."""
        assert output_gate
        size, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        sharing = self.num_attention_heads_per_partition // groups
        rows = self.linear_qkv(hidden_states)[0].unflatten(-1, (groups, -1))
        queries, key, value = rows.split([2 * sharing * size, size, size], -1)
        query, gate = queries.reshape(*queries.shape[:2], groups * sharing, 2, size).unbind(-2)
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, value, gate
