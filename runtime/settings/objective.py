"""The objective of a recipe as formulas, with its values and sources: what `--plan` shows. Pure."""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from runtime.settings.derived import (
    has_critic,
    reads_reference,
    rejection_bounds,
    teaches_advantages,
    topk_divergence,
    trains_demonstrations,
    trains_pairs,
    trains_reward_model,
)
from runtime.settings.reading.config import Choice
from runtime.settings.recipe import Recipe
from runtime.settings.tables.algorithm import AlgorithmConfig, BinaryKlRs, CustomReduction, ReverseKl, Rs, TopkKl
from runtime.settings.tables.estimators import Gae


class PlannedTerm(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the objective."""

    name: str
    formula: str
    source: str  # a paper, a project, or the setting that the term comes from


LEVELS: Final = {"token": "", "sequence": " of the sample's product", "geometric": " of the sample's geometric mean"}


class _Shown(dict[str, str]):
    """The values that a formula names: fields and properties of its table, beside those that are given."""

    def __init__(self, table: Choice, **given: str) -> None:
        super().__init__(given)
        self._table = table

    def __missing__(self, name: str) -> str:
        value: Any = getattr(self._table, name)
        return value if isinstance(value, str) else f"{value:g}"


def formula_of(table: Choice, **given: str) -> str:
    """Return the formula of a loss, an estimator, a correction or a reduction with its values.

    Args:
        table: it names the formula.
        given: values that the formula has from elsewhere.
    """
    return table.formula.format_map(_Shown(table, **given))


def default_formula(table: type[Choice]) -> str:
    """Return the formula of a type with its defaults; empty if it has none, or a key without a default."""
    if not table.formula or any(field.required for field in msgspec.structs.fields(table)):
        return ""
    return formula_of(table(), old="old policy", scale="length")


def objective_of(recipe: Recipe) -> tuple[PlannedTerm, ...]:
    """Describe the loss that a recipe minimises, term by term."""
    if trains_reward_model(recipe):
        return tuple(_reward_model(recipe.algorithm))
    if trains_pairs(recipe):
        return tuple(_preference(recipe.algorithm))
    if trains_demonstrations(recipe):
        loss = recipe.algorithm.loss
        return (
            _term("loss", formula_of(loss), loss.source),
            _term("reduction", _reduction(recipe), _reduction_source(recipe.algorithm)),
        )
    return tuple(_terms(recipe))


def _preference(algorithm: AlgorithmConfig) -> Iterator[PlannedTerm]:
    over = "mean" if algorithm.loss.type == "preference_ipo" else "sum"
    yield _term("margin", f"h = {over} of log(policy / reference), chosen - rejected", "model.ref_load")
    yield from _reference(algorithm)
    yield from _of_pairs(algorithm)


def _reward_model(algorithm: AlgorithmConfig) -> Iterator[PlannedTerm]:
    yield _term("margin", "h = reward at the last token, chosen - rejected", "value head, without bias")
    yield from _of_pairs(algorithm)


def _of_pairs(algorithm: AlgorithmConfig) -> Iterator[PlannedTerm]:
    yield _term("loss", formula_of(algorithm.loss), algorithm.loss.source)
    yield _term("reduction", "mean over pairs", "algorithm.loss.type")


def _terms(recipe: Recipe) -> Iterator[PlannedTerm]:
    algorithm, kl = recipe.algorithm, recipe.algorithm.kl
    yield from _penalties(recipe)
    yield from _token_reward(algorithm)
    yield _advantage(algorithm)
    if algorithm.opd is not None and teaches_advantages(algorithm):
        yield _term("teacher", f"A - {algorithm.opd.kl_coef:g} log(old policy / teacher)", "algorithm.opd")
    yield from _critic(recipe)
    old = "engine" if algorithm.use_rollout_logprobs else "old policy"
    yield _term("policy loss", formula_of(algorithm.loss, old=old), algorithm.loss.source)
    if algorithm.keep_old_actor:
        kept = f"= the weights that sampled the token, kept for {recipe.rollout.max_token_staleness} train steps"
        yield _term("old policy", kept, "algorithm.keep_old_actor")
    yield from _corrections(algorithm)
    if kl.loss_coef:
        factor = " x policy / old policy" if kl.is_unbiased else ""
        divergence = f"+ {kl.loss_coef:g} {kl.type}(policy, reference){factor}"
        yield _term("divergence", divergence, "algorithm.kl.loss_coef, type")
    if reads_reference(algorithm):
        yield from _reference(algorithm)
    if algorithm.entropy_coef or algorithm.entropy_coef_end:
        end = algorithm.entropy_coef_end
        until = "" if end is None else f", {end:g} at the last step"
        yield _term("entropy", f"- {algorithm.entropy_coef:g} entropy{until}", "algorithm.entropy_coef")
    if (distillation := topk_divergence(algorithm)) is not None:
        yield _distillation(distillation)
    if algorithm.positive_example_nll_weight:
        likelihood = f"+ {algorithm.positive_example_nll_weight:g} mean of -log p over tokens of samples with R > 0"
        yield _term("likelihood", likelihood, "VAPO, arXiv 2504.05118")
    yield _term("reduction", _reduction(recipe), _reduction_source(algorithm))


def _distillation(topk: TopkKl) -> PlannedTerm:
    outside = ""
    if isinstance(topk, ReverseKl) and topk.zero_outside_topk:
        outside = ", and q log(q / p) of all others with log p = -100"
    over = f"the teacher's {topk.topk} likeliest tokens{outside}, p = teacher, q = policy"
    return _term("distillation", f"+ {topk.coef:g} sum of {formula_of(topk)} over {over}", "algorithm.opd.distillation")


def _reference(algorithm: AlgorithmConfig) -> Iterator[PlannedTerm]:
    if (interval := algorithm.ref_update_interval) is not None:
        every = "every train step" if interval == 1 else f"every {interval} train steps"
        yield _term("reference", f"= policy {every}", "algorithm.ref_update_interval")


def _penalties(recipe: Recipe) -> Iterator[PlannedTerm]:
    algorithm, longest, kl = recipe.algorithm, recipe.rollout.max_response_len, recipe.algorithm.kl
    if (penalty := algorithm.length_penalty) is not None:
        shares = (penalty.num_output_tokens_weight, penalty.num_input_tokens_weight, penalty.num_turns_weight)
        output, given, turns = (f"{share:g}" for share in shares)
        formula = f"R - mean of group ({output} output + {given} input + {turns} turns), each / max of group"
        yield _term("reward", formula, "prime-rl; algorithm.length_penalty")
    if (size := algorithm.overlong_buffer_len) is not None:
        formula = f"R + {algorithm.overlong_penalty_factor:g} min(({longest - size} - length) / {size}, 0)"
        yield _term("reward", formula, "DAPO, arXiv 2503.14476; algorithm.overlong_buffer_len")
    if kl.before_normalization:
        formula = f"R - {kl.reward_coef:g} sum of {kl.type}(old policy, reference) over the sample"
        yield _term("reward", formula, "algorithm.kl.reward_coef, type, before_normalization")


def _token_reward(algorithm: AlgorithmConfig) -> Iterator[PlannedTerm]:
    """Yield the reward of a token, for estimators that sum these rewards."""
    estimator = algorithm.estimator
    if estimator.of_tokens:
        formula = f"r = R at the last {estimator.of_tokens} token{_penalty(algorithm)}"
        source = "algorithm.kl.reward_coef" if algorithm.kl.reward_coef else "algorithm.estimator.gamma"
        yield _term("token reward", formula, source)
        if not getattr(estimator, "discount_tool_tokens", True):
            yield _term("next token", "the next trained token", "algorithm.estimator.discount_tool_tokens")


def _penalty(algorithm: AlgorithmConfig) -> str:
    """Return the divergence that each token loses. Empty: none."""
    kl = algorithm.kl
    return (
        f" - {kl.reward_coef:g} {kl.type}(old policy, reference)"
        if kl.reward_coef and not kl.before_normalization
        else ""
    )


def _advantage(algorithm: AlgorithmConfig) -> PlannedTerm:
    estimator = algorithm.estimator
    formula = formula_of(estimator) if getattr(estimator, "normalize", True) else "R"
    if not estimator.of_tokens:
        formula += _penalty(algorithm)
    whitened = ", whitened over the batch's tokens" if algorithm.normalize_advantages else ""
    return _term("advantage", f"A = {formula}{whitened}", estimator.source)


def _critic(recipe: Recipe) -> Iterator[PlannedTerm]:
    estimator = recipe.algorithm.estimator
    if not has_critic(recipe) or not isinstance(estimator, Gae):
        return
    coef = "" if estimator.value_loss_coef == 1 else f"{estimator.value_loss_coef:g} "
    clipped = f"clip(V, V_old - {estimator.value_clip:g}, V_old + {estimator.value_clip:g})"
    formula = f"{coef}max((V - G)^2, ({clipped} - G)^2)"
    yield _term("critic loss", formula, "PPO; algorithm.estimator.value_clip, value_loss_coef")
    if steps := estimator.num_critic_only_steps:
        yield _term("critic only", f"the first {steps} steps", "algorithm.estimator.num_critic_only_steps")


def _corrections(algorithm: AlgorithmConfig) -> Iterator[PlannedTerm]:
    ratio = f"{'policy' if algorithm.bypass_mode else 'old policy'} / engine"
    if (tis := algorithm.tis) is not None:
        mean = ", divided by its mean" if tis.batch_normalize else ""
        of = "" if tis.type == "custom" else f"{mean}, w = {ratio}{LEVELS[tis.level]}"
        yield _term("weight", f"x {formula_of(tis)}{of}", "algorithm.tis")
    if algorithm.rs is not None:
        rejected = _rejected(algorithm.rs, rejection_bounds(algorithm), ratio)
        yield _term("rejection", f"x 0 where {rejected}", "algorithm.rs")
    if (delta := algorithm.opsm_delta) is not None:
        opsm = f"x 0 where A < 0 and mean of log(old policy / policy) over the sample > {delta:g}"
        yield _term("rejection", opsm, "DeepSeek-V3.2, arXiv 2512.02556")


def _rejected(rs: Rs, bounds: tuple[float, float], ratio: str) -> str:
    level, (low, high) = LEVELS[rs.level], bounds
    if isinstance(rs, BinaryKlRs):
        rejected = f"the binary divergence{level} of {ratio.replace(' /', ' and')} is above {high:g}"
    else:
        rejected = f"{ratio}{level} is outside of [{low:g}, {high:g}]"
    veto = rs.veto_threshold
    return rejected if veto is None else f"{rejected}, or any token of the sample has a ratio below {veto:g}"


def _reduction(recipe: Recipe) -> str:
    reduction = recipe.algorithm.reduction
    scale = getattr(reduction, "scale_factor", None) or recipe.rollout.max_response_len
    return formula_of(reduction, scale=str(scale))


def _reduction_source(algorithm: AlgorithmConfig) -> str:
    return f"algorithm.reduction.{'function' if isinstance(algorithm.reduction, CustomReduction) else 'type'}"


def _term(name: str, formula: str, source: str) -> PlannedTerm:
    return PlannedTerm(name=name, formula=formula, source=source)
