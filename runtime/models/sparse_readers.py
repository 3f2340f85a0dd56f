"""Reader of config.json for models whose attention sees the keys that an indexer chooses (DSA). No family's name."""

from collections.abc import Iterator
from typing import ClassVar

import msgspec

from runtime.models.blocks import Indexer, Mla
from runtime.models.readers import LatentKeys
from runtime.models.rope import Rope


class SparseKeys(LatentKeys, frozen=True, kw_only=True):
    """Keys of multi-latent attention with an indexer in each layer."""

    layer_kinds: ClassVar[tuple[str, ...]] = ("indexed_attention",)
    has_interleaved_indexer: ClassVar[bool] = False  # its RoPE rotates neighbouring coordinates
    index_topk: int = 2048
    index_head_dim: int = 128
    index_n_heads: int = 64

    def is_shared(self, index: int) -> bool:
        """Whether a layer sees the keys that the last layer with an indexer chose."""
        del index
        return False

    def block(self, rope: Rope) -> Mla:
        """Return the block of a layer."""
        indexer = Indexer(
            topk=self.index_topk,
            heads=self.index_n_heads,
            head_dim=self.index_head_dim,
            is_interleaved=self.has_interleaved_indexer,
        )
        return msgspec.structs.replace(super().block(rope), indexer=indexer)

    def of_layer(self, block: Mla, index: int) -> Mla:
        """Return the block of one layer, given that of all layers."""
        assert block.indexer is not None
        own = msgspec.structs.replace(block.indexer, is_shared=self.is_shared(index))
        return msgspec.structs.replace(block, indexer=own)

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        if self.q_lora_rank is None:
            yield "q_lora_rank null is not supported with an indexer, which reads these latents"
        for key in ("index_topk", "index_n_heads"):
            if getattr(self, key) < 1:
                yield f"{key} {getattr(self, key)} is not positive"
        if self.index_head_dim < self.qk_rope_head_dim:
            yield f"index_head_dim {self.index_head_dim} is below qk_rope_head_dim {self.qk_rope_head_dim}"
