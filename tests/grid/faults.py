"""Faults to plant: each breaks what one kind of layout depends on, so that its row of the grid must fail."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest import mock

import numpy as np

from actors.trainer.algorithms import log_probs, loss_inputs
from actors.trainer.data.batch import with_mtp
from actors.trainer.data.context import Context
from actors.trainer.data.prompts import PROMPT
from actors.trainer.lora import adapters
from actors.trainer.megatron import groups
from actors.trainer.megatron.groups import data_parallel_rank
from actors.trainer.megatron.imports import DistributedDataParallel, MLASelfAttention, TopKRouter
from actors.trainer.megatron.layers import attention, router, rows
from actors.trainer.models import sharding
from actors.trainer.step import learner, planning


def _nothing(*_args: Any, **_options: Any) -> None:
    """Instead of what other ranks wait for together, so that none hangs."""


def _first_part() -> Any:
    """Every tensor-parallel rank has the first part of a matrix."""
    right = sharding.cut_of

    def cut(*args: Any) -> Any:
        found = right(*args)
        return None if found is None else replace(found, index=0)

    return mock.patch.object(sharding, "cut_of", cut)


def _first_experts() -> Any:
    right = sharding.names_of
    return mock.patch.object(sharding, "names_of", lambda name, model, *_: right(name, model, 0))


def _plain_cut(self: Context, lengths: Any) -> Any:
    """Stretches instead of a zigzag, which the rotary embedding does not know of."""
    starts, part = np.cumsum(lengths) - lengths, lengths // self.size
    ranges = zip((starts + self.rank * part).tolist(), part.tolist(), strict=True)
    return np.concatenate([np.arange(start, start + size) for start, size in ranges]).astype(np.int64)


def _own_gradient(ctx: Any, gradient: Any) -> tuple[Any, None]:
    """Of keys and values that all ranks used, a rank takes its own gradient alone."""
    return gradient[ctx.group.rank()], None


def _finalize(name: str) -> Any:
    return mock.patch.object(import_module("megatron.core.distributed.finalize_model_grads"), name, _nothing)


def _own_count() -> Any:
    """Of about the samples that are a replica's own."""
    right = learner.num_mtp_tokens
    return mock.patch.object(
        learner, "num_mtp_tokens", lambda batch, samples: right(batch, samples[data_parallel_rank() :: 2])
    )


def _next_of_part(batch: Any, micro_batch: Any) -> Any:
    """The tokens of a part, which is no stretch of its sequence, moved by one."""
    right = with_mtp(batch, micro_batch)
    return replace(right, mtp=replace(right.mtp, tokens=np.roll(micro_batch.tokens, -1, axis=1)))


def _experts_of_others() -> Any:
    right = groups.own_rows
    return mock.patch.object(groups, "own_rows", lambda column, rows: np.roll(right(column, rows), 1, axis=0))


def _megatrons_z_loss(self: router.Router, logits: Any, padding_mask: Any = None) -> Any:
    """Which a rank multiplies by its own tokens."""
    assert self._routing_info is not None
    padding = ~self._routing_info.is_token_T if self._routing_info.trains else padding_mask
    return TopKRouter.apply_z_loss(self, logits, padding)


def _one_owner() -> Any:
    """All positions of a unit are the prompt's."""
    right = rows.PackedRow.__init__

    def begin(self: Any, lengths: Any, context: Any, device: Any, shared: Any = None) -> None:
        right(self, lengths, context, device, shared and replace(shared, owners=np.full_like(shared.owners, PROMPT)))

    return mock.patch.object(rows.PackedRow, "__init__", begin)


FAULTS: dict[str, Callable[[], Any]] = {
    "replicas' gradients are not reduced": lambda: mock.patch.object(
        DistributedDataParallel, "finish_grad_sync", _nothing
    ),
    "gradients of norms are not reduced": lambda: _finalize("_allreduce_non_tensor_model_parallel_grads"),
    "the tied embedding's gradients are not reduced": lambda: _finalize("_allreduce_word_embedding_grads"),
    "every rank has the first part of a matrix": _first_part,
    "each rank's part of the vocabulary is all of it": lambda: mock.patch.object(
        log_probs, "_over_vocabulary", lambda own, _: own
    ),
    "layers are numbered within their stage": lambda: mock.patch.object(sharding, "global_name", lambda name, _: name),
    "every rank has the first experts": _first_experts,
    "routers choose anew": lambda: mock.patch.object(
        router.Router, "taken", lambda self, scores, chosen: (scores.gather(1, chosen), chosen)
    ),
    "biases of experts count padding": lambda: mock.patch.object(
        router, "in_order", lambda values, **_: values.new_ones(1).expand(1)
    ),
    "replicas get experts of other tokens": _experts_of_others,
    "losses of the router count a rank's own tokens": lambda: mock.patch.object(
        router, "_summed", lambda counts, _: counts
    ),
    "losses of the router are divided by their ranks": lambda: mock.patch.object(
        router.Router, "apply_z_loss", _megatrons_z_loss
    ),
    "tokens of an MTP layer are counted by replica": _own_count,
    "an MTP layer reads its rank's next token": lambda: mock.patch.object(planning, "with_mtp", _next_of_part),
    "MLA down projections are sharded": lambda: mock.patch.object(
        attention.MlaAttention, "__init__", MLASelfAttention.__init__
    ),
    "sums over a sequence are a rank's own": lambda: mock.patch.object(
        loss_inputs, "_summed", lambda values, group: values.clone()
    ),
    "responses see others of their prompt": _one_owner,
    "adapters: the gradient of a narrow result is a rank's own": lambda: mock.patch.object(
        adapters, "copy_to_tensor_model_parallel_region", lambda narrow, **_: narrow
    ),
    "adapters: a narrow result is a rank's own": lambda: mock.patch.object(
        adapters, "reduce_from_tensor_model_parallel_region", lambda narrow, **_: narrow
    ),
    "sequences are cut plainly": lambda: mock.patch.object(Context, "kept", _plain_cut),
    "keys take their own rank's gradient": lambda: mock.patch.object(
        attention._StackRanks, "backward", staticmethod(_own_gradient)
    ),
}


@contextmanager
def planted(name: str | None) -> Generator[None]:
    """With a fault, or without any."""
    if name is None:
        yield
        return
    with FAULTS[name]():
        yield
