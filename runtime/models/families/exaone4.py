"""EXAONE 4: norms of what each module adds and of each head, and a rotary embedding in layers with a window alone."""

from collections.abc import Iterator
from typing import ClassVar

import msgspec

from runtime.models.blocks import NORMS_AFTER, Attention
from runtime.models.family import Family
from runtime.models.readers import MlpKeys, WindowKeys


class AttentionKeys(WindowKeys, frozen=True, kw_only=True):
    """Keys of the attention. Published files name a pattern of layers beside layer_types, which decides."""

    without_keys: ClassVar = {"head_norms": True, "qkv_bias": False, "output_bias": False}
    sliding_window_pattern: int | str | None = 4

    def is_windowed(self, index: int) -> bool:
        """Whether a layer has the window."""
        if self.layer_types is None and isinstance(self.sliding_window_pattern, int):
            return (index + 1) % self.sliding_window_pattern != 0
        return super().is_windowed(index)

    def of_layer(self, block: Attention, index: int) -> Attention:
        """Return the block of one layer, given that of all layers."""
        if self.window is None or self.is_windowed(index):
            return super().of_layer(block, index)
        return msgspec.structs.replace(block, rope=None)

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        pattern, is_needed = self.sliding_window_pattern, self.layer_types is None and self.window is not None
        if is_needed and not (isinstance(pattern, int) and pattern > 0):
            yield f"sliding_window_pattern {pattern!r} is not supported without layer_types; supported: a number"


FAMILY = Family(
    model_type="exaone4",
    title="EXAONE 4",
    architecture="Exaone4ForCausalLM",
    attention=AttentionKeys,
    mlp=MlpKeys,
    norms=NORMS_AFTER,
)
