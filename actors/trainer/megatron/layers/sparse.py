"""Sparse attention (DSA): MLA whose queries see the keys that an indexer chooses, in their layer or in one before it.

The indexer is never trained: it has no gradient, and no loss for it is built here.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from actors.trainer.data.context import Context
from actors.trainer.megatron.imports import gather_from_sequence_parallel_region
from actors.trainer.megatron.layers.attention import MlaAttention
from actors.trainer.megatron.layers.blockwise import Pair, Plan, Row
from actors.trainer.megatron.layers.rows import PackedRow, PaddedRows
from runtime.models.blocks import Mla

QUERIES: Final = (16, 512)  # least and most queries whose keys are chosen at a time
SCORES: Final = 1 << 24  # at most so many scores of them, unless they are the least
EPSILON: Final = 1e-6  # of the norm of keys; no key of config.json


class Indexer(nn.Module):
    """Scores keys by a few small heads, and chooses those of the largest scores for each query."""

    def __init__(self, config: Any, block: Mla) -> None:
        super().__init__()
        assert block.indexer is not None
        self._block, self._rotated, rank = block.indexer, block.rotated_dim, block.query_rank
        self._gathers = config.sequence_parallel
        size, hidden = block.indexer.head_dim, config.hidden_size
        options: dict[str, Any] = {
            "dtype": config.params_dtype,
            "device": torch.cuda.current_device(),
        }
        self.wq_b = nn.Linear(rank or hidden, block.indexer.heads * size, bias=False, **options)
        self.wk = nn.Linear(hidden, size, bias=False, **options)
        self.k_norm = nn.LayerNorm(size, EPSILON, **options)
        self.weights_proj = nn.Linear(hidden, block.indexer.heads, bias=False, **options)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, hidden: Tensor, latent: Tensor, rotary: Any, row: PackedRow | PaddedRows) -> list[Plan] | None:
        """Choose the keys of each query.

        Args:
            hidden: [s, b, h]; under sequence parallelism this rank's part of s.
            latent: Normalized latents of the queries, [s, b, rank] or, of a packed row, [s, rank].
            rotary: Megatron's rotary embedding of the layer.
            row: Layout of the micro-batch.

        Returns:
            Queries and their keys for each of b. None: no sequence is longer than the number of keys to choose.
        """
        latent = latent.view(*hidden.shape[:2], -1)
        parts = [self.wq_b(latent), self.k_norm(self.wk(hidden)), self.weights_proj(hidden)]
        sizes = [part.size(-1) for part in parts]
        joined = torch.cat(parts, -1)
        if self._gathers:
            joined = gather_from_sequence_parallel_region(joined, tensor_parallel_output_grad=False)
        length, batch = joined.shape[:2]
        longest = row.max_seqlen_q if isinstance(row, PackedRow) else length
        if longest <= self._block.topk:
            return None
        queries, keys, weights = joined.split(sizes, -1)
        waves = self._waves(rotary, longest, length, row, joined.dtype)
        queries = self._turned(queries.unflatten(-1, (self._block.heads, -1)), *waves)
        keys = self._turned(keys[:, :, None], *waves)[:, :, 0]
        layout = row.row if isinstance(row, PackedRow) else Row.of(np.array([length]), Context(), None)
        weights = weights.float() * self._block.heads**-0.5
        return [
            tuple(self._pairs(layout, queries[:, index], keys[:, index], weights[:, index])) for index in range(batch)
        ]

    def _waves(
        self, rotary: Any, longest: int, length: int, row: PackedRow | PaddedRows, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [s, 1, 1, d] of the positions."""
        found = rotary(longest)
        angles, amplitude = found if isinstance(found, tuple) else (found, 1.0)
        angles = row.cu_seqlens_q.angles(angles) if isinstance(row, PackedRow) else angles[:length]
        return (angles.cos() * amplitude).to(dtype), (angles.sin() * amplitude).to(dtype)

    def _turned(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first coordinates of heads [s, b, H, D]."""
        turned, rest = heads.split([self._rotated, heads.size(-1) - self._rotated], -1)
        if self._block.is_interleaved:
            turned = torch.cat([turned[..., ::2], turned[..., 1::2]], -1)
        first, second = turned.chunk(2, -1)
        return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)

    def _pairs(self, row: Row, queries: Tensor, keys: Tensor, weights: Tensor) -> Iterator[Pair]:
        """Yield ranges of queries [s, H, D], and the keys [s, D] that each of them sees."""
        ends = np.flatnonzero(np.diff(row.sequences)) + 1
        for first, end in pairwise([0, *ends.tolist(), len(row.sequences)]):
            fitting = SCORES // ((end - first) * self._block.heads)
            step = min(max(fitting, QUERIES[0]), QUERIES[1])
            for at in range(first, end, step):
                own, seen = slice(at, min(at + step, end)), slice(first, min(at + step, end))
                mask = row.seen(own, seen).to(keys.device)
                if mask.size(1) > self._block.topk:
                    mask = self._chosen(queries[own], keys[seen], weights[own], mask)
                yield Pair(own, seen, is_first=True, mask=mask)

    def _chosen(self, queries: Tensor, keys: Tensor, weights: Tensor, seen: Tensor) -> Tensor:
        """Return which keys are chosen of those that are seen, [queries, keys]."""
        products = (queries.float() @ keys.float().t() * self._block.head_dim**-0.5).relu()
        scores = (weights[:, None] @ products)[:, 0].masked_fill(~seen, -torch.inf)
        top = scores.topk(self._block.topk, -1).indices
        return torch.zeros_like(seen).scatter_(1, top, True) & seen  # of fewer keys the other choices are not seen


class SparseAttention(MlaAttention):
    """MLA whose queries see chosen keys. Layers that share a choice find it in the layout of the micro-batch."""

    def __init__(self, config: Any, *args: Any, block: Mla, source: int, **options: Any) -> None:
        super().__init__(config, *args, **options)
        assert block.indexer is not None
        self._source = source  # number of the layer that chooses
        self.indexer = None if block.indexer.is_shared else Indexer(config, block)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: Any = None,
        **options: Any,
    ) -> Any:
        """Return what Megatron's method does, and choose keys."""
        row: PackedRow | PaddedRows = packed_seq_params
        packed = None if isinstance(row, PaddedRows) else row
        found = super().get_query_key_value_tensors(hidden_states, key_value_states, position_ids, packed, **options)
        if self.indexer is not None:
            row.choices[self._source] = self.indexer(hidden_states, found[3], self.rotary_pos_emb, row)
        return found
