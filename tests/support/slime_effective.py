"""The values with which slime would train a start script, compared with those of the recipe made from it."""

import ast
import math
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from bin.slime_scripts.given import WrongValue, typed
from bin.slime_scripts.script import Given, StartScript
from bin.slime_scripts.syntax import Word
from runtime.compat.slime.flags import from_slime
from runtime.settings.placement import MOST_TOKENS
from runtime.settings.topology import Topology

ARGUMENTS: Final = "slime/utils/arguments.py"
COMPARED: Final = (
    "rollout.",
    "algorithm.",
    "optimizer.",
    "train.",
    "reward.",
    "data.0.",
    "run.seed",
    "trainer.megatron.",
)
# Megatron-LM's own defaults at commit 1dcf0dafa, which slime pins: megatron/training/arguments.py, training_config.py
MEGATRON: Final[Mapping[str, Any]] = {
    "lr-decay-style": "linear",
    "lr-warmup-iters": 0,
    "min-lr": 0.0,
    "weight-decay": 0.01,
    "adam-beta1": 0.9,
    "adam-beta2": 0.999,
    "adam-eps": 1e-8,
    "moe-aux-loss-coeff": 0.0,
    "moe-z-loss-coeff": None,
    "moe-router-load-balancing-type": "aux_loss",
    "recompute-granularity": None,
    "context-parallel-size": 1,
    "tensor-model-parallel-size": 1,
    "pipeline-model-parallel-size": 1,
    "expert-model-parallel-size": 1,
}
LOSSES: Final = ("gspo", "cispo")  # that an estimator of slime names
KEYS: Final[Mapping[str, str]] = {  # of these flags
    **{
        name: f"optimizer.{name.replace('-', '_')}"
        for name in MEGATRON
        if name.startswith(("lr", "min", "weight", "adam"))
    },
    **{name: f"trainer.megatron.{name.replace('-', '_')}" for name in MEGATRON if name.startswith(("moe", "rec"))},
    **{name: f"trainer.megatron.{name.replace('-', '_')}" for name in MEGATRON if name.endswith("-size")},
}


def value_at(topology: Topology, key: str) -> Any:
    """Return the value of a dotted key of a topology."""
    found: Any = topology
    for part in key.split("."):
        found = found[part] if isinstance(found, dict) else found[int(part)] if part.isdigit() else getattr(found, part)  # pyright: ignore[reportUnknownVariableType]
    return found


def differences(script: StartScript, left: Container[str], topology: Topology) -> Iterator[str]:
    """Yield the settings of a recipe that are not the values with which slime would train the script.

    Args:
        left: names of flags that became no setting; they are not compared.
        topology: made from the script.
    """
    given = {each.flag: each for each in script.given}
    for key, expected in expected_values(given, left).items():
        try:
            actual = value_at(topology, key)
        except AttributeError:  # a table of another type: the flag has no effect there
            continue
        if _plain(actual) != _plain(expected):
            yield f"{key} = {actual!r}, slime has {expected!r}"


def expected_values(given: Mapping[str, Given], left: Container[str]) -> dict[str, Any]:
    """Return what slime trains with, by our keys: the flag's value, or else slime's default."""
    found: dict[str, Any] = {}
    for flag in from_slime().flags():
        one = given.get(flag.flag)
        if flag.key is None or not flag.key.startswith(COMPARED) or flag.origin == "older" or flag.flag in left:
            continue
        if flag.absent == "computed" or flag.flag in ("advantage-estimator", "use-opd"):  # below
            continue
        if flag.flag == "use-tis" or (flag.flag == "opsm-delta" and "use-opsm" not in given):  # mis.yaml says more
            continue
        if flag.value is not None:
            found |= {flag.key: flag.value} if one is not None else {}
            continue
        if "function" in flag.flag or flag.flag.endswith("-path") or (flag.key in found and one is None):
            continue
        found[flag.key] = _value(flag.key, one, flag.default)
    for name, default in MEGATRON.items():
        if name not in left:
            found[KEYS[name]] = typed(KEYS[name], given[name].values) if name in given else default
    found |= _computed(given)
    demonstrates = "loss-type" in given and given["loss-type"].values[0].text == "sft_loss"
    return {key: value for key, value in found.items() if not (demonstrates and key.startswith("rollout."))}


