"""MTP layer: Megatron's, called with the inputs that our head has."""

from functools import partial
from typing import Any

from torch import Tensor

from actors.trainer.megatron.imports import MultiTokenPredictionLayer, recomputed


class FurtherLayer(MultiTokenPredictionLayer):
    """MTP layer: computes hidden states from the decoder's hidden states and the embeddings of the next tokens."""

    def forward(self, hidden: Tensor, embedded: Tensor, rotary: Any, packed: Any) -> Tensor:
        """Return hidden states for the output layer, [s, b, h]; under sequence parallelism this rank's part of s.

        Args:
            hidden: Final hidden states of the decoder, shaped like the result, detached.
            embedded: Embeddings of the token after each input token, shaped like the result.
            rotary: Megatron's rotary_pos_emb.
            packed: Megatron's packed_seq_params.
        """
        layer = partial(self._proj_and_transformer_layer, rotary_pos_emb=rotary, packed_seq_params=packed)
        if self.config.recompute_granularity == "full" and self.training:  # Megatron's checkpoint takes only tensors
            return recomputed(layer, self.config.distribute_saved_activations, hidden.requires_grad_(), embedded)
        return layer(hidden, embedded)
