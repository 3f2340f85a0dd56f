"""Embedding, output head and MTP layer. The head computes log-probs of trained positions, and no other logits."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actors.trainer.algorithms.log_probs import KeptTokens, log_probs_and_entropy
from actors.trainer.megatron.imports import (
    ColumnParallelLinear,
    GPTModel,
    MultiTokenPredictionLayer,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    parallel_state,
    recomputed,
)
from actors.trainer.megatron.layers.rows import PaddedRows


@dataclass(frozen=True)
class MtpRequest:
    """Inputs and targets of the MTP layer, whose log-probs are requested."""

    tokens: Tensor  # [b, s], the token after each input token
    rows_F: Tensor  # positions, like rows_M
    targets_F: Tensor


@dataclass(frozen=True)
class HeadRequest:
    """Request for the log-probs of some positions, passed to the last pipeline stage in place of labels."""

    rows_M: Tensor  # positions in the flattened tokens [b, s]
    targets_M: Tensor  # token ids
    temperature: float | Tensor  # of all positions, or [M], of each
    kept: KeptTokens | None = None  # tokens that the targets were sampled from; None: the whole vocabulary
    topk_MK: Tensor | None = None  # token ids whose log-probs are requested, too
    mtp: MtpRequest | None = None


class Head(ColumnParallelLinear):
    """Megatron's vocabulary-parallel output layer. Without a request it returns logits, as Megatron's does."""

    cap: float | None = None  # see `log_probs_and_entropy`

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        request: HeadRequest | None = None,
    ) -> Any:
        """Return logits, or the requested log-probs and entropies.

        Args:
            input_: Hidden states [s, b, h]; under sequence parallelism this rank's part of s.
            weight: Output weight. None: the layer's own.
            runtime_gather_output: Megatron's option for logits.
            request: Requested positions. None: logits of all positions.
        """
        if request is None:
            logits, bias = super().forward(input_, weight, runtime_gather_output)
            return (logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)), bias
        if self.sequence_parallel:  # the incoming gradient is complete, so the backward pass only slices it
            input_ = gather_from_sequence_parallel_region(
                input_, tensor_parallel_output_grad=False, group=self.tp_group
            )
        weight, into = self._accumulating(weight)
        return log_probs_and_entropy(
            input_.flatten(0, 1).index_select(0, _flat_rows(request.rows_M, input_)),
            weight,
            request.targets_M,
            temperature=request.temperature,
            cap=self.cap,
            group=self.tp_group if self.tp_group.size() > 1 else None,
            into_VH=into,
            kept=request.kept,
            topk_MK=request.topk_MK,
        )

    def _accumulating(self, shared: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the weight, and its gradient buffer if the head accumulates into it directly.

        This saves autograd's copy. Like Megatron's fused layers, the head sets `grad_added_to_main_grad`. Megatron
        marks a weight shared with this rank's embedding with `zero_out_wgrad`; its autograd gradient comes from the
        embedding alone.
        """
        weight = self.weight if shared is None else shared
        into: Tensor | None = getattr(weight, "main_grad", None)
        if into is None or not weight.requires_grad or not torch.is_grad_enabled() or into.dtype is not torch.float32:
            return weight, None
        if getattr(weight, "zero_out_wgrad", False):
            return weight.detach(), into
        weight.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
        return weight, into


class _Embedded(torch.autograd.Function):
    """Rows of an embedding. Their gradients are added to `main_grad`, and autograd gets none.

    Autograd's own gradient has a row for each token of the vocabulary.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.tokens, ctx.main_grad = tokens, weight.main_grad  # pyright: ignore[reportAttributeAccessIssue]
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.main_grad.index_add_(0, ctx.tokens.flatten(), gradient.flatten(0, -2).to(ctx.main_grad.dtype))
        return None, None


class Embedding(VocabParallelEmbedding):
    """Megatron's vocabulary-parallel embedding, which on the CPU adds only the gradients of the rows used."""

    adds_rows = False  # Megatron's overlapped reduction waits for a gradient of each parameter from autograd
    scale = 1.0  # of the rows

    def forward(self, input_: Tensor) -> Tensor:
        """Return the scaled rows of token ids [b, s], [b, s, h]."""
        rows = self._rows(input_)
        if self.scale == 1.0:
            return rows
        return rows * torch.tensor(self.scale, dtype=rows.dtype)  # rounded to this dtype, as in transformers

    def _rows(self, input_: Tensor) -> Tensor:
        weight = self.weight
        takes_gradient = torch.is_grad_enabled() and weight.requires_grad and hasattr(weight, "main_grad")
        is_whole = self.tp_group.size() == 1 and not self.reduce_scatter_embeddings
        is_sparse = input_.numel() < len(weight) and not input_.is_cuda
        if not (self.adds_rows and takes_gradient and is_whole and is_sparse):
            return super().forward(input_)
        rows: Any = _Embedded.apply(input_, weight)
        return rows


