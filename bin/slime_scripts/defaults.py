"""What slime does beyond the values of flags: its defaults where ours differ, and the flags that it ignores."""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from bin.slime_scripts.given import Flags, Setting, answer_of, first, whole_number
from runtime.compat.slime.flags import Flag, Rule, from_slime
from runtime.settings.placement import MOST_TOKENS
from runtime.settings.reading.schema import chosen_keys
from runtime.settings.topology import Topology

ENGINES: Final = "engines.policy."
IGNORE_KL: Final = ("grpo", "gspo", "cispo")  # estimators with which slime has no use for --kl-coef
MTP_ALONE: Final = "slime trains MTP layers with --enable-mtp-training alone"
LORA: Final = "trainer.lora"
ALL_LINEAR: Final = "all-linear"
OF_ADAPTERS: Final = ("lora-alpha", "lora-dropout", "target-modules", "exclude-modules")
MODULES: Final[Mapping[str, tuple[str, ...]]] = {  # names of miles and Megatron for layers of Hugging Face
    ALL_LINEAR: ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
}


def absent_settings(flags: Flags, settled: Collection[str]) -> Iterator[Setting]:
    """Yield the keys that flags.toml names for absent flags, and note what no key can say.

    Args:
        settled: keys that have a value already.
    """
    demonstrates = first(flags.peek("loss-type")) == "sft_loss"
    has_engines = f"{ENGINES}gpus" in settled
    for key, value, remark in (*_of_flags(flags), *_always()):
        table = key.partition(".")[0]
        if key in settled or (demonstrates and table == "rollout") or (not has_engines and table == "engines"):
            continue
        yield Setting(key=key, value=value, remark=remark)
    for rule in from_slime().rules:
        for name in rule.names:
            if rule.absent == "lost" and flags.peek(name) is None:
                flags.note(f"--{name}, which is absent", flags.program, rule.state, rule.remark, is_lost=True)


def _of_flags(flags: Flags) -> Iterator[tuple[str, object, str]]:
    for row in (*from_slime().flags(), *from_slime().rules):
        names = (row.flag, *row.also) if isinstance(row, Flag) else row.names
        if not isinstance(row.absent, dict) or any(flags.peek(name) is not None for name in names):
            continue
        if isinstance(row, Rule) and row.needs is not None and flags.peek(row.needs) is None:
            continue
        for key, value in row.absent.items():
            yield key, value, f"slime's default without --{names[0]}"


def _always() -> Iterator[tuple[str, object, str]]:
    for section in from_slime().sections:
        yield from ((ours.key, ours.always, "slime does so always") for ours in section.ours if ours.always is not None)


def named_choices(flags: Flags) -> Iterator[Setting]:
    """Choose the loss that an estimator of slime names, and the corrections that are on without a value."""
    if (named := first(flags.peek("advantage-estimator"))) in ("gspo", "cispo"):
        flags.take("advantage-estimator")
        yield Setting(key="algorithm.estimator.type", value="grpo", remark=f"--advantage-estimator {named}")
        yield Setting(key="algorithm.loss.type", value=named, remark=f"--advantage-estimator {named}")
    for flag, detail in (("use-opsm", "opsm-delta"), ("use-opd", "opd-type")):
        if flags.peek(flag) is None:
            flags.take(detail)
            flags.leave_taken(detail, "no", f"slime ignores it without --{flag}")
        elif flags.peek(detail) is not None or flag == "use-opd":
            flags.take(flag)
            state, key = "no" if flags.peek(detail) is not None else "by hand", answer_of(flag).key
            flags.leave_taken(flag, state, f"follows from {key}, --{detail}")


def adapters(flags: Flags) -> Iterator[Setting]:
    """Yield the settings of LoRA, by the flags of miles. With rank 0, as without a rank, all weights train."""
    rank, path = whole_number(flags.peek("lora-rank")), flags.peek("lora-adapter-path")
    if not rank and path is not None:
        flags.take("lora-adapter-path")
        flags.leave(path, "by hand", "trainer.lora.load; trainer.lora.rank has to be the adapter's")
        return
    if not rank and (flags.peek("lora-rank") is None or rank == 0):
        for flag in ("lora-rank", *OF_ADAPTERS):
            if (given := flags.take(flag)) is not None:
                flags.leave(given, "no", "has no effect: without a rank all weights train")
        return
    if flags.peek("lora-alpha") is None:
        yield Setting(key=f"{LORA}.alpha", value=16.0, remark="miles' default without --lora-alpha")
    chosen, left_out = flags.text("target-modules"), flags.text("exclude-modules")
    if chosen is None and left_out is None:
        return
    excluded = set(_modules(left_out or ""))
    targets = [name for name in _modules(chosen or ALL_LINEAR) if name not in excluded]
    remark = " without ".join(f"--{flag}" for flag in ("target-modules", "exclude-modules") if flags.peek(flag))
    if not excluded and chosen == ALL_LINEAR:
        yield Setting(key=f"{LORA}.targets", value=ALL_LINEAR, remark=remark)
    else:
        yield Setting(key=f"{LORA}.targets", value=targets, remark=remark)


