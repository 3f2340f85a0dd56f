"""Reader of config.json for models whose layers without a window have heads of sizes of their own. No family's name."""

from collections.abc import Iterator
from typing import Any, ClassVar, Final

import msgspec

from runtime.models.blocks import Attention
from runtime.models.readers import LayeredRopeKeys
from runtime.models.rope import Rope

PER_LAYER: Final = ("head_dim", "num_key_value_heads")  # keys that may differ between layers


class SizedHeadKeys(LayeredRopeKeys, frozen=True, kw_only=True):
    """Keys of attention whose layers without a window have heads of their own, and may have no projection of values.

    The last layer never has a window, whatever layer_types says.
    """

    rope_type: ClassVar[str] = "proportional"
    proportion: ClassVar[float] = 1.0  # of planes that are rotated in layers without a window, if no key has it
    window_interval: ClassVar[int] = 1  # every so many layers one has no window, without layer_types
    head_dim: int = 256
    sliding_window: int = 512
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    attention_k_eq_v: bool = False
    per_layer_config: dict[str, dict[str, int]] | None = None  # transformers 5 writes it in place of the two sizes

    def rope(self) -> Rope:
        """Read the rotary embedding of layers without a window."""
        if self.rope_parameters is None:
            return Rope(theta=self.theta, proportion=self.proportion)
        return super().rope()

    def is_windowed(self, index: int) -> bool:
        """Whether a layer has the window."""
        if index == self.num_hidden_layers - 1:
            return False
        return (index + 1) % self.window_interval != 0 if self.layer_types is None else super().is_windowed(index)

    def sizes(self, index: int) -> dict[str, int]:
        """Return the keys that a layer has other values of."""
        if self.per_layer_config is not None:
            return self.per_layer_config.get(str(index), {})
        if self.is_windowed(index):
            return {}
        heads = self.num_global_key_value_heads if self.attention_k_eq_v else None
        return {"head_dim": self.global_head_dim} | ({} if heads is None else {"num_key_value_heads": heads})

    def of_layer(self, block: Attention, index: int) -> Attention:
        """Return the block of one layer, given that of all layers."""
        sizes = self.sizes(index)
        own: dict[str, Any] = {
            "head_dim": sizes.get("head_dim", block.head_dim),
            "kv_heads": sizes.get("num_key_value_heads", block.kv_heads),
            "has_one_projection": self.attention_k_eq_v and not self.is_windowed(index),
        }
        return msgspec.structs.replace(super().of_layer(block, index), **own)

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from (found := [*super().problems()])
        for index, sizes in enumerate([] if found else map(self.sizes, range(self.num_hidden_layers))):
            if other := {*sizes} - {*PER_LAYER}:
                yield f"per_layer_config has {min(other)!r} of layer {index}; supported: {', '.join(PER_LAYER)}"
            elif min(sizes.values(), default=1) < 1 or sizes.get("head_dim", 2) % 2:
                yield f"head sizes of layer {index} must be positive, and head_dim even: {sizes}"
            elif self.num_attention_heads % sizes.get("num_key_value_heads", 1):
                yield f"num_key_value_heads of layer {index} must divide num_attention_heads: {sizes}"
