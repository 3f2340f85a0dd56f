"""The layer that predicts the token after the next one: Megatron's, called with what our head has at hand."""

from functools import partial
from typing import Any

from torch import Tensor

from actors.trainer.megatron.imports import MultiTokenPredictionLayer, recomputed


class FurtherLayer(MultiTokenPredictionLayer):
    """From the decoder's hidden states and the embeddings of the next tokens to hidden states of its own."""

    def forward(self, hidden: Tensor, embedded: Tensor, rotary: Any, packed: Any) -> Tensor:
        """Return hidden states for the output layer, [s, b, h], under sequence parallelism this rank's part of s.

        Args:
            hidden: what the decoder ends with, like the result; without a gradient of this.
            embedded: of the token behind each one that was read, the same.
            rotary: Megatron's rotary_pos_emb.
            packed: Megatron's packed_seq_params.
        """
        layer = partial(self._proj_and_transformer_layer, rotary_pos_emb=rotary, packed_seq_params=packed)
        if self.config.recompute_granularity == "full" and self.training:  # Megatron's own takes tensors alone
            return recomputed(layer, self.config.distribute_saved_activations, hidden.requires_grad_(), embedded)
        return layer(hidden, embedded)
