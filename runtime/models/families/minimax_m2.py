"""MiniMax-M2: one norm of all queries and of all keys, a part of each head rotated, and experts in each layer."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

import msgspec

from runtime.models import blocks
from runtime.models.expert_readers import ExpertKeys
from runtime.models.family import Family
from runtime.models.readers import HeadKeys
from runtime.models.rope import Rope, read_rope

ONLY: Final[Mapping[str, Any]] = {  # values of published keys that transformers' class does not read
    **{"use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True, "scoring_func": "sigmoid"},
    "shared_intermediate_size": 0,
}


def others(keys: msgspec.Struct) -> Iterator[str]:
    """Yield each published value that the class does not compute."""
    for key in keys.__struct_fields__:
        if key in ONLY and getattr(keys, key) != ONLY[key]:
            yield f"{key} {getattr(keys, key)!r} is not supported; supported: {ONLY[key]!r}"


class AttentionKeys(HeadKeys, frozen=True, kw_only=True):
    """Keys of the attention."""

    without_keys: ClassVar = {"joint_norms": True, "qkv_bias": False, "output_bias": False}
    theta: ClassVar[float] = 5_000_000.0
    head_dim: int = 128
    rotary_dim: int | None = None
    use_qk_norm: bool = True
    qk_norm_type: str = "per_layer"
    attn_type_list: tuple[int, ...] | None = None  # of each layer; 1: softmax

    def rope(self) -> Rope:
        """Read the rotary embedding, whose share is partial_rotary_factor or else rotary_dim of head_dim."""
        rotated = 1.0 if self.rotary_dim is None else self.rotary_dim / self.head_dim
        keys = msgspec.structs.replace(self, partial_rotary_factor=self.partial_rotary_factor or rotated)
        return read_rope(keys, share=0.5, stretching="default", theta=self.theta)

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from (*super().problems(), *others(self))
        if self.rotary_dim is not None and (self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim):
            yield f"rotary_dim {self.rotary_dim} is not supported; supported: even, at most head_dim {self.head_dim}"
        if {*(self.attn_type_list or ())} - {1}:
            yield "attn_type_list is not supported with values other than 1"


class MlpKeys(ExpertKeys, frozen=True, kw_only=True):
    """Keys of the experts."""

    use_routing_bias: bool = True
    scoring_func: str = "sigmoid"
    shared_intermediate_size: int = 0

    @property
    def number(self) -> int:
        """Number of experts."""
        return self.num_local_experts or 256

    def is_sparse(self, index: int) -> bool:
        """Whether a layer has experts: each has."""
        return index >= 0

    def experts(self) -> blocks.Experts:
        """Return the experts of a layer."""
        routed = self.routed(score="sigmoid", has_bias=True)
        return msgspec.structs.replace(routed, size=self.intermediate_size, norm_topk_prob=True)

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from (*super().problems(), *others(self))


FAMILY = Family(
    model_type="minimax_m2",
    title="MiniMax-M2",
    architecture="MiniMaxM2ForCausalLM",
    attention=AttentionKeys,
    mlp=MlpKeys,
    names={
        "mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias",
        **{"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    },
)
