"""Mixture of experts (MoE) of a model, read from config.json: Qwen3-MoE, GLM-4-MoE, DeepSeek-V3."""

from typing import Final

import msgspec

from runtime.models.problems import Problems, Unsupported


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """MoE layout of a model: its layers with experts, and how the router chooses and weights experts."""

    layers: tuple[bool, ...]  # per layer: whether it has experts instead of one MLP
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    score: str  # of the router's logits: "softmax" or "sigmoid"
    has_bias: bool  # a per-expert bias that affects the choice only
    norm_topk_prob: bool  # whether the chosen experts' weights are normalized to sum 1
    routed_scaling_factor: float = 1.0
    shared_intermediate_size: int = 0  # of the shared expert, which every token passes; 0: none
    num_groups: int | None = None  # expert groups; None: a token's experts are chosen among all
    num_groups_per_tok: int | None = None  # groups to choose from: those with the largest sums of their two best scores


class Qwen3MoeKeys(msgspec.Struct, frozen=True):
    """Keys of Qwen3-MoE in addition to those of Qwen3, with the class's defaults."""

    num_hidden_layers: int
    moe_intermediate_size: int = 768
    num_experts: int | None = None
    num_local_experts: int | None = None  # alternative name of num_experts
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None
    router_aux_loss_coef: float | None = None  # of a loss that transformers adds; trainer.megatron sets its own

    def read(self) -> Experts:
        """Read as transformers does: Qwen3MoeDecoderLayer and Qwen3MoeTopKRouter.

        Raises:
            ValueError: a key is unsupported; the text names it.
        """
        problems = list[str]()
        if self.decoder_sparse_step < 1:
            problems.append(f"decoder_sparse_step {self.decoder_sparse_step} is not positive")
        dense = frozenset(self.mlp_only_layers or ())
        layers = tuple(
            index not in dense and (index + 1) % max(self.decoder_sparse_step, 1) == 0
            for index in range(self.num_hidden_layers)
        )
        return _checked(
            Experts(
                layers=layers,
                num_experts=self.num_experts or self.num_local_experts or 128,
                num_experts_per_tok=self.num_experts_per_tok,
                moe_intermediate_size=self.moe_intermediate_size,
                score="softmax",
                has_bias=False,
                norm_topk_prob=self.norm_topk_prob,
            ),
            problems,
        )


class Glm4MoeKeys(msgspec.Struct, frozen=True):
    """Keys of GLM-4-MoE in addition to those of Qwen3, with the class's defaults."""

    num_hidden_layers: int
    moe_intermediate_size: int = 1408
    n_routed_experts: int | None = None
    num_local_experts: int | None = None  # alternative name of n_routed_experts
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 1
    use_qk_norm: bool = False
    router_aux_loss_coef: float | None = None
    num_nextn_predict_layers: int | None = None  # MTP layers; a forward pass skips them
    num_mtp_layers: int | None = None  # alternative name of num_nextn_predict_layers

    @property
    def num_further_layers(self) -> int:
        """Number of MTP layers, after the last layer."""
        return self.num_nextn_predict_layers or self.num_mtp_layers or 0

    def read(self) -> Experts:
        """Read as transformers does: Glm4MoeTopkRouter and Glm4MoeMoE.

        Raises:
            ValueError: a key is unsupported; the text names it.
        """
        problems = [
            f"{key} {value} is not supported; supported: 1"
            for key in ("n_group", "topk_group")
            if (value := getattr(self, key)) != 1
        ]
        return _of_sigmoids(self, problems, num_experts=self.n_routed_experts or self.num_local_experts or 128)


