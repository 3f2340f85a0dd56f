"""Attention on torch's kernels, in the form in which Megatron's layers call it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn


class CoreAttention(nn.Module):
    """Causal attention of padded [s, b, heads, d] or packed [t, heads, d] queries; keys, values may have fewer heads.

    Padded batches need no padding mask: padding is on the right and its positions carry no loss. Packed batches use
    torch's variable-length kernel on a GPU and a dense mask on the CPU (cost t * t: for tests).
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Return [s, b, heads * d], or [t, heads * d] when packed."""
        if packed_seq_params is None:
            return self._padded(query, key, value)
        return self._packed(query, key, value, packed_seq_params).flatten(1)

    def _padded(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [b, heads, s, d]
        grouped = key.size(1) != query.size(1)
        context = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self._scale, enable_gqa=grouped
        )
        return context.permute(2, 0, 1, 3).flatten(2)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packing: Any) -> Tensor:
        bounds: Tensor = packing.cu_seqlens_q
        grouped = key.size(1) != query.size(1)
        if query.is_cuda:
            longest: int = packing.max_seqlen_q
            context = varlen_attn(
                query, key, value, bounds, bounds, longest, longest,
                scale=self._scale, window_size=(-1, 0), enable_gqa=grouped,
            )  # fmt: skip
            assert isinstance(context, Tensor)
            return context
        segment = torch.bucketize(torch.arange(query.size(0)), bounds[1:], right=True)
        mask = (segment[:, None] == segment[None, :]).tril()
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))  # [1, heads, t, d]
        context = F.scaled_dot_product_attention(query, key, value, mask, scale=self._scale, enable_gqa=grouped)
        return context[0].transpose(0, 1)
