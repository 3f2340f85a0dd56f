"""Readers of config.json for mixtures of experts: layers that have them, and the router. No family's name."""

from collections.abc import Iterator
from typing import Any

import msgspec

from runtime.models.blocks import Experts, Mlp
from runtime.models.readers import GegluKeys, MlpKeys


class ExpertKeys(MlpKeys, frozen=True, kw_only=True):
    """Keys of experts, whatever their router."""

    moe_intermediate_size: int = 768
    num_experts_per_tok: int = 8
    num_local_experts: int | None = None  # alternative name of the number of experts
    norm_topk_prob: bool = True
    router_aux_loss_coef: float | None = None  # of a loss that transformers adds; trainer.megatron sets its own

    @property
    def number(self) -> int:
        """Number of experts."""
        raise NotImplementedError

    def is_sparse(self, index: int) -> bool:
        """Whether a layer has experts."""
        raise NotImplementedError

    def experts(self) -> Experts:
        """Return the experts of a layer that has them."""
        raise NotImplementedError

    def routed(self, **values: Any) -> Experts:
        """Return experts with the sizes that the keys say, and with other values of the router."""
        return Experts(
            num_experts=self.number,
            num_experts_per_tok=self.num_experts_per_tok,
            size=self.moe_intermediate_size,
            norm_topk_prob=self.norm_topk_prob,
            **values,
        )

    def block(self, index: int) -> Mlp | Experts:
        """Return the block of a layer."""
        return self.experts() if self.is_sparse(index) else Mlp(size=self.intermediate_size)

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        if not 1 < self.num_experts_per_tok <= self.number:
            yield (
                f"num_experts_per_tok {self.num_experts_per_tok} is not supported; "
                f"supported: 2 to the number of experts, {self.number}"
            )
        if self.moe_intermediate_size < 1:
            yield f"moe_intermediate_size {self.moe_intermediate_size} is not positive"
        if self.num_hidden_layers > 0 and not any(map(self.is_sparse, range(self.num_hidden_layers))):
            yield "no layer has experts: a dense model needs another model_type"


class SoftmaxExpertKeys(ExpertKeys, frozen=True, kw_only=True):
    """Keys of experts whose router has a softmax, in some layers."""

    num_experts: int = 128
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None

    @property
    def number(self) -> int:
        """Number of experts."""
        return self.num_local_experts or self.num_experts

    def is_sparse(self, index: int) -> bool:
        """Whether a layer has experts."""
        return index not in (self.mlp_only_layers or ()) and (index + 1) % max(self.decoder_sparse_step, 1) == 0

    def experts(self) -> Experts:
        """Return the experts of a layer that has them."""
        return self.routed(score="softmax", has_bias=False)

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        if self.decoder_sparse_step < 1:
            yield f"decoder_sparse_step {self.decoder_sparse_step} is not positive"


class SharedExpertKeys(SoftmaxExpertKeys, frozen=True, kw_only=True):
    """Keys of experts whose router has a softmax, with a shared expert behind a gate."""

    shared_expert_intermediate_size: int = 5632

    def experts(self) -> Experts:
        """Return the experts of a layer that has them."""
        size = self.shared_expert_intermediate_size
        return msgspec.structs.replace(super().experts(), shared_size=size, has_shared_gate=True)


