"""Qwen3-MoE: a norm of each head's query and key, and experts of a softmax router in some layers."""

from collections.abc import Iterator
from typing import ClassVar

from runtime.models.blocks import Experts
from runtime.models.family import Family
from runtime.models.readers import ExpertKeys, SwitchedWindowKeys


class AttentionKeys(SwitchedWindowKeys, frozen=True, kw_only=True):
    """Keys of the attention."""

    without_keys: ClassVar = {"head_norms": True}
    layer_kinds: ClassVar = ("full_attention",)


class MlpKeys(ExpertKeys, frozen=True, kw_only=True):
    """Keys of the experts and the dense layers."""

    num_experts: int = 128
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None

    @property
    def number(self) -> int:
        """Number of experts."""
        return self.num_local_experts or self.num_experts

    def is_sparse(self, index: int) -> bool:
        """Whether a layer has experts."""
        return index not in (self.mlp_only_layers or ()) and (index + 1) % max(self.decoder_sparse_step, 1) == 0

    def experts(self) -> Experts:
        """Return the experts of a layer that has them."""
        return self.routed(score="softmax", has_bias=False)

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        if self.decoder_sparse_step < 1:
            yield f"decoder_sparse_step {self.decoder_sparse_step} is not positive"


FAMILY = Family(
    model_type="qwen3_moe",
    title="Qwen3-MoE",
    architecture="Qwen3MoeForCausalLM",
    attention=AttentionKeys,
    mlp=MlpKeys,
    on_sglang="yes",
    ignored_by_sglang={"mlp_only_layers": [], "decoder_sparse_step": 1, "use_sliding_window": False},
    predicts_sums=True,
)
