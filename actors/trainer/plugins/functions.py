"""User functions of the trainer: how each is called, and the check of what it returns.

M is the number of trained tokens of one micro-batch on this rank, B the number of samples of an optimizer step.
"""

import random
import re
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import numpy as np
import torch
from torch import Tensor

from actors.trainer.algorithms.advantage_inputs import AdvantageInputs, Advantages, sample_sums
from actors.trainer.algorithms.corrections import Correction
from actors.trainer.algorithms.loss_inputs import LossInputs, Terms
from actors.trainer.algorithms.reductions import Reduction, ReductionInputs
from runtime.process.actor import InputError
from runtime.settings.plugins import load_plugin
from runtime.settings.slime.functions import PREFIX, Args, given_sample
from runtime.settings.tables.algorithm import AlgorithmConfig
from runtime.settings.topology import Topology

PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {  # by key: what each function is called with
    "algorithm.custom_advantage": ("inputs",),
    "algorithm.custom_loss": ("inputs",),
    "algorithm.custom_tis": ("inputs",),
    "algorithm.custom_pg_loss_reducer": ("inputs",),
    "algorithm.rollout_data_postprocess": ("data",),
    "train.custom_megatron_init": ("topology",),
    "train.custom_megatron_before_log_prob_hook": ("topology", "model", "store_prefix"),
    "train.custom_megatron_before_train_step_hook": ("topology", "rollout_id", "step_id", "model", "optimizer"),
}
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

    def __init__(self, key: str, value: str, base_dirs: tuple[Path, ...] = ()) -> None:
        """Load the function.

        Args:
            key: Its setting, one of `PARAMETERS`.
            value: "module:function" or "path/file.py:function".
            base_dirs: Directories of relative files. Empty: the current directory.

        Raises:
            PluginError: It cannot be found, or cannot be called with its parameters.
        """
        self.key, self.value = key, value
        self._function = load_plugin(key, value, parameters=PARAMETERS[key], base_dirs=base_dirs).function
        self._metrics: frozenset[str] | None = None  # names that its first call returned

    @property
    def is_slimes(self) -> bool:
        """Whether the function was written for slime."""
        return self.value.startswith(PREFIX)

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
        answer = post_processed(self, inputs) if self.is_slimes else self.call(inputs)
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

    def __init__(self, key: str, value: str, base_dirs: tuple[Path, ...], algorithm: AlgorithmConfig) -> None:
        super().__init__(key, value, base_dirs)
        self._algorithm = algorithm

    def __call__(self, inputs: LossInputs) -> Correction:
        """Compute the factor of each token's policy loss."""
        answer = weighed(self, inputs, self._algorithm) if self.is_slimes else self.call(inputs)
        factors, metrics = self.pair(answer, "Correction(factors, metrics)")
        factors = self.column("the tensor of factors", factors, inputs.log_probs)
        if factors.requires_grad:
            self.refuse("the factors have a gradient; a correction must not: use log_probs.detach()")
        return Correction(factors, self.metrics(metrics, inputs.log_probs))


