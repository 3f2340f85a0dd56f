"""GLM-4.7-Flash: multi-latent attention, and experts of a sigmoid router after the first layers."""

from collections.abc import Iterator

from runtime.models.family import Family
from runtime.models.readers import LatentKeys, SigmoidExpertKeys


class MlpKeys(SigmoidExpertKeys, frozen=True, kw_only=True):
    """Keys of the experts and dense layers. Published files have first_k_dense_replace, which the class ignores."""

    first_k_dense_replace: int = 1
    mlp_layer_types: tuple[str, ...] | None = None

    def is_sparse(self, index: int) -> bool:
        """Whether a layer has experts."""
        if self.mlp_layer_types is None:
            return index > 0
        return self.mlp_layer_types[index] == "sparse"

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        kinds, number = self.mlp_layer_types, self.num_hidden_layers
        if self.first_k_dense_replace != 1:
            yield f"first_k_dense_replace {self.first_k_dense_replace} is not supported; supported: 1"
        if kinds is not None and (len(kinds) != number or {*kinds} - {"dense", "sparse"}):
            yield f"mlp_layer_types is not supported; supported: {number} of 'dense' and 'sparse'"
            return
        yield from super().problems()


FAMILY = Family(
    model_type="glm4_moe_lite",
    title="GLM-4.7-Flash",
    architecture="Glm4MoeLiteForCausalLM",
    attention=LatentKeys,
    mlp=MlpKeys,
)
