"""Dry run of user functions at the start: two samples, and an empty micro-batch. Changes no random number generator."""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor

from actors.trainer.algorithms.advantage_inputs import AdvantageInputs
from actors.trainer.algorithms.loss_inputs import LossInputs, Sequences
from actors.trainer.algorithms.reductions import ReductionInputs
from actors.trainer.plugins.functions import (
    CustomAdvantage,
    CustomLoss,
    CustomReducer,
    CustomWeights,
    TrainerPlugin,
    custom_advantage,
    custom_loss,
    custom_reducer,
    custom_weights,
    same_random_numbers,
)
from actors.trainer.plugins.rollout_data import Postprocess, RolloutData
from runtime.functions.table import UserFunction
from runtime.process.actor import InputError
from runtime.settings.derived import reads_reference
from runtime.settings.reading.schema import functions_in
from runtime.settings.tables.reward import RewardPer
from runtime.settings.topology import Topology

CPU: Final = torch.device("cpu")
LENGTHS: Final = (3, 5)  # trained tokens of the two samples
ON: Final = "in the dry run on two samples"
ON_NONE: Final = "in the dry run on a micro-batch without trained tokens"


def try_plugins(topology: Topology, device: torch.device) -> None:
    """Try every function of the trainer that the topology names, each within `run.check_timeout_s`.

    Raises:
        InputError: A function cannot be used; names its key, the function, and what is allowed.
    """
    for key, value, kind in functions_in(topology):
        if kind.runs_in == "trainer":
            tried = partial(try_plugin, topology, kind, key, value, device=device)
            within(topology.run.check_timeout_s, f"{key} = {value!r}", tried)


def try_plugin(
    topology: Topology,
    kind: UserFunction,
    key: str,
    value: str,
    base_dirs: Sequence[Path] = (),
    *,
    device: torch.device = CPU,
) -> None:
    """Load and try one function of the trainer.

    Args:
        topology: The topology, which says what the function's inputs hold.
        kind: Its kind.
        key: Its setting.
        value: Its name.
        base_dirs: Directories of relative files. Empty: the current directory.
        device: Device of the inputs.

    Raises:
        PluginError: It cannot be found, or cannot be called with its parameters.
        InputError: It cannot be used; names the key, the function, and what is allowed.
    """
    with_ref = reads_reference(topology.algorithm)
    match kind.name:
        case "advantage":
            with_kl, per = topology.algorithm.kl.reward_coef > 0, topology.reward.per
            try_advantage(custom_advantage(value, base_dirs), with_kl=with_kl, per=per)
        case "loss":
            try_loss(custom_loss(value, base_dirs), with_ref=with_ref, device=device)
        case "weights":
            weights = custom_weights(value, base_dirs, algorithm=topology.algorithm)
            try_weights(weights, with_ref=with_ref, device=device)
        case "reducer":
            try_reducer(custom_reducer(value, base_dirs))
        case "postprocess":
            try_postprocess(Postprocess(value, base_dirs), with_ref=with_ref)
        case _:
            TrainerPlugin(kind, key, value, base_dirs)  # it acts on the model, so it is loaded and not called


def try_advantage(advantage: CustomAdvantage, *, with_kl: bool = False, per: RewardPer = "sample") -> None:
    """Try an estimator on two samples of one prompt: different rewards, equal rewards, and one of them fully masked.

    Args:
        advantage: The user's function.
        with_kl: Whether the run computes the divergence from a reference model for it.
        per: Whether graders give rewards per turn or per token.

    Raises:
        InputError: The estimator cannot be used; names its key, the function, and what is allowed.
    """
    for where, inputs in {
        ON: rewarded((1.0, 0.25)),
        f"{ON} with equal rewards": rewarded((0.5, 0.5)),
        f"{ON}, one fully masked": rewarded((1.0, 0.25), masked=True),
    }.items():
        if with_kl:
            trains = inputs.loss_mask.astype(np.float64)
            inputs = replace(inputs, kl=0.1 * trains, old_log_probs=-trains, ref_log_probs=-1.1 * trains)
        if per != "sample":
            inputs = replace(inputs, rewards_per_token=0.1 * inputs.response_mask)
        with _explained(advantage, where), same_random_numbers(CPU):
            before = {name: np.copy(value) for name, value in _arrays(inputs).items()}
            found = advantage(inputs)
            for name, value in _arrays(inputs).items():
                if not np.array_equal(value, before[name]):
                    advantage.refuse(f"changes inputs.{name} in place; compute a new array")
            if not np.isfinite(found.advantages).all():
                wrong = found.advantages[~np.isfinite(found.advantages)][0]
                advantage.refuse(f"the advantages have the value {wrong}; expected finite numbers")


