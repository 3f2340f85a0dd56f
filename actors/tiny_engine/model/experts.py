"""A mixture of experts in plain tensor operations, with the router of the trainer.

Shapes: N leading dimensions, E hidden size, T tokens, X experts, k experts of a token.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.models.blocks import EXPERT_STACKS, Experts, Weight

BIAS: Final = "router.expert_bias"  # float32 in every engine: updates of it are smaller than bfloat16 can hold
_NAME: Final = re.compile(r"(?P<experts>.+)\.local_experts\.(?P<number>\d+)\.(?P<linear>linear_fc\d)\.weight")


class Stacked(NamedTuple):
    """The place of an expert's matrix in the stack of all experts of the layer."""

    name: str  # of the stack, in the trainer
    engine_name: str  # of the stack, in SGLang
    number: int  # of the expert


def stacked(weight: Weight) -> Stacked | None:
    """Return the place of a matrix that is stacked; None: it is not one of an expert."""
    match = _NAME.fullmatch(weight.name)
    if match is None:
        return None
    of_layer = weight.engine_name.rpartition(f".{match['number']}.")[0]
    return Stacked(
        f"{match['experts']}.{match['linear']}", f"{of_layer}.{EXPERT_STACKS[match['linear']]}", int(match["number"])
    )


def experts_output(x: Tensor, held: Mapping[str, Tensor], block: Experts) -> Tensor:
    """Compute a layer's experts, and its shared expert if it has one.

    Args:
        x: normalized hidden states, [N, E].
        held: weights of the layer by the names of the trainer; those of the experts are stacked.
        block: of the layer.

    Returns:
        What the layer adds to the residual, [N, E].
    """
    flat = x.reshape(-1, x.shape[-1])
    weights, chosen = _routed(flat, held, block)
    out = torch.zeros_like(flat)
    for expert in chosen.unique().tolist():
        tokens, place = torch.where(chosen == expert)
        own = _swiglu(flat[tokens], held["mlp.experts.linear_fc1"][expert], held["mlp.experts.linear_fc2"][expert])
        out.index_add_(0, tokens, own * weights[tokens, place, None].to(own.dtype))
    if block.shared_size:
        first, second = (held[f"mlp.shared_experts.linear_fc{number}.weight"] for number in (1, 2))
        shared = _swiglu(flat, first, second)
        if block.has_shared_gate:
            shared = shared * F.linear(flat, held["mlp.shared_experts.gate_weight"]).sigmoid()
        out = out + shared
    return out.view_as(x)


def _swiglu(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    gate, up = F.linear(x, first).chunk(2, -1)
    return F.linear(F.silu(gate) * up, second)


def _routed(flat: Tensor, held: Mapping[str, Tensor], block: Experts) -> tuple[Tensor, Tensor]:
    """Return the weights and numbers of each token's experts, [T, k], computed in float32."""
    logits = F.linear(flat.float(), held["mlp.router.weight"].float())
    scores = logits.softmax(-1) if block.score == "softmax" else logits.sigmoid()
    choice = scores + held["mlp.router.expert_bias"] if block.has_bias else scores
    if block.num_groups is not None and block.num_groups_per_tok is not None:
        grouped = choice.unflatten(-1, (block.num_groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(block.num_groups_per_tok, dim=-1).indices
        kept = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter_(1, best, value=True)
        choice = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    chosen = choice.topk(block.num_experts_per_tok, dim=-1).indices
    weights = scores.gather(1, chosen)
    if block.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * block.routed_scaling_factor, chosen
