"""The end of the model: from the hidden states of positions that train to log-probs, without a logit of any other."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actors.trainer.algorithms.log_probs import log_probs_and_entropy
from actors.trainer.megatron.imports import (
    ColumnParallelLinear,
    GPTModel,
    gather_from_sequence_parallel_region,
    parallel_state,
)


@dataclass(frozen=True)
class AskedFurther:
    """What is asked of the layer for the token after the next one."""

    tokens: Tensor  # [b, s], behind those that are read
    rows_F: Tensor  # as rows_M
    targets_F: Tensor


@dataclass(frozen=True)
class Asked:
    """What is asked of the last pipeline stage, in the place of labels."""

    rows_M: Tensor  # positions, over tokens [b, s] flattened
    targets_M: Tensor  # token ids
    temperature: float
    further: AskedFurther | None = None


class Head(ColumnParallelLinear):
    """Megatron's output layer, whose weight is cut by the vocabulary; its other uses stay what they are."""

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        asked: Asked | None = None,
    ) -> Any:
        """Return logits, or log-probs and entropies of what is asked.

        Args:
            input_: hidden states [s, b, h]; under sequence parallelism this rank's part of s.
            weight: the output weight; none: the layer's own.
            runtime_gather_output: Megatron's, of logits.
            asked: none: logits of all positions.
        """
        if asked is None:
            return super().forward(input_, weight, runtime_gather_output)
        if self.sequence_parallel:  # the gradient that comes back is whole, so that a rank takes its part of it
            input_ = gather_from_sequence_parallel_region(
                input_, tensor_parallel_output_grad=False, group=self.tp_group
            )
        length, num_rows, _ = input_.shape
        weight, into = self._accumulating(weight)
        rows = asked.rows_M if num_rows == 1 else asked.rows_M % length * num_rows + asked.rows_M // length
        return log_probs_and_entropy(
            input_.flatten(0, 1).index_select(0, rows),
            weight,
            asked.targets_M,
            temperature=asked.temperature,
            group=self.tp_group if self.tp_group.size() > 1 else None,
            into_VH=into,
        )

    def _accumulating(self, shared: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The weight, and its gradient buffer, to which the head adds what else autograd would copy there.

        Megatron learns so by `grad_added_to_main_grad`, as from its own fused layers. A weight that the embedding here
        has too, which Megatron marks with `zero_out_wgrad`, gets autograd's gradient from there alone.
        """
        weight = self.weight if shared is None else shared
        into: Tensor | None = getattr(weight, "main_grad", None)
        if into is None or not weight.requires_grad or not torch.is_grad_enabled() or into.dtype is not torch.float32:
            return weight, None
        if getattr(weight, "zero_out_wgrad", False):
            return weight.detach(), into
        weight.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
        return weight, into


class Model(GPTModel):
    """Megatron's GPTModel, which answers what is `Asked` in the place of labels: log-probs and entropies.

    Where it is asked of the tokens after the next ones, their log-probs come third, and are the business of the further
    layer alone: hidden states, embedding and output weight get no gradient of them, as in slime.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.post_process:
            self.output_layer.__class__ = Head  # GPTModel has no place to name it, and the layer has no state of ours

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[()] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """As Megatron's, which wants to be told of the replicas where the last stage has a copy of the embedding."""
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return super().sharded_state_dict(prefix, sharded_offsets, {"dp_cp_group": replicas} | (metadata or {}))

    def _postprocess(self, hidden_states: Tensor, *args: Any, labels: Any = None, **options: Any) -> Any:
        if not isinstance(labels, Asked) or not self.post_process:
            return super()._postprocess(hidden_states, *args, labels=labels, **options)
        shared = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        answer = self.output_layer(hidden_states, shared, asked=labels)
        if labels.further is None:
            return answer
        with torch.no_grad():
            embedded = self.embedding(input_ids=labels.further.tokens, position_ids=None)
        further = self.mtp.layers[0](
            hidden_states.detach(), embedded, options["rotary_pos_emb"], options["packed_seq_params"]
        )
        asked = Asked(labels.further.rows_F, labels.further.targets_F, temperature=1.0)
        weight = self.output_layer.weight if shared is None else shared
        return (*answer, self.output_layer(further, weight.detach(), asked=asked)[0])
