"""Reader of config.json for models whose layers have linear attention or full attention. No family's name."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from runtime.models.blocks import Attention, DeltaNet
from runtime.models.readers import HeadKeys


class HybridKeys(HeadKeys, frozen=True, kw_only=True):
    """Keys of attention with a gated output, in every fourth layer or in those that layer_types names.

    The other layers have a gated delta net.
    """

    rope_share: ClassVar[float] = 0.25
    layer_kinds: ClassVar[tuple[str, ...]] = ("full_attention", "linear_attention")
    without_keys: ClassVar[Mapping[str, bool]] = {"head_norms": True, "has_gate": True}
    is_fused: ClassVar[bool] = False  # the files have all rows of a key head together
    full_attention_interval: int = 4
    attn_output_gate: bool = True
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32

    def is_linear(self, index: int) -> bool:
        """Whether a layer has a gated delta net."""
        if self.layer_types is None:
            return (index + 1) % self.full_attention_interval != 0
        return self.layer_types[index] == "linear_attention"

    def of_layer(self, block: Attention, index: int) -> Attention | DeltaNet:
        """Return the block of one layer, given the attention of those that have one."""
        if not self.is_linear(index):
            return block
        return DeltaNet(
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            width=self.linear_conv_kernel_dim,
            is_fused=self.is_fused,
        )

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        found = [*super().problems()]
        yield from found
        sizes = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
        keys = ("full_attention_interval", *(f"linear_{size}" for size in sizes))
        small = [key for key in keys if getattr(self, key) < 1]
        yield from (f"{key} {getattr(self, key)} is not positive" for key in small)
        if not self.attn_output_gate:
            yield "attn_output_gate false is not supported; supported: true"
        if found or small:
            return
        if self.linear_num_value_heads % self.linear_num_key_heads:
            yield (
                f"linear_num_value_heads {self.linear_num_value_heads} is not divisible by linear_num_key_heads "
                f"{self.linear_num_key_heads}"
            )
        if all(map(self.is_linear, range(self.num_hidden_layers))):
            yield "no layer has full attention, which is not supported; supported: at least one"
