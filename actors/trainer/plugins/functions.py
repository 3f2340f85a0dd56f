"""User functions of the trainer: how each is called, and the check of what it returns.

M is the number of trained tokens of one micro-batch on this rank, B the number of samples of an optimizer step.
"""

import random
import re
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import numpy as np
import torch
from torch import Tensor

from actors.trainer.algorithms.advantage_inputs import AdvantageInputs, Advantages
from actors.trainer.algorithms.corrections import Correction
from actors.trainer.algorithms.loss_inputs import LossInputs, Terms
from actors.trainer.algorithms.reductions import Reduction, ReductionInputs
from runtime.functions.load import load, project_of
from runtime.functions.table import ADVANTAGE, LOSS, REDUCER, WEIGHTS, UserFunction, at
from runtime.process.actor import InputError
from runtime.settings.reading.schema import named_function
from runtime.settings.tables.algorithm import AlgorithmConfig
from runtime.settings.topology import Topology

METRIC: Final = re.compile(r"train/[A-Za-z0-9][A-Za-z0-9_.@/-]{0,99}")
TAKEN: Final = frozenset(  # metrics of the trainer itself
    (
        "train/loss",
        "train/pg_loss",
        "train/entropy_loss",
        "train/kl_loss",
        "train/entropy_coef",
        "train/mtp_loss",
        "train/grad_norm",
        "train/lr-pg_0",
        "train/num_skipped_steps",
        "train/num_lost_groups",
        "train/num_untrained_samples",
    )
)
MAX_METRICS: Final = 64  # of one function


class TrainerPlugin:
    """A user function of the trainer, called by its key. Its faults are errors of the user's input."""

    def __init__(self, kind: UserFunction, key: str, value: str, base_dirs: Sequence[Path] = ()) -> None:
        """Load the function.

        Args:
            kind: Its kind.
            key: Its setting.
            value: "module:function" or "path/file.py:function".
            base_dirs: Directories of relative files. Empty: the current directory.

        Raises:
            PluginError: It cannot be found, or cannot be called with its parameters.
        """
        self.key, self.value = key, value
        self._function = load(kind, key, value, base_dirs).function
        self._metrics: frozenset[str] | None = None  # names that its first call returned

    @property
    def adapter(self) -> str | None:
        """The module that calls a function written for another project; None: it was written for this one."""
        project = project_of(self.value)
        return None if project is None else f"actors.trainer.plugins.{project}"

    def call(self, *arguments: Any, **named: Any) -> Any:
        """Call the function.

        Raises:
            InputError: It raised an exception.
        """
        try:
            return self._function(*arguments, **named)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function may raise anything
            self.refuse(f"raised {type(error).__name__}{_place(error, self.value)}: {error}", cause=error)

    def refuse(self, problem: str, cause: BaseException | None = None) -> NoReturn:
        """Raise InputError with the key, the function and the problem."""
        raise InputError(f"{self.key} = {self.value!r}: {problem}") from cause

    def pair(self, answer: Any, expected: str) -> tuple[Any, Any]:
        """Return both parts of an answer that must be a pair."""
        if not isinstance(answer, tuple) or len(cast("tuple[Any, ...]", answer)) != 2:
            self.refuse(f"returned {shown(answer)}; expected {expected}")
        return cast("tuple[Any, Any]", answer)

    def column(self, what: str, value: Any, like: Tensor) -> Tensor:
        """Return a column of one number per trained token, as `like` is."""
        expected = f"one number per trained token, a {_name(like.dtype)} tensor {list(like.shape)}"
        if not isinstance(value, Tensor) or value.shape != like.shape or value.dtype != like.dtype:
            self.refuse(f"{what} is {shown(value)}; expected {expected}")
        if value.device != like.device:
            self.refuse(f"{what} is on {value.device}; expected {like.device}, as the inputs are")
        return value

    def metrics(self, found: Any, like: Tensor) -> dict[str, Tensor]:
        """Return metrics per token, with the names that the first call returned."""
        if not isinstance(found, Mapping):
            self.refuse(f"its metrics are {shown(found)}; expected a dictionary of tensors by name")
        given = cast("Mapping[Any, Any]", found)
        columns: dict[str, Tensor] = {}
        for name, values in given.items():
            if not isinstance(name, str) or not METRIC.fullmatch(name) or name in TAKEN:
                why = "is a metric of the trainer" if name in TAKEN else 'must begin with "train/"'
                self.refuse(f"its metric {name!r:.120} {why}; choose another name")
            if isinstance(values, Tensor) and values.dtype != like.dtype and not values.is_complex():
                values = values.to(like.dtype)
            columns[name] = self.column(f"its metric {name}", values, like).detach()
        if len(columns) > MAX_METRICS:
            self.refuse(f"returned {len(columns)} metrics; at most {MAX_METRICS}")
        names = frozenset(columns)
        self._metrics = names if self._metrics is None else self._metrics
        if names != self._metrics:
            raised = ", ".join(sorted(names ^ self._metrics))
            self.refuse(f"its metrics must have the same names in every call; not always there: {raised}")
        return columns