class ValueHead(nn.Linear):
    """Output layer that computes one value per position: of a critic, or of a reward model.

    Every tensor-parallel rank holds the whole layer and computes all values, so that its gradient is complete on each.
    """

    def __init__(self, config: Any, *, bias: bool) -> None:
        super().__init__(config.hidden_size, 1, bias, device=torch.cuda.current_device())
        self.sequence_parallel: bool = config.sequence_parallel

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - it replaces GPTModel's output layer
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        request: HeadRequest | None = None,
    ) -> tuple[Tensor]:
        """Return the values of the requested positions, [M], float32.

        Args:
            input_: As in `Head`.
            weight: Not used, like the next one.
            runtime_gather_output: Megatron's option for logits.
            request: Requested positions. Its targets and temperature are not used.
        """
        assert request is not None
        if self.sequence_parallel:  # as in Head
            input_ = gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=False)
        hidden_MH = input_.flatten(0, 1).index_select(0, _flat_rows(request.rows_M, input_))
        return (super().forward(hidden_MH).squeeze(-1).float(),)


def _flat_rows(rows_M: Tensor, hidden: Tensor) -> Tensor:
    """Convert positions in flattened tokens [b, s] to positions in flattened hidden states [s, b]."""
    length, num_rows, _ = hidden.shape
    return rows_M if num_rows == 1 else rows_M % length * num_rows + rows_M // length


class Model(GPTModel):
    """Megatron's GPTModel that accepts `HeadRequest` in place of labels and returns log-probs and entropies.

    With a `ValueHead` as its output layer it returns values.

    Log-probs of requested token ids come third. If MTP log-probs are requested, they come last. Their gradient reaches
    only the MTP layer: not the decoder's hidden states, the embedding or the output weight, as in slime.
    """

    shares_choices = False  # layers have sparse attention

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.post_process:
            self.output_layer.__class__ = Head  # GPTModel has no option for it, and Head adds no state
        if self.pre_process:
            self.embedding.word_embeddings.__class__ = Embedding

    def forward(self, *args: Any, packed_seq_params: Any = None, **options: Any) -> Any:
        """Call Megatron's, with a place for what layers of sparse attention share of a padded micro-batch."""
        if packed_seq_params is None and self.shares_choices:
            packed_seq_params = PaddedRows()
        return super().forward(*args, packed_seq_params=packed_seq_params, **options)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[()] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Call Megatron's, which needs the replicas' group where the last stage has a copy of the embedding."""
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return super().sharded_state_dict(prefix, sharded_offsets, {"dp_cp_group": replicas} | (metadata or {}))

    def _postprocess(self, hidden_states: Tensor, *args: Any, labels: Any = None, **options: Any) -> Any:
        if not isinstance(labels, HeadRequest) or not self.post_process:
            return super()._postprocess(hidden_states, *args, labels=labels, **options)
        shared = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        answer = self.output_layer(hidden_states, shared, request=labels)
        if labels.mtp is None:
            return answer
        with torch.no_grad():
            embedded = self.embedding(input_ids=labels.mtp.tokens, position_ids=None)
        mtp = self.mtp.layers[0](
            hidden_states.detach(), embedded, options["rotary_pos_emb"], options["packed_seq_params"]
        )
        request = HeadRequest(labels.mtp.rows_F, labels.mtp.targets_F, temperature=1.0)
        weight = self.output_layer.weight if shared is None else shared
        return (*answer, self.output_layer(mtp, weight.detach(), request=request)[0])


class MtpLayer(MultiTokenPredictionLayer):
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