def try_postprocess(postprocess: Postprocess, *, with_ref: bool) -> None:
    """Try a function that changes a batch. Errors as for `try_advantage`.

    Args:
        postprocess: The user's function.
        with_ref: Whether the run computes log-probs of a reference model.
    """
    with _explained(postprocess, ON):
        inputs, columns = rewarded((1.0, 0.25)), two_samples(with_ref=with_ref)

        def spread(values: Tensor) -> Any:
            column = np.zeros(len(inputs.loss_mask), dtype=np.float32)
            column[inputs.loss_mask] = values.numpy()
            return column

        data = RolloutData(
            step=0,
            groups=inputs.groups,
            rollouts=inputs.rollouts,
            rewards=inputs.rewards,
            lengths=inputs.lengths,
            tokens=np.arange(len(inputs.loss_mask), dtype=np.int32),
            loss_mask=inputs.loss_mask,
            rollout_log_probs=spread(columns.rollout_log_probs),
            old_log_probs=spread(columns.old_log_probs),
            ref_log_probs=None if columns.ref_log_probs is None else spread(columns.ref_log_probs),
            advantages=spread(columns.advantages).astype(np.float64),
        )
        found = postprocess.changed(data)
        if not np.isfinite(found.advantages).all():
            postprocess.refuse("the advantages are not finite; expected finite numbers")


def rewarded(rewards: tuple[float, float], *, masked: bool = False) -> AdvantageInputs:
    """Inputs of an estimator: two samples of one prompt, each with a prompt of two tokens.

    Args:
        rewards: Of the two samples.
        masked: Whether no token of the first sample trains.
    """
    lengths = np.array(LENGTHS, dtype=np.int64) + 2
    trains = np.concatenate([np.arange(length) >= 2 for length in lengths])
    ours = np.repeat([False, True], lengths)
    return AdvantageInputs(
        rewards=np.array(rewards),
        groups=np.array([7, 7]),
        rollouts=np.array([0, 1]),
        lengths=lengths,
        loss_mask=trains & ours if masked else trains,
        response_mask=trains,
    )


def _arrays(inputs: AdvantageInputs) -> dict[str, Any]:
    found = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}


def try_loss(loss: CustomLoss, *, with_ref: bool, device: torch.device = CPU) -> None:
    """Try a loss: shape, type, finite values, a gradient that reaches the policy.

    Args:
        loss: The user's function.
        with_ref: Whether the run computes log-probs of a reference model.
        device: Device of the inputs.

    Raises:
        InputError: The loss cannot be used; names its key, the function, and what is allowed.
    """
    with _explained(loss, ON), same_random_numbers(device):
        inputs = two_samples(with_ref=with_ref, device=device)
        before = _copies(inputs)
        terms = loss(inputs)
        _check_unchanged(loss, inputs, before)
        _check_finite(loss, {"the loss": terms.loss, **terms.metrics})
        if not terms.loss.requires_grad:
            loss.refuse("the loss has no gradient: compute it from inputs.log_probs, without detach()")
        of = [inputs.log_probs, inputs.entropy]
        found = cast(
            "tuple[Tensor | None, ...]", torch.autograd.grad(terms.loss.sum(), of, allow_unused=True)
        )  # None: the loss does not depend on it
        named = zip(("log_probs", "entropy"), found, strict=True)
        gradients = {f"the gradient of {name}": value for name, value in named if value is not None}
        _check_finite(loss, gradients)
        if not any(value.any() for value in gradients.values()):
            loss.refuse("the gradient of the loss is 0 for every token")
    with _explained(loss, ON_NONE), same_random_numbers(device):
        loss(_no_tokens(with_ref=with_ref, device=device))


def try_weights(weights: CustomWeights, *, with_ref: bool, device: torch.device = CPU) -> None:
    """Try importance weights: shape, type, finite values, no gradient. Arguments and errors as for `try_loss`."""
    with _explained(weights, ON), same_random_numbers(device):
        inputs = two_samples(with_ref=with_ref, device=device)
        before = _copies(inputs)
        correction = weights(inputs)
        _check_unchanged(weights, inputs, before)
        _check_finite(weights, {"the tensor of factors": correction.factors, **correction.metrics})
    with _explained(weights, ON_NONE), same_random_numbers(device):
        weights(_no_tokens(with_ref=with_ref, device=device))