def weighed(plugin: TrainerPlugin, inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Call an importance-sampling function of slime; return factors and metrics per token.

    It gets a policy loss of 1 for each token and must multiply it. A token that it takes out of the mask has factor 0.
    """
    if not inputs.sequences.is_whole:
        plugin.refuse("functions of slime need whole sequences: trainer.megatron.context_parallel_size = 1")
    order = inputs.sequences.numbers.argsort(stable=True)
    sizes = [size for size in inputs.sequences.numbers.bincount().tolist() if size]
    columns = [inputs.log_probs.new_ones(len(order))]
    columns += [values.detach()[order] for values in (inputs.old_log_probs, inputs.rollout_log_probs)]
    if not sizes:  # functions of slime join columns, which fails without one: one token, which is dropped again
        sizes, columns = [1], [values.new_ones(1) for values in columns]
    losses, old, rollout = columns
    answer = plugin.call(
        args=_tis_args(algorithm),
        pg_loss=losses.clone(),
        train_log_probs=list(old.split(sizes)),
        rollout_log_probs=list(rollout.split(sizes)),
        loss_masks=list(torch.ones_like(losses).split(sizes)),
        total_lengths=sizes,
        response_lengths=sizes,
    )
    if not isinstance(answer, tuple) or len(cast("tuple[Any, ...]", answer)) != 3:
        plugin.refuse(f"returned {shown(answer)}; expected (pg_loss, loss_masks, metrics)")
    loss, masks, metrics = cast("tuple[Any, Any, Any]", answer)
    try:
        kept = torch.cat([mask.to(losses.dtype) for mask in masks])
    except (TypeError, AttributeError, RuntimeError):
        plugin.refuse(f"its masks are {shown(masks)}; expected a list with a tensor per sequence")
    factors = plugin.column("pg_loss", loss, losses).detach() * plugin.column("the masks", kept, losses)
    if not isinstance(metrics, Mapping):
        plugin.refuse(f"its metrics are {shown(metrics)}; expected a dictionary of tensors by name")
    named = {f"train/{name}": values for name, values in cast("Mapping[Any, Any]", metrics).items()}

    def put_back(values: Any) -> Any:
        if not isinstance(values, Tensor) or values.shape != losses.shape:
            return values  # is refused where all metrics are checked
        return values[: len(order)][order.argsort()]

    return put_back(factors), {name: put_back(values) for name, values in named.items()}


def _tis_args(algorithm: AlgorithmConfig) -> Args:
    """slime's `args`, as importance-sampling functions read them. Rejection is `algorithm.use_rs`, beside them."""
    low, high = algorithm.tis_clip_low, algorithm.tis_clip
    return Args(
        use_tis=True,
        use_rs=False,
        tis_clip=high,
        tis_clip_low=low,
        tis_upper_bound=high,
        tis_lower_bound=low,
        tis_level=algorithm.tis_level,
        tis_mode=algorithm.tis_mode,
        tis_batch_normalize=algorithm.tis_batch_normalize,
        rs_level=algorithm.rs_level,
        rs_lower_bound=algorithm.rs_lower_bound,
        rs_upper_bound=algorithm.rs_upper_bound,
        rs_veto_threshold=algorithm.rs_veto_threshold,
    )


def post_processed(plugin: TrainerPlugin, inputs: AdvantageInputs) -> Any:
    """Call a reward post-process function of slime; return one advantage per sample: the rewards that it returns.

    It gets the samples with usable rewards, those of a prompt group one after the other.
    """
    usable = np.flatnonzero(np.isfinite(inputs.rewards))
    order = usable[np.argsort(inputs.groups[usable], kind="stable")]
    lengths = sample_sums(inputs.response_mask.astype(np.int64), inputs.lengths)
    samples = [
        given_sample(
            group_index=int(inputs.groups[place]),
            rollout_id=int(inputs.rollouts[place]),
            index=int(place),
            reward=float(inputs.rewards[place]),
            response_length=int(lengths[place]),
        )
        for place in order
    ]
    _, rewards = plugin.pair(plugin.call(Args(reward_key=None), samples), "(raw_rewards, rewards)")
    found = np.full(len(inputs.rewards), np.nan)
    try:
        found[order] = np.asarray(rewards, dtype=np.float64).reshape(len(order))
    except (TypeError, ValueError, RuntimeError):
        plugin.refuse(f"returned {shown(rewards)} as rewards; expected {len(order)} numbers")
    return found


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


def hook(topology: Topology, name: str) -> Callable[..., None]:
    """Return a hook of the train table, which passes the topology first. It does nothing if the setting is unset.

    Args:
        topology: The topology.
        name: Name of the setting, without its table.
    """
    value = getattr(topology.train, name)
    plugin = None if value is None else TrainerPlugin(f"train.{name}", value)

    def run(*arguments: Any) -> None:
        if plugin is not None:
            plugin.call(topology, *arguments)

    return run


def custom_advantage(value: str, base_dirs: tuple[Path, ...] = ()) -> CustomAdvantage:
    """Load `algorithm.custom_advantage`."""
    return CustomAdvantage("algorithm.custom_advantage", value, base_dirs)


def custom_loss(value: str, base_dirs: tuple[Path, ...] = ()) -> CustomLoss:
    """Load `algorithm.custom_loss`."""
    return CustomLoss("algorithm.custom_loss", value, base_dirs)


def custom_weights(
    value: str, base_dirs: tuple[Path, ...] = (), *, algorithm: AlgorithmConfig | None = None
) -> CustomWeights:
    """Load `algorithm.custom_tis`. Functions of slime read its neighbours in `algorithm`."""
    return CustomWeights("algorithm.custom_tis", value, base_dirs, algorithm or AlgorithmConfig())


def custom_reducer(value: str, base_dirs: tuple[Path, ...] = ()) -> CustomReducer:
    """Load `algorithm.custom_pg_loss_reducer`."""
    return CustomReducer("algorithm.custom_pg_loss_reducer", value, base_dirs)


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