def _modules(text: str) -> list[str]:
    """Return the names of Hugging Face's linear layers in a list of miles, each once."""
    names = [name for part in text.split(",") if (name := part.strip())]
    return list(dict.fromkeys(own for name in names for own in MODULES.get(name, (name,))))


def whole_choices(flags: Flags, settings: list[Setting]) -> Iterator[Setting]:
    """Yield the settings with the `type` of each table, and without keys that its type does not have."""
    given = {setting.key: setting for setting in settings}
    types: dict[str, str | None] = {}
    for table, chosen in chosen_keys(Topology).items():
        named = given.get(f"{table}.type")
        types[table] = "custom" if f"{table}.function" in given else chosen.default if named is None else named.value
    written: set[str] = set()
    for setting in settings:
        table, _, name = setting.key.rpartition(".")
        if table not in types:
            yield setting
            continue
        tables, chosen = chosen_keys(Topology)[table].tables, types[table]
        if chosen is None or (chosen in tables and name not in ("type", *tables[chosen].__struct_fields__)):
            why = (
                f"has no effect without {table}" if chosen is None else f'has no effect with {table}.type = "{chosen}"'
            )
            flags.leave_taken(setting.remark.removeprefix("--"), "no", why)
            continue
        if table not in written:
            remark = given[f"{table}.type"].remark if f"{table}.type" in given else ""
            yield Setting(key=f"{table}.type", value=chosen, remark=remark)
            written.add(table)
        if name != "type":
            yield setting


def micro_batches(flags: Flags) -> Iterator[Setting]:
    """Make micro-batches large enough for the longest sample, which slime trains alone if it is over the limit."""
    given = flags.take("max-tokens-per-gpu")
    ranks = whole_number(flags.peek("context-parallel-size")) or 1
    response, prompt, context = (
        whole_number(flags.peek(f"rollout-max-{what}-len")) for what in ("response", "prompt", "context")
    )
    longest = context or (response or 0) + (prompt or 0)
    least = math.ceil(longest / ranks)
    limit = whole_number(given)
    if given is not None:
        flags.note_missing(given)
        if limit is None:
            flags.leave(given, "by hand", "train.max_tokens_per_gpu: not a whole number")
    if limit is not None and flags.peek("use-dynamic-batch-size") is None:
        remark = "slime ignores --max-tokens-per-gpu without --use-dynamic-batch-size"
    elif limit is not None:
        remark = "--max-tokens-per-gpu"
    else:
        limit, remark = MOST_TOKENS, "slime has no limit without --use-dynamic-batch-size"
    if least > limit:
        remark = f"{remark}; raised to what a sample of {longest} tokens needs, which slime trains alone"
    yield Setting(key="train.max_tokens_per_gpu", value=max(limit, least), remark=remark)
    remark = 'slime trains each sample, however long; "mask" would leave long ones out'
    yield Setting(key="train.on_too_long", value="fail", remark=remark)


def leave_ignored(flags: Flags) -> None:
    """Leave out the flags that slime itself ignores beside the others."""
    estimator = first(flags.peek("advantage-estimator")) or "grpo"
    reasons = {
        "kl-coef": (estimator in IGNORE_KL, f"slime ignores it with --advantage-estimator {estimator}"),
        "num-epoch": (flags.peek("num-rollout") is not None, "slime ignores it beside --num-rollout"),
        "lr-warmup-iters": (flags.peek("lr-warmup-fraction") is not None, "--lr-warmup-fraction counts"),
        "sglang-tp-size": (True, "slime ignores it: --rollout-num-gpus-per-engine counts"),
        "sglang-tensor-parallel-size": (True, "slime ignores it: --rollout-num-gpus-per-engine counts"),
        "sglang-model-path": (True, "slime ignores it: --hf-checkpoint counts"),
        "eval-reward-key": (
            first(flags.peek("eval-reward-key")) == first(flags.peek("reward-key")),
            "reward.reward_key is for both",
        ),
        "mtp-num-layers": (flags.peek("enable-mtp-training") is None, MTP_ALONE),
        "mtp-loss-scaling-factor": (flags.peek("enable-mtp-training") is None, MTP_ALONE),
    }
    for flag, (is_ignored, why) in reasons.items():
        if is_ignored and flags.peek(flag) is not None:
            flags.take(flag)
            flags.leave_taken(flag, "no", why)
    if (given := flags.peek("eval-reward-key")) is not None and not reasons["eval-reward-key"][0]:
        flags.take(given.flag)
        flags.leave(given, "by hand", "reward.reward_key is one key, for training and evaluation")
