"""Faulty functions are refused before the run, by key, function and fault; a dry run changes nothing."""

import random
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.trainer.plugins.dry_run import try_plugin, try_plugins, within
from runtime.process.actor import InputError
from runtime.settings.reading.schema import functions_in
from runtime.settings.topology import Topology
from tests.build.topology import topology_with
from tests.support.checks import function_problems

FUNCTIONS = """
from dataclasses import replace
import random
import numpy as np
import torch

from actors.trainer.algorithms.advantage_inputs import Advantages


def ratio(inputs):
    return torch.exp(inputs.log_probs - inputs.old_log_probs)


def good(inputs):
    return -inputs.advantages * ratio(inputs), {"train/ratio": ratio(inputs)}


def draws(inputs):
    random.random(), np.random.rand(), torch.rand(1)
    return good(inputs)


def weights(inputs):
    return ratio(inputs).detach(), {"train/tis": ratio(inputs)}


def mean(inputs): return good(inputs)[0].mean(), {}
def alone(inputs): return good(inputs)[0]
def nan(inputs): return good(inputs)[0] / 0 * 0, {}
def double(inputs): return good(inputs)[0].double(), {}
def detached(inputs): return good(inputs)[0].detach(), {}
def flat(inputs): return good(inputs)[0] * 0, {}
def infinite_slope(inputs): return torch.sqrt(ratio(inputs) - ratio(inputs).detach()), {}
def raises(inputs): return {}["x"]
def exits(inputs): raise SystemExit(3)
def changes(inputs): return inputs.advantages.mul_(2) and None
def unnamed(inputs): return good(inputs)[0], {"ratio": inputs.log_probs}
def taken(inputs): return good(inputs)[0], {"train/grad_norm": inputs.log_probs}
def scalar(inputs): return good(inputs)[0], {"train/ratio": inputs.log_probs.mean()}
def listed(inputs): return good(inputs)[0], ["train/ratio"]
def empty(inputs): return good(inputs)[0] * ratio(inputs).detach().max(), {}
def fickle(inputs): return good(inputs)[0], {f"train/{len(inputs.log_probs)}": ratio(inputs)}
def with_ref(inputs): return inputs.log_probs - inputs.ref_log_probs, {}
def steep(inputs): return ratio(inputs), {}


def centred(inputs): return inputs.rewards - inputs.rewards.mean()
def by_token(inputs): return Advantages(inputs.spread(centred(inputs)) * inputs.loss_mask)
def penalized(inputs): return Advantages(inputs.spread(centred(inputs)) - 0.1 * inputs.kl)
def scaled(inputs):
    with np.errstate(invalid="ignore"):
        return centred(inputs) / inputs.rewards.std()
def of_mask(inputs):
    with np.errstate(divide="ignore"):
        return centred(inputs) / inputs.mask_sums
def in_place(inputs):
    rewards = inputs.rewards
    rewards -= rewards.mean()
    return rewards
def integers(inputs): return inputs.groups
def too_few(inputs): return inputs.rewards[:1]
def tensors(inputs): return torch.from_numpy(inputs.rewards)


def masks(data): return replace(data, loss_mask=data.loss_mask & (np.random.rand(len(data.tokens)) < 0.5))
def forgets(data): pass
def assigns(data): data.loss_mask[:] = False
def unmasks(data): return replace(data, loss_mask=np.ones(len(data.tokens), dtype=bool))
def flags(data): return replace(data, loss_mask=data.loss_mask.astype(np.uint8))
def other(data): return replace(data, rewards=data.rewards * 2)
def not_finite(data): return replace(data, advantages=data.advantages * np.nan)


def hook(topology, rollout_id, step_id, model, optimizer): raise AssertionError("is called")


def by_sample(inputs): return 1.0 / np.maximum(inputs.mask_sums, 1), np.ones(len(inputs.groups), dtype=int)
def shares_float(inputs): return np.ones(2), np.ones(2)
def short(inputs): return np.ones(1), np.ones(2, dtype=int)
def negative(inputs): return -np.ones(2), np.ones(2, dtype=int)
def divides(inputs): return 1.0 / inputs.mask_sums, np.ones(2, dtype=int)
def nothing(inputs): return np.zeros(2), np.ones(2, dtype=int)
def no_shares(inputs): return np.ones(2), np.zeros(2, dtype=int)
def two(a, b): return None
"""
LOSS, WEIGHTS, REDUCER = (f"algorithm.{name}.function" for name in ("loss", "tis", "reduction"))
DATA = "algorithm.rollout_data_postprocess"
ADVANTAGE = "algorithm.estimator.function"
NONE = "(in the dry run on a micro-batch without trained tokens)"
MASKED = "(in the dry run on two samples, one fully masked)"
FAULTS = [
    (LOSS, "mean", "the loss is a float32 tensor []; expected one number per trained token, a float32 tensor [8] (in"),
    (LOSS, "alone", "returned a float32 tensor [8]; expected Terms(loss, metrics)"),
    (LOSS, "nan", "the loss has the value nan; expected finite numbers"),
    (LOSS, "double", "the loss is a float64 tensor [8]; expected"),
    (LOSS, "detached", "the loss has no gradient: compute it from inputs.log_probs"),
    (LOSS, "flat", "the gradient of the loss is 0 for every token"),
    (LOSS, "infinite_slope", "the gradient of log_probs has the value"),
    (LOSS, "raises", "raised KeyError in line 34: 'x' (in the dry run on two samples)"),
    (LOSS, "exits", "raised SystemExit in line 35: 3"),
    (LOSS, "changes", "raised RuntimeError"),
    (LOSS, "unnamed", "its metric 'ratio' must begin with \"train/\"; choose another name"),
    (LOSS, "taken", "its metric 'train/grad_norm' is a metric of the trainer; choose another name"),
    (LOSS, "scalar", "its metric train/ratio is a float32 tensor []; expected one number per trained token"),
    (LOSS, "listed", "its metrics are a list of 1: 'train/ratio'; expected a dictionary of tensors by name"),
    (LOSS, "empty", NONE),
    (LOSS, "fickle", f"must have the same names in every call; not always there: train/0, train/8 {NONE}"),
    (LOSS, "with_ref", "raised TypeError"),
    (LOSS, "two", "takes (a, b) but is called with (inputs)"),
    (WEIGHTS, "steep", "the factors have a gradient; a correction must not: use log_probs.detach()"),
    (WEIGHTS, "mean", "the tensor of factors is a float32 tensor []"),
    (WEIGHTS, "double", "the tensor of factors is a float64 tensor [8]"),
    (
        ADVANTAGE,
        "scaled",
        "the advantages have the value nan; expected finite numbers (in the dry run on two samples with",
    ),
    (ADVANTAGE, "of_mask", f"expected finite numbers {MASKED}"),
    (ADVANTAGE, "in_place", "changes inputs.rewards in place; compute a new array"),
    (ADVANTAGE, "integers", "returned an int64 array [2] for the advantages; expected a float array of one number per"),
    (ADVANTAGE, "too_few", "expected a float array of one number per sample [2] or per token [12]"),
    (ADVANTAGE, "tensors", "returned a float64 tensor [2] for the advantages"),
    (DATA, "forgets", "returned None; expected dataclasses.replace(data, loss_mask=...), or data itself"),
    (DATA, "assigns", "assignment destination is read-only"),
    (DATA, "unmasks", "loss_mask is true for a token that did not train before; it may only mask more tokens"),
    (DATA, "flags", "returned a uint8 array [12] as loss_mask; expected a bool array [12]"),
    (DATA, "other", "changed rewards; it may change loss_mask and advantages alone"),
    (DATA, "not_finite", "the advantages are not finite"),
    (
        "train.custom_megatron_before_train_step_hook",
        "two",
        "takes (a, b) but is called with (topology, rollout_id, step_id, model, optimizer)",
    ),
    (REDUCER, "shares_float", "shares is a float64 array [2]; expected an integer array [2] of one number >= 0 per"),
    (REDUCER, "short", "token_weights is a float64 array [1]; expected an array [2]"),
    (REDUCER, "negative", "token_weights has the value -1.0; expected"),
    (REDUCER, "divides", MASKED),
    (REDUCER, "nothing", "token_weights is 0 for every sample with trained tokens, so nothing would train"),
    (REDUCER, "no_shares", "shares is 0 for every sample, but the loss is divided by their sum"),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


def named(key: str, value: str) -> Topology:
    return topology_with(**table_of(key.split("."), value))


def table_of(place: Sequence[str], value: str) -> dict[str, Any]:
    first, *rest = place
    typed = {"type": "custom"} if rest == ["function"] else {}
    return {first: {**typed, **table_of(rest, value)} if rest else value}


def algorithm(key: str, value: str, **others: Any) -> dict[str, Any]:
    return table_of(key.split("."), value)["algorithm"] | others


def states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # pyright: ignore


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (ADVANTAGE, "centred"),
        (ADVANTAGE, "by_token"),
        (LOSS, "good"),
        (LOSS, "draws"),
        (WEIGHTS, "weights"),
        (REDUCER, "by_sample"),
        (DATA, "masks"),
        ("train.custom_megatron_before_train_step_hook", "hook"),
    ],
)
def test_a_good_function_passes_and_random_numbers_continue(file: Path, key: str, name: str) -> None:
    before = states()
    topology = named(key, f"{file}:{name}")
    (kind,) = (kind for place, _, kind in functions_in(topology) if place == key)
    try_plugin(topology_with(), kind, key, f"{file}:{name}")
    assert states() == before
    assert function_problems(named(key, f"{file}:{name}")) == []


