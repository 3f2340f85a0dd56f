"""The keys of `[algorithm]` before 29 November 2026, and what they are now: for hints, old run directories and dumps.

`FORMER` is the one table of them. The changelog has it too, and a test compares the two.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol, cast

from runtime.settings.reading.config import Config

TABLE: Final = "algorithm"
STILL: Final = "length_penalty"  # a text then, and a table of this name now
OPPOSITE: Final = ("disable_rewards_normalization", "disable_grpo_std_normalization")  # true there is false here
OF_LOSS: Final = (
    "eps_clip",
    "eps_clip_high",
    "eps_clip_c",
    "behav_imp_weight_cap",
    "dppo_mask_low",
    "dppo_mask_high",
    "ipo_threshold",
    "adv_tau",
    "kl_tau",
    "tau_pos",
    "tau_neg",
    "label_smoothing",
)
OF_ESTIMATOR: Final = (
    "group_of_one",
    "gamma",
    "discount_tool_tokens",
    "lambd",
    "length_adaptive_alpha",
    "value_clip",
    "value_loss_coef",
    "num_critic_only_steps",
)
OF_PENALTY: Final = ("num_output_tokens_weight", "num_input_tokens_weight", "num_turns_weight")
FORMER: Final[Mapping[str, str]] = {
    "loss_type": "loss.type",
    "loss_mode": "loss.type",
    "preference_loss": "loss.type",
    "custom_loss": "loss.function",
    "dpo_beta": "loss.beta",
    **{name: f"loss.{name}" for name in OF_LOSS},
    "advantage_estimator": "estimator.type",
    "custom_advantage": "estimator.function",
    "gdpo_reward_keys": "estimator.reward_keys",
    "gdpo_reward_weights": "estimator.reward_weights",
    "disable_rewards_normalization": "estimator.normalize",
    "disable_grpo_std_normalization": "estimator.normalize_std",
    "gae_lambda_value": "estimator.critic_lambd",
    **{name: f"estimator.{name}" for name in OF_ESTIMATOR},
    "loss_agg_mode": "reduction.type",
    "calculate_per_token_loss": "reduction.type",
    "custom_pg_loss_reducer": "reduction.function",
    "loss_scale_factor": "reduction.scale_factor",
    "count_masked_rollouts": "reduction.count_masked_rollouts",
    "kl_loss_type": "kl.type",
    "kl_loss_coef": "kl.loss_coef",
    "kl_coef": "kl.reward_coef",
    "kl_before_normalization": "kl.before_normalization",
    "kl_metric_interval": "kl.metric_interval",
    "use_unbiased_kl": "kl.unbiased",
    "use_tis": "tis.type",
    "tis_mode": "tis.type",
    "custom_tis": "tis.function",
    "tis_clip": "tis.upper_bound",
    "tis_clip_low": "tis.lower_bound",
    "tis_level": "tis.level",
    "tis_batch_normalize": "tis.batch_normalize",
    "use_rs": "rs.type",
    "rs_metric": "rs.type",
    "rs_level": "rs.level",
    "rs_lower_bound": "rs.lower_bound",
    "rs_upper_bound": "rs.upper_bound",
    "rs_veto_threshold": "rs.veto_threshold",
    "use_opsm": "opsm_delta",
    "use_opd": "opd.type",
    "opd_type": "opd.type",
    "opd_kl_coef": "opd.kl_coef",
    "distillation_loss_coef": "opd.distillation.coef",
    "distillation_kl_type": "opd.distillation.type",
    "distillation_topk": "opd.distillation.topk",
    "mixed_kl_weight": "opd.distillation.mixed_kl_weight",
    "zero_outside_topk": "opd.distillation.zero_outside_topk",
    STILL: f"{STILL}.type",
    **{name: f"length_penalty.{name}" for name in OF_PENALTY},
}


class Tables(Protocol):
    """The tables that a key with a `type` chooses from."""

    @property
    def tables(self) -> Mapping[str, type[Config]]:
        """The tables by their type."""
        ...


NAMING: Final = ("gspo", "cispo")  # estimators that named a loss
LOSSES: Final = {"sft_loss": "sft", "rm_loss": "rm"}
VALUES: Final[Mapping[str, str]] = {  # by key: what a key whose values have changed says now
    "loss_type": (
        '"sft_loss" is "sft", "dpo_loss" is "dpo" or "preference_ipo", "rm_loss" is "rm"; '
        'leave it out for "policy_loss"'
    ),
    "preference_loss": '"sigmoid" is "dpo", "ipo" is "preference_ipo"',
    "custom_loss": 'with algorithm.loss.type = "custom"',
    "advantage_estimator": '"gspo" and "cispo" are "grpo" with algorithm.loss.type = "gspo" or "cispo"',
    "custom_advantage": 'with algorithm.estimator.type = "custom"',
    "calculate_per_token_loss": 'true is "token-mean"',
    "custom_pg_loss_reducer": 'with algorithm.reduction.type = "custom"',
    "use_tis": 'true is "clip", or the former tis_mode',
    "custom_tis": 'with algorithm.tis.type = "custom"',
    "use_rs": 'true is "ratio", or the former rs_metric',
    "use_opsm": "true is the former opsm_delta, by default 1e-4",
    "use_opd": "true is the former opd_type",
    STILL: 'it is a table now, with type = "linear"',
    **dict.fromkeys(OPPOSITE, "the opposite"),
}


def former_keys() -> Iterator[tuple[str, str]]:
    """Yield every former key with one line that says what to write."""
    for name, place in FORMER.items():
        line = f"it is {TABLE}.{place} now" + (f": {VALUES[name]}" if name in VALUES else "")
        yield f"{TABLE}.{name}", line


def in_new_form(tables: dict[str, Any], known: Mapping[str, Tables]) -> dict[str, Any]:
    """Return the tables of a topology.json in today's form; other tables are returned as they are.

    A former key that had no effect is left out.

    Args:
        tables: of a run or a dump, as JSON.
        known: the tables that a key with a `type` chooses from, by the key.
    """
    given: Any = tables.get(TABLE)
    old = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    if not any(name in FORMER and name != STILL for name in old):
        return tables
    new = {name: value for name, value in old.items() if name not in FORMER}
    new["opsm_delta"] = old.get("opsm_delta", 1e-4) if old.get("use_opsm") else None
    types = dict(_types(old))
    for place, chosen in types.items():
        _put(new, place, None if chosen is None else {"type": chosen})
    for name, place in FORMER.items():
        table, _, key = place.rpartition(".")
        chosen = types.get(table)
        if name in old and chosen is not None and key in _keys(known[f"{TABLE}.{table}"].tables.get(chosen)):
            value = not old[name] if name in OPPOSITE else old[name]
            if value is not None and not (name == "length_adaptive_alpha" and not value):
                _put(new, place, value)
    _bound(old, new)
    return {**tables, TABLE: new}


def _types(old: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Yield the type of each table, outer tables first."""
    estimator = old.get("advantage_estimator", "grpo")
    named = estimator if estimator in NAMING else "ppo"
    trains = old.get("loss_type", "policy_loss")
    loss = "custom" if old.get("custom_loss") else old.get("loss_mode") or named
    if trains == "dpo_loss":
        loss = "preference_ipo" if old.get("preference_loss") == "ipo" else "dpo"
    yield "loss", LOSSES.get(trains, loss)
    yield "estimator", "custom" if old.get("custom_advantage") else "grpo" if estimator in NAMING else estimator
    by_tokens = "token-mean" if old.get("calculate_per_token_loss") else "rollout-mean"
    yield "reduction", "custom" if old.get("custom_pg_loss_reducer") else old.get("loss_agg_mode") or by_tokens
    yield "kl", old.get("kl_loss_type", "k1")
    mode = "custom" if old.get("custom_tis") else old.get("tis_mode", "clip")
    yield "tis", mode if old.get("use_tis") else None
    yield "rs", old.get("rs_metric", "ratio") if old.get("use_rs") else None
    teacher = old.get("opd_type") if old.get("use_opd") else None
    yield "opd", teacher
    if teacher == "sglang":
        yield (
            "opd.distillation",
            old.get("distillation_kl_type", "forward") if old.get("distillation_loss_coef") else None,
        )
    yield STILL, old.get(STILL)


def _keys(table: type[Config] | None) -> tuple[str, ...]:
    return () if table is None else table.__struct_fields__


def _put(tables: dict[str, Any], place: str, value: Any) -> None:
    *outer, name = place.split(".")
    for each in outer:
        tables = tables[each]
    tables[name] = value


def _bound(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Write what was shared: `tis_clip` was a bound of rejections without importance weights too."""
    rs, tis = new["rs"], new["tis"]
    if tis is not None and tis["type"] == "custom" and "tis_mode" in old:
        tis["mode"] = old["tis_mode"]
    if rs is not None and rs["type"] == "ratio" and tis is None and old.get("tis_clip", 2.0) != 2.0:
        rs.setdefault("upper_bound", old["tis_clip"])
