"""The objective of a recipe as formulas, with its values and sources: what `--plan` shows. Pure."""

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from runtime.settings.derived import (
    agg_mode,
    estimator,
    has_critic,
    loss_mode,
    reads_reference,
    rejection_bounds,
    teaches_advantages,
    trains_demonstrations,
    trains_pairs,
    trains_reward_model,
    uses_topk,
)
from runtime.settings.recipe import Recipe
from runtime.settings.tables.algorithm import AlgorithmConfig, Estimator, LossMode


class PlannedTerm(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the objective."""

    name: str
    formula: str
    source: str  # a paper, a project, or the setting that the term comes from


ADVANTAGES: Final[Mapping[Estimator, tuple[str, str]]] = {  # without normalisation of rewards where it is off
    "grpo": ("(R - mean of group) / (std of group + 1e-6)", "GRPO, arXiv 2402.03300"),
    "gspo": ("(R - mean of group) / (std of group + 1e-6)", "GRPO, arXiv 2402.03300"),
    "cispo": ("(R - mean of group) / (std of group + 1e-6)", "GRPO, arXiv 2402.03300"),
    "rloo": ("R - mean of the group's others", "RLOO, arXiv 2402.14740"),
    "reinforce": ("R - mean of batch", "REINFORCE, Williams 1992"),
    "reinforce_plus_plus": ("r + {gamma} A of the next token", "REINFORCE++, arXiv 2501.03262"),
    "reinforce_plus_plus_baseline": ("R - mean of group", "REINFORCE++, arXiv 2501.03262"),
    "opo": ("R - mean of group weighted by length", "OPO, arXiv 2505.23585"),
    "gpg": ("(R - mean of group) samples / samples with R other than 0", "GPG, arXiv 2504.02546"),
    "maxrl": ("(R - mean of group) / mean of group", "MaxRL, arXiv 2602.02710"),
    "grpo_passk": ("(best R - second best R) / (std of group + 1e-6) for the best sample, else 0", "arXiv 2503.19595"),
    "gdpo": ("sum of w (R_k - mean of group) / (std of group + 1e-6) over {rewards}", "GDPO, arXiv 2601.05242"),
    "remax": ("R - R of the prompt's greedy sample", "ReMax, arXiv 2310.10505"),
    "ppo": ("sum of ({gamma} x {lambda})^k (r_k + {gamma} V_k+1 - V_k) over the next tokens", "GAE, arXiv 1506.02438"),
}
LOSSES: Final[Mapping[LossMode, tuple[str, str]]] = {
    "ppo": ("max(-r A, -clip(r, {low}, {high}) A){dual}, {ratio}", "PPO, arXiv 1707.06347"),
    "gspo": ("max(-s A, -clip(s, {low}, {high}) A){dual}, {sequence}", "GSPO, arXiv 2507.18071"),
    "cispo": ("-sg(clip(r, {low}, {high})) A log p, {ratio}", "CISPO, arXiv 2506.13585"),
    "dppo_tv": ("-A sg(min(r, {cap})) log p unless |p - p_old| > {below} (up: {above})", "DPPO, arXiv 2602.04879"),
    "dppo_kl": ("-A sg(min(r, {cap})) log p unless KL(p_old, p) > {below} (up: {above})", "DPPO, arXiv 2602.04879"),
    "prime_rl": (
        "-{adv}A r + {kl_tau} (log r)^2, A = 0 where p - q > {mask_high} or < -{mask_low}, r = policy p / engine q",
        "prime-rl's default; arXiv 2602.04879",
    ),
    "prime_rl_ipo": (
        "-{adv}A r + {kl_tau} (log r)^2, A = 0 where |p - q| > {ipo}, r = policy p / engine q",
        "prime-rl",
    ),
    "sapo": ("-A sigmoid(t (r - 1)) 4 / t, t = {tau_pos} for A > 0, else {tau_neg}, {ratio}", "SAPO, arXiv 2511.20347"),
    "gmpo": ("-mean(A) exp(mean(log r limited to [-{below}, {above}])), {ratio}", "GMPO, arXiv 2507.20673"),
    "decoupled_ppo": (
        "sg(old policy / engine) max(-r A, -clip(r, {low}, {high}) A){dual}, {ratio}",
        "decoupled PPO, arXiv 2505.24298",
    ),
    "gpg": ("-A log p", "GPG, arXiv 2504.02546"),
}
LAST_TOKEN: Final[Mapping[str, str]] = {"reinforce_plus_plus": "trained", "ppo": "response"}  # has the reward
LEVELS: Final = {"token": "", "sequence": " of the sample's product", "geometric": " of the sample's geometric mean"}
REDUCTIONS: Final = {
    "rollout-mean": "mean over rollouts of their means over tokens",
    "token-mean": "mean over tokens",
    "seq-mean-token-mean": "mean over samples of their means over tokens",
    "seq-mean-token-sum-norm": "mean over rollouts of their sums over tokens / {scale}",
}


def objective_of(recipe: Recipe) -> tuple[PlannedTerm, ...]:
    """Describe the loss that a recipe minimises, term by term."""
    if trains_reward_model(recipe):
        return tuple(_reward_model(recipe.algorithm))
    if trains_pairs(recipe):
        return tuple(_preference(recipe.algorithm))
    if trains_demonstrations(recipe):
        return (
            _term("loss", "-log p", "cross-entropy"),
            _term("reduction", _reduction(recipe), _reduction_source(recipe.algorithm)),
        )
    return tuple(_terms(recipe))


def _preference(algorithm: AlgorithmConfig) -> Iterator[PlannedTerm]:
    beta, smoothing = algorithm.dpo_beta, algorithm.label_smoothing
    over = "mean" if algorithm.preference_loss == "ipo" else "sum"
    yield _term("margin", f"h = {over} of log(policy / reference), chosen - rejected", "model.ref_load")
    yield from _reference(algorithm)
    if algorithm.preference_loss == "ipo":
        yield _term("loss", f"(h - {1 / (2 * beta):g})^2", "IPO, arXiv 2310.12036")
    else:
        yield _term("loss", _sigmoid(f"{beta:g} h", smoothing), "DPO, arXiv 2305.18290")
    yield _term("reduction", "mean over pairs", "algorithm.loss_type")


def _reward_model(algorithm: AlgorithmConfig) -> Iterator[PlannedTerm]:
    yield _term("margin", "h = reward at the last token, chosen - rejected", "value head, without bias")
    yield _term("loss", _sigmoid("h", algorithm.label_smoothing), "Bradley-Terry; InstructGPT, arXiv 2203.02155")
    yield _term("reduction", "mean over pairs", "algorithm.loss_type")


def _sigmoid(margin: str, smoothing: float) -> str:
    swapped = f" - {smoothing:g} log sigmoid(-{margin})" if smoothing else ""
    kept = f"{1 - smoothing:g} " if smoothing else ""
    return f"-{kept}log sigmoid({margin}){swapped}"


def _terms(recipe: Recipe) -> Iterator[PlannedTerm]:
    algorithm = recipe.algorithm
    yield from _penalties(recipe)
    yield from _token_reward(algorithm)
    yield _advantage(algorithm)
    if teaches_advantages(algorithm):
        yield _term("teacher", f"A - {algorithm.opd_kl_coef:g} log(old policy / teacher)", "algorithm.use_opd")
    yield from _critic(recipe)
    yield _policy_loss(algorithm)
    if algorithm.keep_old_actor:
        kept = f"= the weights that sampled the token, kept for {recipe.rollout.max_token_staleness} train steps"
        yield _term("old policy", kept, "algorithm.keep_old_actor")
    yield from _corrections(algorithm)
    if algorithm.kl_loss_coef:
        factor = " x policy / old policy" if algorithm.use_unbiased_kl else ""
        divergence = f"+ {algorithm.kl_loss_coef:g} {algorithm.kl_loss_type}(policy, reference){factor}"
        yield _term("divergence", divergence, "algorithm.kl_loss_coef, kl_loss_type")
    if reads_reference(algorithm):
        yield from _reference(algorithm)
    if algorithm.entropy_coef or algorithm.entropy_coef_end:
        end = algorithm.entropy_coef_end
        until = "" if end is None else f", {end:g} at the last step"
        yield _term("entropy", f"- {algorithm.entropy_coef:g} entropy{until}", "algorithm.entropy_coef")
    if uses_topk(algorithm):
        yield _distillation(algorithm)
    if algorithm.positive_example_nll_weight:
        likelihood = f"+ {algorithm.positive_example_nll_weight:g} mean of -log p over tokens of samples with R > 0"
        yield _term("likelihood", likelihood, "VAPO, arXiv 2504.05118")
    yield _term("reduction", _reduction(recipe), _reduction_source(algorithm))


def _distillation(algorithm: AlgorithmConfig) -> PlannedTerm:
    coef, weight = algorithm.distillation_loss_coef, algorithm.mixed_kl_weight
    outside = ""
    if algorithm.zero_outside_topk and algorithm.distillation_kl_type != "forward":
        outside = ", and q log(q / p) of all others with log p = -100"
    forward, reverse = "p log(p / q)", "q log(q / p)"
    divergence = {
        "forward": forward,
        "reverse": reverse,
        "mixed": f"{weight:g} {forward} + {1 - weight:g} {reverse}",
    }[algorithm.distillation_kl_type]
    over = f"the teacher's {algorithm.distillation_topk} likeliest tokens{outside}, p = teacher, q = policy"
    return _term("distillation", f"+ {coef:g} sum of {divergence} over {over}", "algorithm.distillation_loss_coef")


def _reference(algorithm: AlgorithmConfig) -> Iterator[PlannedTerm]:
    if (interval := algorithm.ref_update_interval) is not None:
        every = "every train step" if interval == 1 else f"every {interval} train steps"
        yield _term("reference", f"= policy {every}", "algorithm.ref_update_interval")


def _penalties(recipe: Recipe) -> Iterator[PlannedTerm]:
    algorithm, longest = recipe.algorithm, recipe.rollout.max_response_len
    if algorithm.length_penalty is not None:
        shares = (algorithm.num_output_tokens_weight, algorithm.num_input_tokens_weight, algorithm.num_turns_weight)
        output, given, turns = (f"{share:g}" for share in shares)
        formula = f"R - mean of group ({output} output + {given} input + {turns} turns), each / max of group"
        yield _term("reward", formula, "prime-rl; algorithm.length_penalty")
    if (size := algorithm.overlong_buffer_len) is not None:
        formula = f"R + {algorithm.overlong_penalty_factor:g} min(({longest - size} - length) / {size}, 0)"
        yield _term("reward", formula, "DAPO, arXiv 2503.14476; algorithm.overlong_buffer_len")
    if algorithm.kl_before_normalization:
        formula = f"R - {algorithm.kl_coef:g} sum of {algorithm.kl_loss_type}(old policy, reference) over the sample"
        yield _term("reward", formula, "algorithm.kl_coef, kl_loss_type, kl_before_normalization")


def _token_reward(algorithm: AlgorithmConfig) -> Iterator[PlannedTerm]:
    """Yield the reward of a token, for estimators that sum these rewards."""
    if estimator(algorithm) in LAST_TOKEN:
        formula = f"r = R at the last {LAST_TOKEN[estimator(algorithm)]} token{_penalty(algorithm)}"
        yield _term("token reward", formula, "algorithm.kl_coef" if algorithm.kl_coef else "algorithm.gamma")
        if not algorithm.discount_tool_tokens:
            yield _term("next token", "the next trained token", "algorithm.discount_tool_tokens")


def _penalty(algorithm: AlgorithmConfig) -> str:
    """Return the divergence that each token loses. Empty: none."""
    if not algorithm.kl_coef or algorithm.kl_before_normalization:
        return ""
    return f" - {algorithm.kl_coef:g} {algorithm.kl_loss_type}(old policy, reference)"


def _named(algorithm: AlgorithmConfig) -> str:
    keys = algorithm.gdpo_reward_keys
    weights = algorithm.gdpo_reward_weights or (1.0,) * len(keys)
    return ", ".join(f"{weight:g} {key}" for weight, key in zip(weights, keys, strict=False))


def _advantage(algorithm: AlgorithmConfig) -> PlannedTerm:
    formula, source = ADVANTAGES[algorithm.advantage_estimator]
    if algorithm.disable_grpo_std_normalization:
        formula = formula.replace("(R - mean of group) / (std of group + 1e-6)", "R - mean of group")
        formula = formula.replace(" / (std of group + 1e-6)", "")
    if algorithm.disable_rewards_normalization:
        formula = "R"
    formula = formula.replace("{rewards}", _named(algorithm)).replace("{gamma}", f"{algorithm.gamma:g}")
    by_length = f"(1 - 1 / ({algorithm.length_adaptive_alpha:g} x length))"
    formula = formula.replace("{lambda}", by_length if algorithm.length_adaptive_alpha else f"{algorithm.lambd:g}")
    if algorithm.advantage_estimator not in LAST_TOKEN:
        formula += _penalty(algorithm)
    whitened = ", whitened over the batch's tokens" if algorithm.normalize_advantages else ""
    return _term("advantage", f"A = {formula}{whitened}", source)


def _critic(recipe: Recipe) -> Iterator[PlannedTerm]:
    if not has_critic(recipe):
        return
    algorithm = recipe.algorithm
    coef = "" if algorithm.value_loss_coef == 1 else f"{algorithm.value_loss_coef:g} "
    clipped = f"clip(V, V_old - {algorithm.value_clip:g}, V_old + {algorithm.value_clip:g})"
    formula = f"{coef}max((V - G)^2, ({clipped} - G)^2)"
    yield _term("critic loss", formula, "PPO; algorithm.value_clip, value_loss_coef")
    if algorithm.num_critic_only_steps:
        yield _term(
            "critic only", f"the first {algorithm.num_critic_only_steps} steps", "algorithm.num_critic_only_steps"
        )


def _policy_loss(algorithm: AlgorithmConfig) -> PlannedTerm:
    mode = loss_mode(algorithm)
    if mode == "custom":
        return _term("policy loss", f"{algorithm.custom_loss}", "algorithm.custom_loss")
    formula, source = LOSSES[mode]
    return _term("policy loss", formula.format_map(_values(algorithm)), source)


def _values(algorithm: AlgorithmConfig) -> Mapping[str, str]:
    below, above = algorithm.eps_clip, algorithm.eps_clip_high
    above, dual = below if above is None else above, algorithm.eps_clip_c
    old = "engine" if algorithm.use_rollout_logprobs else "old policy"
    shared = {"ratio": f"r = policy / {old}", "sequence": f"s = geometric mean of policy / {old} over the sample"}
    numbers = {
        "low": 1 - below,
        "high": 1 + above,
        "below": below,
        "above": above,
        "cap": dual or 20.0,
        "kl_tau": algorithm.kl_tau,
        "mask_low": algorithm.dppo_mask_low,
        "mask_high": algorithm.dppo_mask_high,
        "ipo": algorithm.ipo_threshold,
        "tau_pos": algorithm.tau_pos,
        "tau_neg": algorithm.tau_neg,
    }
    shared["adv"] = "" if algorithm.adv_tau == 1 else f"{algorithm.adv_tau:g} "
    bound = "" if dual is None else f", at most -{dual:g} A for A < 0"
    return {**shared, **{name: f"{value:g}" for name, value in numbers.items()}, "dual": bound}


def _corrections(algorithm: AlgorithmConfig) -> Iterator[PlannedTerm]:
    ratio = f"{'policy' if algorithm.bypass_mode else 'old policy'} / engine"
    if algorithm.custom_tis is not None:
        yield _term("weight", f"x {algorithm.custom_tis}", "algorithm.custom_tis")
    elif algorithm.use_tis:
        low, high = algorithm.tis_clip_low, algorithm.tis_clip
        weights = {
            "truncate": f"min(w, {high:g})",
            "clip": f"clip(w, {low:g}, {high:g})",
            "mask": f"w, or 0 outside of [{low:g}, {high:g}]",
        }[algorithm.tis_mode]
        mean = ", divided by its mean" if algorithm.tis_batch_normalize else ""
        yield _term("weight", f"x {weights}{mean}, w = {ratio}{LEVELS[algorithm.tis_level]}", "algorithm.use_tis")
    if algorithm.use_rs:
        yield _term("rejection", f"x 0 where {_rejected(algorithm, ratio)}", "algorithm.use_rs")
    if algorithm.use_opsm:
        opsm = f"x 0 where A < 0 and mean of log(old policy / policy) over the sample > {algorithm.opsm_delta:g}"
        yield _term("rejection", opsm, "DeepSeek-V3.2, arXiv 2512.02556")


def _rejected(algorithm: AlgorithmConfig, ratio: str) -> str:
    level, (low, high) = LEVELS[algorithm.rs_level], rejection_bounds(algorithm)
    if algorithm.rs_metric == "ratio":
        rejected = f"{ratio}{level} is outside of [{low:g}, {high:g}]"
    else:
        rejected = f"the binary divergence{level} of {ratio.replace(' /', ' and')} is above {high:g}"
    veto = algorithm.rs_veto_threshold
    return rejected if veto is None else f"{rejected}, or any token of the sample has a ratio below {veto:g}"


def _reduction(recipe: Recipe) -> str:
    scale = recipe.algorithm.loss_scale_factor or recipe.rollout.max_response_len
    mode = agg_mode(recipe.algorithm)
    return f"{recipe.algorithm.custom_pg_loss_reducer}" if mode == "custom" else REDUCTIONS[mode].format(scale=scale)


def _reduction_source(algorithm: AlgorithmConfig) -> str:
    if algorithm.custom_pg_loss_reducer is not None:
        return "algorithm.custom_pg_loss_reducer"
    return "algorithm.calculate_per_token_loss" if algorithm.calculate_per_token_loss else "algorithm.loss_agg_mode"


def _term(name: str, formula: str, source: str) -> PlannedTerm:
    return PlannedTerm(name=name, formula=formula, source=source)