@pytest.mark.parametrize(
    ("key", "name", "said"), FAULTS, ids=[f"{key.split('.')[1]}-{name}" for key, name, _ in FAULTS]
)
def test_a_faulty_function_is_refused_by_key_and_fault(file: Path, key: str, name: str, said: str) -> None:
    before = states()
    (problem,) = function_problems(named(key, f"{file}:{name}"))
    assert (problem.key, problem.value) == (key, f'"{file}:{name}"')
    assert said in problem.message
    assert states() == before


def test_the_log_probs_of_a_reference_model_are_there_if_the_run_computes_them(file: Path) -> None:
    named = algorithm(LOSS, f"{file}:with_ref", kl={"type": "k1", "loss_coef": 0.1})
    assert function_problems(topology_with(algorithm=named)) == []


def test_the_divergence_is_there_for_advantages_if_the_run_computes_it(file: Path) -> None:
    named = algorithm(ADVANTAGE, f"{file}:penalized")
    assert function_problems(topology_with(algorithm=named | {"kl": {"type": "k1", "reward_coef": 0.1}})) == []
    (problem,) = function_problems(topology_with(algorithm=named))
    assert "NoneType" in problem.message


def test_a_function_that_hangs_is_refused_in_time() -> None:
    hangs = threading.Event()
    said = re.escape("algorithm.loss.function = 'a.py:f': its dry run did not end within 0.05 s (run.check_timeout_s)")
    with pytest.raises(InputError, match=said):
        within(0.05, "algorithm.loss.function = 'a.py:f'", lambda: hangs.wait(20) and None)
    hangs.set()


def test_a_trainer_refuses_a_faulty_function(file: Path) -> None:
    topology = topology_with(algorithm=algorithm(LOSS, f"{file}:nan"))
    with pytest.raises(InputError, match=r"loss\.function = .*mine.py:nan': the loss has the value nan"):
        try_plugins(topology, torch.device("cpu"))