def _value(key: str, one: Given | None, default: str | None) -> Any:
    if one is not None:
        return typed(key, one.values)
    if default is None:
        return None
    return typed(key, [Word(text=default, place="")])


def _computed(given: Mapping[str, Given]) -> dict[str, Any]:
    """Return what follows from several flags, by the formulas of slime_validate_args and of its train loop."""

    def number(flag: str, default: float) -> float:
        return float(given[flag].values[0].text) if flag in given else default

    batch = number("rollout-batch-size", 0) * number("n-samples-per-prompt", 1)
    per = number("num-steps-per-rollout", batch / number("global-batch-size", batch or 1))
    estimator = given["advantage-estimator"].values[0].text if "advantage-estimator" in given else "grpo"
    found = {
        "rollout.on_halt": "resume" if "partial-rollout" in given else "drop",
        "rollout.on_surplus": "drop",
        "algorithm.kl.loss_coef": number("kl-loss-coef", 0) if "use-kl-loss" in given else 0.0,
        "algorithm.kl.reward_coef": 0.0 if estimator in ("grpo", "gspo", "cispo") else number("kl-coef", 0),
        "algorithm.num_steps_per_rollout": per,
        "algorithm.loss.type": estimator if estimator in LOSSES else "ppo",
        "algorithm.estimator.type": "grpo" if estimator in LOSSES else estimator,
        "train.on_too_long": "fail",
    }
    if "loss-type" in given:
        found["algorithm.loss.type"] = given["loss-type"].values[0].text.removesuffix("_loss")
    response, prompt = number("rollout-max-response-len", 0), number("rollout-max-prompt-len", 0)
    longest = number("rollout-max-context-len", response + prompt) / number("context-parallel-size", 1)
    limit = number("max-tokens-per-gpu", 0) if "use-dynamic-batch-size" in given else 0  # a longer sample trains alone
    tokens = max(limit or number("max-tokens-per-gpu", 9216), math.ceil(longest))
    if tokens != MOST_TOKENS:  # the default on GPUs is left out
        found["train.max_tokens_per_gpu"] = tokens
    if "custom-rm-path" in given:
        module, _, name = given["custom-rm-path"].values[0].text.rpartition(".")
        found["data.0.rm_type"] = f"slime:{module}:{name}"
    if "lr-warmup-fraction" in given and ("num-rollout" in given or "lr-decay-iters" in given):
        steps = number("lr-decay-iters", number("num-rollout", 0) * per)
        found["optimizer.lr_warmup_iters"] = round(number("lr-warmup-fraction", 0) * steps)
    return found


def _plain(value: Any) -> Any:
    """Return a value to compare: an unset one, a switch that is off and an empty list are equal."""
    if isinstance(value, list | tuple):
        return tuple(value) or None  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return value or None


def defaults_of(checkout: Path) -> dict[str, Any]:
    """Return the defaults of slime's own flags, as its argument parser is written; False for switches."""
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse((checkout / ARGUMENTS).read_text())):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = next(
            (arg.value for arg in node.args if isinstance(arg, ast.Constant) and str(arg.value)[:2] == "--"), None
        )
        if name is None:
            continue
        options = {keyword.arg: keyword.value for keyword in node.keywords}
        default = options.get("default")
        if default is None:
            found[str(name)[2:]] = False if "action" in options else None
        elif isinstance(default, ast.Constant | ast.UnaryOp):
            found[str(name)[2:]] = ast.literal_eval(default)
    return found


def wrong_defaults(checkout: Path) -> Iterator[str]:
    """Yield the flags whose default in flags.toml is not that of slime's argument parser."""
    defaults = defaults_of(checkout)
    for flag in from_slime().flags():
        if flag.origin != "slime" or flag.key is None or flag.flag not in defaults:
            continue
        theirs = defaults[flag.flag]
        try:
            ours = None if flag.default is None else typed(flag.key, [Word(text=flag.default, place="")])
        except WrongValue:
            ours = flag.default
        is_text = isinstance(theirs, str) and flag.default is None  # slime's own function, or an empty object
        if _plain(ours) != _plain(theirs) and str(ours) != str(theirs) and not is_text:
            yield f"{flag.flag}: flags.toml has {flag.default!r}, slime has {theirs!r}"
