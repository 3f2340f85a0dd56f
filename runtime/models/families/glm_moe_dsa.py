"""GLM-5: multi-latent attention to the keys that an indexer chooses, in this layer or in one before, and experts."""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Final

from runtime.models.expert_readers import TypedExpertKeys
from runtime.models.family import Family
from runtime.models.sparse_readers import SparseKeys

OWN, SHARED = "full", "shared"
LETTERS: Final = {"F": OWN, "S": SHARED}


class AttentionKeys(SparseKeys, frozen=True, kw_only=True):
    """Keys of the attention. Without indexer_types, a pattern or a frequency says which layers have an indexer."""

    has_interleaved_indexer: ClassVar[bool] = True
    indexer_types: tuple[str, ...] | None = None
    index_topk_pattern: str | tuple[str, ...] | None = None
    index_topk_freq: int | None = None
    index_skip_topk_offset: int | None = None
    indexer_rope_interleave: bool = True  # of published files; the class does not read it

    @property
    def kinds(self) -> Sequence[str]:
        """Whether each layer has an indexer, or takes the choice of one before."""
        if (named := self.indexer_types or self.index_topk_pattern) is not None:
            return [LETTERS.get(kind, kind) for kind in named]
        offset = 2 if self.index_skip_topk_offset is None else self.index_skip_topk_offset
        after = (max(index - offset + 1, 0) for index in range(self.num_hidden_layers))
        return [SHARED if place % max(self.index_topk_freq or 1, 1) else OWN for place in after]

    def is_shared(self, index: int) -> bool:
        """Whether a layer sees the keys that the last layer with an indexer chose."""
        return self.kinds[index] == SHARED

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        kinds = self.kinds
        if len(kinds) != self.num_hidden_layers or {*kinds} - {OWN, SHARED} or kinds[0] == SHARED:
            yield f"indexer_types is not supported; supported: {self.num_hidden_layers} of {OWN!r} and then {SHARED!r}"
        if not self.indexer_rope_interleave:
            yield "indexer_rope_interleave false is not supported; supported: true"


FAMILY = Family(
    model_type="glm_moe_dsa",
    title="GLM-5",
    architecture="GlmMoeDsaForCausalLM",
    attention=AttentionKeys,
    mlp=TypedExpertKeys,
)
