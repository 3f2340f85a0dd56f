"""A mixture of experts in plain tensor operations, with the router of the trainer.

Shapes: N leading dimensions, E hidden size, T tokens, X experts, k experts of a token.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.models.blocks import EXPERT_STACKS, Experts, Mlp, Weight

BIAS: Final = "router.expert_bias"  # float32 in every engine: updates of it are smaller than bfloat16 can hold
_OF_EXPERTS: Final = "mlp.experts."  # names of stacks in a layer
_NAME: Final = re.compile(
    r"(?P<experts>.+)\.local_experts\.(?P<number>\d+)\.(?P<linear>linear_fc\d)\.(?P<kind>weight|bias)"
)


class Stacked(NamedTuple):
    """The place of an expert's matrix in the stack of all experts of the layer."""

    name: str  # of the stack, in the trainer
    engine_name: str  # of the stack, in SGLang
    number: int  # of the expert


def stacked(weight: Weight) -> Stacked | None:
    """Return the place of a matrix or bias that is stacked; None: it is not one of an expert."""
    match = _NAME.fullmatch(weight.name)
    if match is None:
        return None
    ending = "_bias" if match["kind"] == "bias" else ""
    of_layer = weight.engine_name.rpartition("." if weight.place else f".{match['number']}.")[0]
    joined = EXPERT_STACKS[match["linear"]] + ending
    return Stacked(f"{match['experts']}.{match['linear']}{ending}", f"{of_layer}.{joined}", int(match["number"]))


def experts_output(x: Tensor, held: Mapping[str, Tensor], block: Experts, eps: float) -> Tensor:
    """Compute a layer's experts, and its shared expert if it has one.

    Args:
        x: normalized hidden states, [N, E]; the residual itself if the experts have norms of their own.
        held: weights of the layer by the names of the trainer; those of the experts are stacked.
        block: of the layer.
        eps: of norms.

    Returns:
        What the layer adds to the residual, [N, E].
    """
    flat = x.reshape(-1, x.shape[-1])
    weights, chosen = _routed(flat, held, block, eps)
    of_shared, of_experts = (_normed(flat, held, block, f"before_{kind}", eps) for kind in ("shared", "experts"))
    stacks = {name.removeprefix(_OF_EXPERTS): stack for name, stack in held.items() if name.startswith(_OF_EXPERTS)}
    out = torch.zeros_like(flat)
    for expert in chosen.unique().tolist():
        tokens, place = torch.where(chosen == expert)
        own = _expert(of_experts[tokens], {name: stack[expert] for name, stack in stacks.items()}, block)
        out.index_add_(0, tokens, own * weights[tokens, place, None].to(own.dtype))
    out = _normed(out, held, block, "after_experts", eps)
    if block.shared_size:
        first, second = (held[f"mlp.shared_experts.linear_fc{number}.weight"] for number in (1, 2))
        shared = _normed(_gated(of_shared, first, second, block), held, block, "after_shared", eps)
        if block.has_shared_gate:
            shared = shared * F.linear(flat, held["mlp.shared_experts.gate_weight"]).sigmoid()
        out = out + shared
    return out.view_as(x)


def _normed(x: Tensor, held: Mapping[str, Tensor], block: Experts, name: str, eps: float) -> Tensor:
    """Apply one of the norms that experts may have of their own."""
    if not block.has_norms:
        return x
    weight = held[f"mlp.{name}.weight"]
    return F.rms_norm(x, weight.shape, weight, eps)


def _expert(x: Tensor, own: Mapping[str, Tensor], block: Experts) -> Tensor:
    """Compute an expert. With clamped units its matrices are [in, out], and gates and others alternate."""
    if (clamped := block.clamped) is None:
        return _gated(x, own["linear_fc1"], own["linear_fc2"], block)
    gate, up = torch.addmm(own["linear_fc1_bias"], x, own["linear_fc1"]).unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
    unit = gate * torch.sigmoid(gate * clamped.gain) * (up + 1)
    return torch.addmm(own["linear_fc2_bias"], unit, own["linear_fc2"])


def _gated(x: Tensor, first: Tensor, second: Tensor, block: Experts) -> Tensor:
    gate, up = F.linear(x, first).chunk(2, -1)
    return F.linear(activated(gate, block) * up, second)


def activated(gate: Tensor, block: Mlp | Experts) -> Tensor:
    """Apply the activation of a block's gates."""
    return F.silu(gate) if block.activation == "silu" else F.gelu(gate, approximate="tanh")


def _routed(flat: Tensor, held: Mapping[str, Tensor], block: Experts, eps: float) -> tuple[Tensor, Tensor]:
    """Return the weights and numbers of each token's experts, [T, k], computed in float32."""
    if block.has_norms:
        size = flat.shape[-1]
        flat = F.rms_norm(flat, (size,), None, eps) * held["mlp.router.scale"] * size**-0.5
    bias = held.get("mlp.router.bias")
    logits = F.linear(flat.float(), held["mlp.router.weight"].float(), None if bias is None else bias.float())
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
        sums = weights.sum(-1, keepdim=True)
        weights = weights / (sums + 1e-20 if block.min_sum is None else sums.clamp(min=block.min_sum))
    if block.has_norms:
        weights = weights * held["mlp.router.expert_scales"].float()[chosen]
    return weights * block.routed_scaling_factor, chosen
