"""gpt-oss: attention sinks, a window in every second layer, and experts with clamped units and biases in one tensor."""

from collections.abc import Iterator
from typing import ClassVar

import msgspec

from runtime.models import blocks
from runtime.models.expert_readers import ExpertKeys
from runtime.models.family import Family
from runtime.models.readers import WindowKeys


class AttentionKeys(WindowKeys, frozen=True, kw_only=True):
    """Keys of the attention."""

    rope_type: ClassVar[str] = "yarn"
    theta: ClassVar[float] = 150000.0
    without_keys: ClassVar = {"has_sinks": True}
    head_dim: int | None = 64
    attention_bias: bool = True
    sliding_window: int | None = 128

    def is_windowed(self, index: int) -> bool:
        """Whether a layer has the window."""
        return index % 2 == 0 if self.layer_types is None else super().is_windowed(index)

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        if not self.attention_bias:
            yield "attention_bias false is not supported; supported: true"
        if not (self.rope_scaling or self.rope_parameters):
            yield "rope_parameters is missing, and so is rope_scaling"


class MlpKeys(ExpertKeys, frozen=True, kw_only=True):
    """Keys of the experts."""

    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    @property
    def number(self) -> int:
        """Number of experts."""
        return self.num_local_experts or 128

    def is_sparse(self, index: int) -> bool:
        """Whether a layer has experts: each has."""
        return index >= 0

    def experts(self) -> blocks.Experts:
        """Return the experts of a layer."""
        clamped = blocks.Clamped(gain=self.swiglu_alpha, limit=self.swiglu_limit)
        routed = self.routed(score="softmax", has_bias=False, clamped=clamped, router="router")
        return msgspec.structs.replace(routed, size=self.intermediate_size)


FAMILY = Family(
    model_type="gpt_oss",
    title="gpt-oss",
    architecture="GptOssForCausalLM",
    attention=AttentionKeys,
    mlp=MlpKeys,
)
