"""DeepSeek-V3 and R1, and models of others with its architecture: Moonlight, Kimi-K2."""

from collections.abc import Iterator

from runtime.models.family import Family
from runtime.models.readers import LatentKeys, SigmoidExpertKeys


class Experts(SigmoidExpertKeys, frozen=True, kw_only=True):
    """Keys of the experts and dense layers, with those of published code that transformers' class does not read."""

    moe_layer_freq: int = 1
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        for key, only in {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}.items():
            if getattr(self, key) != only:
                yield f"{key} {getattr(self, key)!r} is not supported; supported: {only!r}"


FAMILY = Family(
    model_type="deepseek_v3",
    same=("kimi_k2",),
    title="DeepSeek-V3, Moonlight, Kimi-K2",
    architecture="DeepseekV3ForCausalLM",
    attention=LatentKeys,
    mlp=Experts,
    code={
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
)
