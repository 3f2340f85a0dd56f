"""ERNIE-4.5-MoE: a softmax router whose bias decides the choice alone, in every so many layers."""

from collections.abc import Iterator
from typing import ClassVar

from runtime.models import blocks
from runtime.models.family import Family
from runtime.models.readers import HeadKeys
from runtime.models.readers import MlpKeys as Mlps


class AttentionKeys(HeadKeys, frozen=True, kw_only=True):
    """Keys of the attention. With use_bias all projections would have biases, those of the MLP too."""

    without_keys: ClassVar = {"qkv_bias": False, "output_bias": False}
    is_interleaved: ClassVar[bool] = True
    theta: ClassVar[float] = 500_000.0
    use_bias: bool = False

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        if self.use_bias:
            yield "use_bias true is not supported: not implemented yet: biases of all projections; supported: false"


class MlpKeys(Mlps, frozen=True, kw_only=True):
    """Keys of the MLPs and of the experts."""

    moe_intermediate_size: int = 1536
    moe_k: int = 6
    moe_num_experts: int = 64
    moe_num_shared_experts: int = 2
    moe_layer_start_index: int = 1
    moe_layer_end_index: int = -1  # -1: the last layer
    moe_layer_interval: int = 1
    moe_norm_min: float = 1e-12
    router_aux_loss_coef: float | None = None  # of a loss that transformers adds; trainer.megatron sets its own

    def is_sparse(self, index: int) -> bool:
        """Whether a layer has experts."""
        last = self.num_hidden_layers - 1 if self.moe_layer_end_index == -1 else self.moe_layer_end_index
        return self.moe_layer_start_index <= index <= last and (index + 1) % max(self.moe_layer_interval, 1) == 0

    def block(self, index: int) -> blocks.Mlp | blocks.Experts:
        """Return the block of a layer."""
        if not self.is_sparse(index):
            return super().block(index)
        return blocks.Experts(
            num_experts=self.moe_num_experts,
            num_experts_per_tok=self.moe_k,
            size=self.moe_intermediate_size,
            shared_size=self.moe_num_shared_experts * self.moe_intermediate_size,
            score="softmax",
            has_bias=True,
            is_bias_row=True,
            norm_topk_prob=True,
            min_sum=self.moe_norm_min,
        )

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        if not 1 < self.moe_k <= self.moe_num_experts:
            yield f"moe_k {self.moe_k} is not supported; supported: 2 to moe_num_experts, {self.moe_num_experts}"
        for key in ("moe_intermediate_size", "moe_layer_interval", "moe_norm_min"):
            if getattr(self, key) <= 0:
                yield f"{key} {getattr(self, key)} is not positive"
        if self.moe_num_shared_experts < 0:
            yield f"moe_num_shared_experts {self.moe_num_shared_experts} is negative"
        if self.num_hidden_layers > 0 and not any(map(self.is_sparse, range(self.num_hidden_layers))):
            yield "no layer has experts: a dense model needs another model_type"


FAMILY = Family(
    model_type="ernie4_5_moe",
    title="ERNIE-4.5-MoE",
    architecture="Ernie4_5_MoeForCausalLM",
    attention=AttentionKeys,
    mlp=MlpKeys,
    names={"mlp.gate.e_score_correction_bias": "mlp.moe_statics.e_score_correction_bias"},
    copied=("model.mtp_block", "model.mtp_emb_norm", "model.mtp_hidden_norm", "model.mtp_linear_proj"),
)
