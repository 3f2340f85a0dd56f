"""ERNIE 4.5 without experts: neighbouring coordinates of each head are rotated."""

from collections.abc import Iterator
from typing import ClassVar

from runtime.models.family import Family
from runtime.models.readers import HeadKeys, MlpKeys


class AttentionKeys(HeadKeys, frozen=True, kw_only=True):
    """Keys of the attention. With use_bias all projections would have biases, those of the MLP too."""

    without_keys: ClassVar = {"qkv_bias": False, "output_bias": False}
    is_interleaved: ClassVar[bool] = True
    theta: ClassVar[float] = 500_000.0
    head_dim: int | None = 128
    use_bias: bool = False

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        if self.use_bias:
            yield "use_bias true is not supported; supported: false"


FAMILY = Family(
    model_type="ernie4_5",
    title="ERNIE 4.5",
    architecture="Ernie4_5ForCausalLM",
    attention=AttentionKeys,
    mlp=MlpKeys,
)
