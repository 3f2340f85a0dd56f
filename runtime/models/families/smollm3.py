"""SmolLM3: every fourth layer has no rotary embedding."""

from collections.abc import Iterator
from typing import ClassVar

import msgspec

from runtime.models.blocks import Attention
from runtime.models.family import Family
from runtime.models.readers import BiasedMlpKeys, SwitchedWindowKeys


class AttentionKeys(SwitchedWindowKeys, frozen=True, kw_only=True):
    """Keys of the attention. Without layer_types, the layers without a rotary embedding have the window."""

    theta: ClassVar[float] = 2_000_000.0
    no_rope_layers: tuple[int, ...] | None = None  # 0: the layer has no rotary embedding
    no_rope_layer_interval: int = 4

    def is_rotated(self, index: int) -> bool:
        """Whether a layer has a rotary embedding."""
        if self.no_rope_layers is None:
            return (index + 1) % self.no_rope_layer_interval != 0
        return bool(self.no_rope_layers[index])

    def is_windowed(self, index: int) -> bool:
        """Whether a layer has the window."""
        return not self.is_rotated(index) if self.layer_types is None else super().is_windowed(index)

    def of_layer(self, block: Attention, index: int) -> Attention:
        """Return the block of one layer, given that of all layers."""
        block = super().of_layer(block, index)
        return block if self.is_rotated(index) else msgspec.structs.replace(block, rope=None)

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        if self.no_rope_layer_interval < 1:
            yield f"no_rope_layer_interval {self.no_rope_layer_interval} is not positive"
        if self.no_rope_layers is not None and len(self.no_rope_layers) != self.num_hidden_layers:
            yield f"no_rope_layers has {len(self.no_rope_layers)} entries; supported: {self.num_hidden_layers}"


FAMILY = Family(
    model_type="smollm3",
    title="SmolLM3",
    architecture="SmolLM3ForCausalLM",
    attention=AttentionKeys,
    mlp=BiasedMlpKeys,
)