class CustomAdvantage(TrainerPlugin):
    """An estimator: gets `AdvantageInputs`, returns `Advantages`, or one advantage per sample or per token."""

    def __call__(self, inputs: AdvantageInputs) -> Advantages:
        """Compute the advantage of each token."""
        adapter = self.adapter
        answer = self.call(inputs) if adapter is None else at(f"{adapter}:post_processed")(self, inputs)
        found, returns = answer if isinstance(answer, Advantages) else (answer, None)
        advantages = self.per_token("the advantages", found, inputs)
        return Advantages(advantages, None if returns is None else self.per_token("the returns", returns, inputs))

    def per_token(self, what: str, values: Any, inputs: AdvantageInputs) -> Any:
        """Return a column of one number per token; one number per sample is spread over its tokens."""
        num_samples, num_tokens = len(inputs.lengths), len(inputs.loss_mask)
        expected = f"a float array of one number per sample [{num_samples}] or per token [{num_tokens}]"
        if not isinstance(values, np.ndarray) or values.dtype.kind != "f" or values.ndim != 1:
            self.refuse(f"returned {shown(values)} for {what}; expected {expected}")
        if len(values) not in (num_samples, num_tokens):
            self.refuse(f"returned {shown(values)} for {what}; expected {expected}")
        column = values.astype(np.float64)
        return column if len(column) == num_tokens else inputs.spread(column)


class CustomLoss(TrainerPlugin):
    """A policy loss: gets `LossInputs`, returns `Terms`, or a pair of loss and metrics."""

    def __call__(self, inputs: LossInputs) -> Terms:
        """Compute the loss per token."""
        loss, metrics = self.pair(self.call(inputs), "Terms(loss, metrics)")
        return Terms(self.column("the loss", loss, inputs.log_probs), self.metrics(metrics, inputs.log_probs))


class CustomWeights(TrainerPlugin):
    """Importance weights: gets `LossInputs`, returns `Correction`, or a pair of factors and metrics."""

    def __init__(self, key: str, value: str, base_dirs: Sequence[Path], algorithm: AlgorithmConfig) -> None:
        super().__init__(WEIGHTS, key, value, base_dirs)
        self._algorithm = algorithm

    def __call__(self, inputs: LossInputs) -> Correction:
        """Compute the factor of each token's policy loss."""
        adapter = self.adapter
        answer = self.call(inputs) if adapter is None else at(f"{adapter}:weighed")(self, inputs, self._algorithm)
        factors, metrics = self.pair(answer, "Correction(factors, metrics)")
        factors = self.column("the tensor of factors", factors, inputs.log_probs)
        if factors.requires_grad:
            self.refuse("the factors have a gradient; a correction must not: use log_probs.detach()")
        return Correction(factors, self.metrics(metrics, inputs.log_probs))


