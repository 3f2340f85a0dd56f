"""Tensor names in SGLang, which fuses some of Hugging Face's tensors, and the parts of each."""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

_JOINED: Final[Mapping[str, tuple[str, ...]]] = {  # fused modules, and their parts in row order
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_OF_EXPERTS: Final[Mapping[str, tuple[str, ...]]] = {  # parts of each expert, expert by expert
    "w13_weight": ("gate_proj.weight", "up_proj.weight"),
    "w2_weight": ("down_proj.weight",),
}
_MODULE: Final = {module: joined for joined, modules in _JOINED.items() for module in modules}
_PROJECTION: Final = {projection: joined for joined, own in _OF_EXPERTS.items() for projection in own}
_LAYER: Final = re.compile(r"(?P<layer>model\.layers\.\d+\.)(?P<module>.+)\.(?P<kind>weight|bias)")
_EXPERT: Final = re.compile(r"(?P<mlp>.+\.mlp\.experts\.)(?P<expert>\d+)\.(?P<projection>\w+\.weight)")


class Place(NamedTuple):
    """The position of a Hugging Face tensor in an engine."""

    name: str
    number: int  # among the parts of the fused tensor


def place_of(name: str) -> Place:
    """Return the position of a Hugging Face tensor in an engine."""
    if match := _EXPERT.fullmatch(name):
        joined = _PROJECTION[match["projection"]]
        own = _OF_EXPERTS[joined]
        return Place(match["mlp"] + joined, int(match["expert"]) * len(own) + own.index(match["projection"]))
    match = _LAYER.fullmatch(name)
    if match is None or match["module"] not in _MODULE:
        return Place(name, 0)
    joined = _MODULE[match["module"]]
    return Place(f"{match['layer']}{joined}.{match['kind']}", _JOINED[joined].index(match["module"]))


def made_of(name: str, num_experts: int = 0) -> list[str]:
    """Return the Hugging Face names of the parts of an engine's tensor, in their order.

    Args:
        name: the engine's tensor name.
        num_experts: number of experts per layer.
    """
    module, _, last = name.rpartition(".")
    if last in _OF_EXPERTS:
        return [f"{module}.{expert}.{own}" for expert in range(num_experts) for own in _OF_EXPERTS[last]]
    for joined, modules in _JOINED.items():
        if module.endswith(f".{joined}"):
            return [f"{module.removesuffix(joined)}{own}.{last}" for own in modules]
    return [name]