def try_reducer(reducer: CustomReducer) -> None:
    """Try a reduction on two samples, and with the first of them masked.

    Raises:
        InputError: The reduction cannot be used; names its key, the function, and what is allowed.
    """
    for sums, where in ((LENGTHS, ON), ((0, LENGTHS[1]), "in the dry run on two samples, one fully masked")):
        with _explained(reducer, where), same_random_numbers(CPU):
            columns = (np.array(sums, dtype=np.int64), np.arange(2), np.zeros(2, dtype=np.int64))
            inputs = ReductionInputs(*(column.copy() for column in columns))
            reduced = reducer(inputs)
            if any((given != column).any() for given, column in zip(vars(inputs).values(), columns, strict=True)):
                reducer.refuse("changes its inputs in place")
            if not (reduced.token_weights * columns[0]).any():
                reducer.refuse("token_weights is 0 for every sample with trained tokens, so nothing would train")
            if not reduced.shares.any():
                reducer.refuse("shares is 0 for every sample, but the loss is divided by their sum")


def two_samples(*, with_ref: bool, device: torch.device = CPU) -> LossInputs:
    """Inputs of two samples, float32: one rewarded, one not; every policy differs a little from every other."""
    total, first = sum(LENGTHS), LENGTHS[0]
    place = torch.arange(total, dtype=torch.float32)

    def near(shift: float) -> Tensor:
        return (-0.4 - 0.25 * place % 1.7 + 0.03 * torch.sin(place + shift)).to(device)

    return LossInputs(
        log_probs=near(0.0).requires_grad_(),
        old_log_probs=near(1.0),
        rollout_log_probs=near(2.0),
        advantages=torch.where(place < first, 0.7, -0.7).to(device),
        entropy=(0.5 + 0.1 * torch.cos(place)).to(device).requires_grad_(),
        sequences=Sequences(torch.repeat_interleave(torch.arange(2), torch.tensor(LENGTHS)).to(device), 2),
        ref_log_probs=near(3.0) if with_ref else None,
        rewards=torch.where(place < first, 1.0, 0.0).to(device),
        trainer_log_probs=near(1.0),
    )


def within(limit_s: float, plugin: str, call: Callable[[], None]) -> None:
    """Run a dry run in a thread with a time limit. A call that hangs keeps its thread until the process ends.

    Raises:
        InputError: It did not end in time, or the dry run raised it.
    """
    raised: list[BaseException] = []

    def work() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
            raised.append(error)

    thread = threading.Thread(target=work, name=f"dry run of {plugin}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise InputError(f"{plugin}: its dry run did not end within {limit_s:g} s (run.check_timeout_s)")
    if raised:
        raise raised[0]


@contextmanager
def _explained(plugin: TrainerPlugin, where: str) -> Generator[None]:
    """Say in an error that it was found in the dry run."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{error} ({where})") from error


def _no_tokens(*, with_ref: bool, device: torch.device) -> LossInputs:
    """Inputs of a micro-batch without trained tokens, which ranks train if others have more micro-batches."""
    none = torch.empty(0, device=device)
    return LossInputs(
        log_probs=none.clone().requires_grad_(),
        old_log_probs=none,
        rollout_log_probs=none,
        advantages=none,
        entropy=none.clone().requires_grad_(),
        sequences=Sequences(torch.empty(0, dtype=torch.int64, device=device), 1),
        ref_log_probs=none if with_ref else None,
        rewards=none,
        trainer_log_probs=none,
    )


def _columns(inputs: Any) -> dict[str, Tensor]:
    found = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return {name: value.detach() for name, value in found.items() if isinstance(value, Tensor)}


def _copies(inputs: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in _columns(inputs).items()}


def _check_unchanged(plugin: TrainerPlugin, inputs: Any, before: dict[str, Tensor]) -> None:
    for name, value in _columns(inputs).items():
        if not torch.equal(value, before[name]):
            plugin.refuse(f"changes inputs.{name} in place; compute a new tensor")


def _check_finite(plugin: TrainerPlugin, columns: dict[str, Tensor]) -> None:
    for name, value in columns.items():
        if not torch.isfinite(value).all():
            plugin.refuse(f"{name} has the value {value[~torch.isfinite(value)][0].item()}; expected finite numbers")