class CustomReducer(TrainerPlugin):
    """A reduction: gets `ReductionInputs`, returns `Reduction`, or a pair of token weights and shares."""

    def __call__(self, inputs: ReductionInputs) -> Reduction:
        """Compute the weights of token losses, and the denominator."""
        weights, shares = self.pair(self.call(inputs), "Reduction(token_weights, shares)")
        return Reduction(
            self.per_sample("token_weights", weights, inputs, np.float64),
            self.per_sample("shares", shares, inputs, np.int64),
        )

    def per_sample(self, what: str, values: Any, inputs: ReductionInputs, dtype: type[np.generic]) -> Any:
        """Return a column of one finite number >= 0 per sample."""
        kind, count = ("integer " if dtype is np.int64 else ""), len(inputs.mask_sums)
        expected = f"an {kind}array [{count}] of one number >= 0 per sample"
        right = isinstance(values, np.ndarray) and values.shape == (count,) and values.dtype.kind in "iuf"
        if not right or (dtype is np.int64 and values.dtype.kind == "f"):
            self.refuse(f"{what} is {shown(values)}; expected {expected}")
        if not np.isfinite(values).all() or (values < 0).any():
            self.refuse(
                f"{what} has the value {values[~(np.isfinite(values) & (values >= 0))][0]}; expected {expected}"
            )
        return values.astype(dtype)


def hook(
    topology: Topology, kind: UserFunction, before_change: Callable[[], object] = lambda: None
) -> Callable[..., None]:
    """Return the hook of a kind, which passes the topology first. It does nothing if no setting names one.

    Before the function, which may change the model, it calls `before_change`.
    """
    named = named_function(topology, kind)
    plugin = None if named is None else TrainerPlugin(kind, *named)

    def run(*arguments: Any) -> None:
        if plugin is not None:
            before_change()
            plugin.call(topology, *arguments)

    return run


def custom_advantage(value: str, base_dirs: Sequence[Path] = ()) -> CustomAdvantage:
    """Load `algorithm.estimator.function`."""
    return CustomAdvantage(ADVANTAGE, "algorithm.estimator.function", value, base_dirs)


def custom_loss(value: str, base_dirs: Sequence[Path] = ()) -> CustomLoss:
    """Load `algorithm.loss.function`."""
    return CustomLoss(LOSS, "algorithm.loss.function", value, base_dirs)


def custom_weights(
    value: str, base_dirs: Sequence[Path] = (), *, algorithm: AlgorithmConfig | None = None
) -> CustomWeights:
    """Load `algorithm.tis.function`. Functions of slime read its neighbours in `algorithm`."""
    return CustomWeights("algorithm.tis.function", value, base_dirs, algorithm or AlgorithmConfig())


def custom_reducer(value: str, base_dirs: Sequence[Path] = ()) -> CustomReducer:
    """Load `algorithm.reduction.function`."""
    return CustomReducer(REDUCER, "algorithm.reduction.function", value, base_dirs)


@contextmanager
def same_random_numbers(device: torch.device) -> Generator[None]:
    """Restore the random number generators of Python, NumPy and torch after the block."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def shown(value: Any) -> str:
    """Describe a value in an error: type and shape of an array, or its beginning."""
    if isinstance(value, Tensor):
        return f"a {_name(value.dtype)} tensor {list(value.shape)}"
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, Any]", value)
        return f"{'an' if array.dtype.kind == 'i' else 'a'} {array.dtype} array {list(array.shape)}"
    if isinstance(value, tuple | list):
        items = cast("tuple[Any, ...]", value)
        return f"a {type(value).__name__} of {len(items)}: {', '.join(shown(item) for item in items[:3])}"
    return f"{value!r:.120}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _place(error: BaseException, value: str) -> str:
    """Line of the user's function that raised, if it is in a file."""
    file = value.rpartition(":")[0]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(file)]
    return f" in line {lines[-1]}" if file.endswith(".py") and lines else ""
