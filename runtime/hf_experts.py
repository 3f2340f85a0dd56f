"""The mixture of experts of a model, read from the keys of its config.json: Qwen3-MoE's, GLM-4-MoE's, DeepSeek-V3's."""

from typing import Final

import msgspec


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Which layers have experts, and how a token's are chosen and weighed."""

    layers: tuple[bool, ...]  # of each layer whether it has experts, in the place of one MLP
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    score: str  # "softmax" or "sigmoid" of the router's logits
    has_bias: bool  # a bias of each expert that counts in the choice alone
    norm_topk_prob: bool  # the chosen experts' weights sum to one
    routed_scaling_factor: float = 1.0
    shared_intermediate_size: int = 0  # of the expert that every token goes through; 0: there is none
    num_groups: int | None = None  # of experts; none: a token's experts are chosen among all
    num_groups_per_tok: int | None = None  # those with the largest sums of two scores, of whose experts it is chosen


class Qwen3MoeKeys(msgspec.Struct, frozen=True):
    """Keys of Qwen3-MoE beside those of Qwen3, with the class's defaults."""

    num_hidden_layers: int
    moe_intermediate_size: int = 768
    num_experts: int | None = None
    num_local_experts: int | None = None  # another name of the same
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None
    router_aux_loss_coef: float | None = None  # of a loss that transformers adds; trainer.megatron says ours

    def read(self) -> Experts:
        """As transformers, Qwen3MoeDecoderLayer and Qwen3MoeTopKRouter.

        Raises:
            ValueError: says which key is in the way.
        """
        if self.decoder_sparse_step < 1:
            raise ValueError(f"decoder_sparse_step {self.decoder_sparse_step} is not positive")
        dense = self.mlp_only_layers or ()
        layers = tuple(
            index not in dense and (index + 1) % self.decoder_sparse_step == 0
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
            )
        )


class Glm4MoeKeys(msgspec.Struct, frozen=True):
    """Keys of GLM-4-MoE beside those of Qwen3, with the class's defaults."""

    num_hidden_layers: int
    moe_intermediate_size: int = 1408
    n_routed_experts: int | None = None
    num_local_experts: int | None = None  # another name of the same
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 1
    use_qk_norm: bool = False
    router_aux_loss_coef: float | None = None
    num_nextn_predict_layers: int | None = None  # further layers, which a forward pass does not go through
    num_mtp_layers: int | None = None  # another name of the same

    @property
    def num_further_layers(self) -> int:
        """Layers behind the last one, for the tokens after the next."""
        return self.num_nextn_predict_layers or self.num_mtp_layers or 0

    def read(self) -> Experts:
        """As transformers, Glm4MoeTopkRouter and Glm4MoeMoE.

        Raises:
            ValueError: says which key is in the way.
        """
        for key in ("n_group", "topk_group"):
            if (value := getattr(self, key)) != 1:
                raise ValueError(f"{key} {value} is not supported; supported: 1")
        return _of_sigmoids(self, num_experts=self.n_routed_experts or self.num_local_experts or 128)


class DeepseekV3Keys(msgspec.Struct, frozen=True):
    """Keys of DeepSeek-V3 beside those of Qwen3 and of its attention, with the class's defaults."""

    num_hidden_layers: int
    moe_intermediate_size: int = 2048
    n_routed_experts: int | None = None
    num_local_experts: int | None = None  # another name of the same
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
    num_nextn_predict_layers: int | None = None  # further layers, which a forward pass does not go through
    num_mtp_layers: int | None = None  # another name of the same
    aux_loss_alpha: float | None = None  # of DeepSeek's own training, as the next two
    seq_aux: bool | None = None
    ep_size: int | None = None
    auto_map: dict[str, str] | None = None  # code beside the weights, which nobody here runs

    @property
    def num_further_layers(self) -> int:
        """Layers behind the last one, for the tokens after the next."""
        return self.num_nextn_predict_layers or self.num_mtp_layers or 0

    def read(self) -> Experts:
        """As transformers, DeepseekV3TopkRouter and DeepseekV3MoE.

        Raises:
            ValueError: says which key is in the way.
        """
        for key, only in {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}.items():
            if (value := getattr(self, key)) != only:
                raise ValueError(f"{key} {value!r} is not supported; supported: {only!r}")
        groups, of_token = self._groups()
        return _of_sigmoids(self, num_experts=self._num_experts, num_groups=groups, num_groups_per_tok=of_token)

    @property
    def _num_experts(self) -> int:
        return self.n_routed_experts or self.num_local_experts or 256

    def _groups(self) -> tuple[int | None, int | None]:
        """Groups, and those of a token, where they matter. Megatron-core sums as many scores of a group as make up a
        token's experts, transformers always two."""
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
                f"n_group {groups} with topk_group {of_token} does not fit {self._num_experts} experts, "
                f"of which a token has {self.num_experts_per_tok}"
            )
        if self.num_experts_per_tok // of_token != 2:
            raise ValueError(
                f"topk_group {of_token} is not supported with num_experts_per_tok {self.num_experts_per_tok}; "
                f"supported: half of it, and n_group"
            )
        return groups, of_token


ExpertKeys = Qwen3MoeKeys | Glm4MoeKeys | DeepseekV3Keys


def _of_sigmoids(
    keys: Glm4MoeKeys | DeepseekV3Keys,
    *,
    num_experts: int,
    num_groups: int | None = None,
    num_groups_per_tok: int | None = None,
) -> Experts:
    """What a router with sigmoids and a bias has in all families."""
    if not keys.norm_topk_prob:
        raise ValueError("norm_topk_prob false is not supported of a router with sigmoids")
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
        )
    )


EXPERT_KEYS: Final[dict[str, type[Qwen3MoeKeys] | type[Glm4MoeKeys] | type[DeepseekV3Keys]]] = {
    "Qwen3MoeForCausalLM": Qwen3MoeKeys,
    "Glm4MoeForCausalLM": Glm4MoeKeys,
    "DeepseekV3ForCausalLM": DeepseekV3Keys,
}


def _checked(experts: Experts) -> Experts:
    if not 1 < experts.num_experts_per_tok <= experts.num_experts:
        raise ValueError(
            f"num_experts_per_tok {experts.num_experts_per_tok} is not supported; "
            f"supported: 2 to the number of experts, {experts.num_experts}"
        )
    if experts.moe_intermediate_size < 1:
        raise ValueError(f"moe_intermediate_size {experts.moe_intermediate_size} is not positive")
    if not any(experts.layers):
        raise ValueError("none of its layers has experts: that is a dense model, of another model_type")
    return experts