class SigmoidExpertKeys(ExpertKeys, frozen=True, kw_only=True):
    """Keys of experts whose router has sigmoid scores and a bias, after some dense layers; and of MTP layers."""

    n_routed_experts: int = 256
    n_shared_experts: int | None = 1
    routed_scaling_factor: float = 1.0
    n_group: int | None = 1
    topk_group: int | None = 1
    first_k_dense_replace: int = 0
    num_nextn_predict_layers: int | None = None  # MTP layers; a forward pass skips them
    num_mtp_layers: int | None = None  # alternative name of num_nextn_predict_layers

    @property
    def num_further_layers(self) -> int:
        """Number of MTP layers, after the last layer."""
        return self.num_nextn_predict_layers or self.num_mtp_layers or 0

    @property
    def number(self) -> int:
        """Number of experts."""
        return self.num_local_experts or self.n_routed_experts

    @property
    def groups(self) -> tuple[int, int] | None:
        """Number of expert groups, and of those that a token chooses from. None: they do not restrict the choice."""
        groups = (self.n_group or 1, self.topk_group or 1)
        return None if groups[0] == groups[1] else groups

    def is_sparse(self, index: int) -> bool:
        """Whether a layer has experts."""
        return index >= self.first_k_dense_replace

    def experts(self) -> Experts:
        """Return the experts of a layer that has them."""
        groups, of_token = self.groups or (None, None)
        return self.routed(
            score="sigmoid",
            has_bias=True,
            routed_scaling_factor=self.routed_scaling_factor,
            shared_size=(self.n_shared_experts or 0) * self.moe_intermediate_size,
            num_groups=groups,
            num_groups_per_tok=of_token,
        )

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        if not self.norm_topk_prob:
            yield "norm_topk_prob false is not supported for a router with sigmoid scores; supported: true"
        if self.groups is not None:
            yield from self._group_problems(*self.groups)

    def _group_problems(self, groups: int, of_token: int) -> Iterator[str]:
        """Yield what does not fit the experts, or makes both rankings of groups differ.

        transformers ranks groups by the sum of their two best scores, Megatron-core by that of their
        `num_experts_per_tok // topk_group` best scores.
        """
        of_each, chosen = self.number // groups, self.num_experts_per_tok
        if self.number % groups or of_token > groups or of_each < 2 or of_each * of_token < chosen:
            yield (
                f"n_group {groups} with topk_group {of_token} does not fit {self.number} experts "
                f"with num_experts_per_tok {chosen}"
            )
        elif chosen // of_token != 2:
            yield (
                f"topk_group {of_token} is not supported with num_experts_per_tok {chosen}; "
                f"supported: n_group, with half of num_experts_per_tok as topk_group"
            )


class PublishedExpertKeys(SigmoidExpertKeys, frozen=True, kw_only=True):
    """Keys of such experts, with those of published code that transformers' classes do not read."""

    moe_layer_freq: int = 1
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        for key, only in {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}.items():
            if getattr(self, key) != only:
                yield f"{key} {getattr(self, key)!r} is not supported; supported: {only!r}"


class TypedExpertKeys(PublishedExpertKeys, frozen=True, kw_only=True):
    """Keys of such experts in the layers that mlp_layer_types names, or else after the first ones."""

    mlp_layer_types: tuple[str, ...] | None = None

    def is_sparse(self, index: int) -> bool:
        """Whether a layer has experts."""
        return super().is_sparse(index) if self.mlp_layer_types is None else self.mlp_layer_types[index] == "sparse"

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        kinds, number = self.mlp_layer_types, self.num_hidden_layers
        if kinds is not None and (len(kinds) != number or {*kinds} - {"dense", "sparse"}):
            yield f"mlp_layer_types is not supported; supported: {number} of 'dense' and 'sparse'"
            return
        yield from super().problems()


class FurtherExpertKeys(GegluKeys, frozen=True, kw_only=True):
    """Keys of MLPs, and of experts that each layer has beside its MLP if it is so switched on."""

    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None

    def block(self, index: int) -> Mlp | Experts:
        """Return the block of a layer. The MLP is the shared expert."""
        if not self.enable_moe_block:
            return super().block(index)
        return Experts(
            num_experts=self.num_experts or 0,
            num_experts_per_tok=self.top_k_experts or 0,
            size=self.moe_intermediate_size or 0,
            shared_size=self.intermediate_size,
            score="softmax",
            has_bias=False,
            norm_topk_prob=True,
            activation="gelu_tanh",
            has_norms=True,
            router="router.proj",
            is_stacked=True,
        )

    def problems(self) -> Iterator[str]:
        """Yield each value that is not supported."""
        yield from super().problems()
        if not self.enable_moe_block:
            return
        if (self.moe_intermediate_size or 0) < 1:
            yield f"moe_intermediate_size {self.moe_intermediate_size} is not positive"
        if not 1 < (self.top_k_experts or 0) <= (self.num_experts or 0):
            yield (
                f"top_k_experts {self.top_k_experts} is not supported; supported: 2 to num_experts, {self.num_experts}"
            )