class DeepseekV3Keys(msgspec.Struct, frozen=True):
    """Keys of DeepSeek-V3 in addition to those of Qwen3 and of its attention, with the class's defaults."""

    num_hidden_layers: int
    moe_intermediate_size: int = 2048
    n_routed_experts: int | None = None
    num_local_experts: int | None = None  # alternative name of n_routed_experts
    n_shared_experts: int | None = 1
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    n_group: int | None = 8
    topk_group: int | None = 4
    first_k_dense_replace: int = 3
    moe_layer_freq: int = 1
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    num_nextn_predict_layers: int | None = None  # MTP layers; a forward pass skips them
    num_mtp_layers: int | None = None  # alternative name of num_nextn_predict_layers

    @property
    def num_further_layers(self) -> int:
        """Number of MTP layers, after the last layer."""
        return self.num_nextn_predict_layers or self.num_mtp_layers or 0

    def read(self) -> Experts:
        """Read as transformers does: DeepseekV3TopkRouter and DeepseekV3MoE.

        Raises:
            ValueError: a key is unsupported; the text names it.
        """
        problems = Problems(
            f"{key} {value!r} is not supported; supported: {only!r}"
            for key, only in {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}.items()
            if (value := getattr(self, key)) != only
        )
        groups, of_token = problems.of(self._groups) or (None, None)
        return _of_sigmoids(
            self, problems, num_experts=self._num_experts, num_groups=groups, num_groups_per_tok=of_token
        )

    @property
    def _num_experts(self) -> int:
        return self.n_routed_experts or self.num_local_experts or 256

    def _groups(self) -> tuple[int | None, int | None]:
        """Number of expert groups and of groups per token; None if groups do not restrict the choice.

        transformers ranks groups by the sum of their two best scores, Megatron-core by that of their
        `num_experts_per_tok // topk_group` best scores.

        Raises:
            ValueError: the groups do not fit the experts, or both rankings differ.
        """
        groups, of_token = self.n_group or 1, self.topk_group or 1
        if groups == of_token:
            return None, None
        of_each = self._num_experts // groups
        if (
            self._num_experts % groups
            or of_token > groups
            or of_each < 2
            or of_each * of_token < self.num_experts_per_tok
        ):
            raise ValueError(
                f"n_group {groups} with topk_group {of_token} does not fit {self._num_experts} experts "
                f"with num_experts_per_tok {self.num_experts_per_tok}"
            )
        if self.num_experts_per_tok // of_token != 2:
            raise ValueError(
                f"topk_group {of_token} is not supported with num_experts_per_tok {self.num_experts_per_tok}; "
                f"supported: n_group, with half of num_experts_per_tok as topk_group"
            )
        return groups, of_token


ExpertKeys = Qwen3MoeKeys | Glm4MoeKeys | DeepseekV3Keys


def _of_sigmoids(
    keys: Glm4MoeKeys | DeepseekV3Keys,
    problems: list[str],
    *,
    num_experts: int,
    num_groups: int | None = None,
    num_groups_per_tok: int | None = None,
) -> Experts:
    """Experts of a router with sigmoid scores and a bias, as all such families have them."""
    if not keys.norm_topk_prob:
        problems.append("norm_topk_prob false is not supported for a router with sigmoid scores; supported: true")
    return _checked(
        Experts(
            layers=tuple(index >= keys.first_k_dense_replace for index in range(keys.num_hidden_layers)),
            num_experts=num_experts,
            num_experts_per_tok=keys.num_experts_per_tok,
            moe_intermediate_size=keys.moe_intermediate_size,
            score="sigmoid",
            has_bias=True,
            norm_topk_prob=keys.norm_topk_prob,
            routed_scaling_factor=keys.routed_scaling_factor,
            shared_intermediate_size=(keys.n_shared_experts or 0) * keys.moe_intermediate_size,
            num_groups=num_groups,
            num_groups_per_tok=num_groups_per_tok,
        ),
        problems,
    )


EXPERT_KEYS: Final[dict[str, type[Qwen3MoeKeys] | type[Glm4MoeKeys] | type[DeepseekV3Keys]]] = {
    "Qwen3MoeForCausalLM": Qwen3MoeKeys,
    "Glm4MoeForCausalLM": Glm4MoeKeys,
    "DeepseekV3ForCausalLM": DeepseekV3Keys,
}


def _checked(experts: Experts, problems: list[str]) -> Experts:
    """Return the experts. Raises Unsupported: there are problems, these or others."""
    if not 1 < experts.num_experts_per_tok <= experts.num_experts:
        problems.append(
            f"num_experts_per_tok {experts.num_experts_per_tok} is not supported; "
            f"supported: 2 to the number of experts, {experts.num_experts}"
        )
    if experts.moe_intermediate_size < 1:
        problems.append(f"moe_intermediate_size {experts.moe_intermediate_size} is not positive")
    if not any(experts.layers):
        problems.append("no layer has experts: a dense model needs another model_type")
    if problems:
        raise Unsupported(problems)
    return experts
