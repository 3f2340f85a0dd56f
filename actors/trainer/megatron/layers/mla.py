"""MLA (multi-latent attention): Megatron's, with down projections replicated on all tensor-parallel ranks."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actors.trainer.megatron.imports import MLASelfAttention


class _Down(nn.Module):
    """Down projection that is replicated on tensor-parallel ranks.

    Under sequence parallelism its input is this rank's positions. Megatron's local layers shard the projection and
    gather its output. The shared part of all heads' keys then gets the gradient of one rank's heads alone.
    """

    def __init__(self, config: Any, columns: int, rows: int) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Project [s, b, columns] to [s, b, rows]; return it and no bias."""
        return F.linear(hidden, self.weight), None


class LatentAttention(MLASelfAttention):
    """Megatron's MLA with replicated down projections."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        hidden = config.hidden_size
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = _Down(config, hidden, config.q_lora_rank)
        self.linear_kv_down_proj = _Down(config, hidden, config.kv_lora_rank + config.qk_pos_emb_head_dim)
