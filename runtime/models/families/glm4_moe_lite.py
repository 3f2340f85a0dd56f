"""GLM-4.7-Flash: multi-latent attention, and experts of a sigmoid router after the first layers."""

from collections.abc import Iterator

from runtime.models.expert_readers import TypedExpertKeys
from runtime.models.family import Family
from runtime.models.readers import LatentKeys


class MlpKeys(TypedExpertKeys, frozen=True, kw_only=True):
    """Keys of the experts and dense layers. Published files have first_k_dense_replace, which the class ignores."""

    first_k_dense_replace: int = 1

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        if self.first_k_dense_replace != 1:
            yield f"first_k_dense_replace {self.first_k_dense_replace} is not supported; supported: 1"


FAMILY = Family(
    model_type="glm4_moe_lite",
    title="GLM-4.7-Flash",
    architecture="Glm4MoeLiteForCausalLM",
    attention=LatentKeys,
    mlp=MlpKeys,
)
