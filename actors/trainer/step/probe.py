"""Weight probe: log-probs of fixed tokens under the published weights, to verify the weights of an engine.

Two correct computations of one model differ: in bfloat16 by 0.05 to 0.2 nats a token where the model is trained, and by
0.004 where its weights are random. So the trainer measures this spread with its own weights and announces it, and an
engine may differ by a multiple of it. Two things are measured:

- The probe alone, and beside a longer sequence, so that it is padded. On the CPU this moves log-probs less than another
  kernel does, since the matrices are multiplied row by row.
- Rounding: outputs of each layer, its attention and its MLP are multiplied with random numbers within one unit in the
  last place of the dtype. This moves log-probs as much as another kernel does, or somewhat more.
"""

import random
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from actors.trainer.data.batch import MicroBatch, packed_lengths, part_of
from actors.trainer.megatron import groups as ranks
from actors.trainer.megatron.config import DTYPES
from actors.trainer.megatron.imports import TransformerLayer
from actors.trainer.megatron.rank_model import Replica
from messages import MAX_PROBE_TOKENS, WeightProbe
from runtime.models.directory import MAX_TOKENIZER_BYTES, TOKENIZER, ModelError, read_json
from runtime.settings.topology import POLICY, Topology

DECIMALS: Final = 6  # of log-probs; engines are compared with a tolerance of 1e-3
NUM_SHAKEN: Final = 2  # sequences with random rounding
SPREAD_EVERY: Final = 10  # probes; training changes the spread slowly
IMPOSSIBLE: Final = 0.3  # nats between two orders of computation; rounding never explains it
COARSEST: Final = "bfloat16"  # dtype of an engine, if it is not the trainer's


class _SpecialToken(msgspec.Struct, frozen=True):
    id: int


class _Tokenizer(msgspec.Struct, frozen=True):
    """The used part of tokenizer.json."""

    added_tokens: tuple[_SpecialToken, ...] = ()


def probe_tokens(topology: Topology, vocab_size: int, context: int) -> tuple[int, ...]:
    """Choose the probe tokens: drawn from run.seed, no special tokens, at most half of the context.

    Args:
        topology: The topology. Its own context limits may be below the model's.
        vocab_size: Vocabulary size of the model.
        context: Context length of the model, in tokens.
    """
    pool = topology.engines.get(POLICY)
    limits = [None if pool is None else pool.max_total_tokens, topology.rollout.max_context_len]
    context = min([context, *(limit for limit in limits if limit is not None)])
    length = max(2, min(MAX_PROBE_TOKENS, context // 2))
    special = special_tokens(Path(topology.model.hf_checkpoint))
    return drawn_tokens(vocab_size, length, special=special, seed=topology.run.seed)


def drawn_tokens(vocab_size: int, length: int, *, special: Collection[int], seed: int) -> tuple[int, ...]:
    """Draw tokens of the vocabulary that are not special, or any tokens if all are special. Never the last token.

    When SGLang 0.5.23 looks up prompt log-probs, it confuses the last token of the vocabulary with token 0.
    """
    draw = random.Random(f"probe {seed} {vocab_size}")
    vocab_size = max(1, vocab_size - 1)
    usable = vocab_size - len({token for token in special if token < vocab_size})
    tokens: list[int] = []
    while len(tokens) < length:
        token = draw.randrange(vocab_size)
        if not usable or token not in special:
            tokens.append(token)
    return tuple(tokens)


def special_tokens(model_directory: Path) -> frozenset[int]:
    """Read a tokenizer's added tokens. Empty without a readable tokenizer.json."""
    try:
        found = read_json(model_directory, TOKENIZER, _Tokenizer, MAX_TOKENIZER_BYTES)
        return frozenset(token.id for token in found.added_tokens)
    except ModelError:
        return frozenset()


class Prober:
    """Computes the probe of the current weights. Each rank has one; its calls are collectives of all ranks."""

    def __init__(self, replica: Replica, drawn: Sequence[int]) -> None:
        """Start without a measured spread.

        Args:
            replica: the model.
            drawn: tokens for what the prompts do not fill; their number is that of the probe.
        """
        self._replica = replica
        self._drawn = tuple(drawn)
        self._num_probes = 0
        self._spreads: dict[str, float] = {}

    def probe(self, prompt_ids: Sequence[int] = ()) -> WeightProbe:
        """Compute the probe; the result is the same on all ranks.

        Args:
            prompt_ids: tokens of prompts; empty: none are known.

        Raises:
            FloatingPointError: a log-prob is not finite, so the weights are unusable; or it depends on the order of
                computation.
        """
        usable = [token for token in prompt_ids if 0 <= token < self._replica.hf.vocab_size - 1]  # see `drawn_tokens`
        token_ids = (*usable, *self._drawn)[: len(self._drawn)]
        (log_probs,) = log_probs_of(self._replica, [token_ids])
        if self._num_probes % SPREAD_EVERY == 0:
            self._spreads = spreads_of(self._replica, token_ids, log_probs)
        self._num_probes += 1
        rounded = tuple(round(float(value), DECIMALS) for value in log_probs)
        return WeightProbe(token_ids=token_ids, log_probs=rounded, spreads=self._spreads)


def spreads_of(replica: Replica, token_ids: Sequence[int], log_probs: NDArray[np.float32]) -> dict[str, float]:
    """Measure how far correct computations of the probe differ: the mean absolute difference in nats, by dtype.

    Args:
        replica: the model.
        token_ids: of the probe.
        log_probs: of the probe, computed alone.

    Raises:
        FloatingPointError: they depend on the order of computation.
    """
    own = next(name for name, dtype in DTYPES.items() if dtype is replica.dtype)
    longer = [*reversed(token_ids), *token_ids[: 1 + len(token_ids) // 8]]
    padded, _ = log_probs_of(replica, [token_ids, longer])
    orders = mean_difference(log_probs, padded)
    if orders > IMPOSSIBLE:
        raise FloatingPointError(
            f"the trainer's log-probs of the same tokens differ by {orders:.2g} nats on average between a sequence "
            "alone and beside a longer one: its attention or its positions are wrong"
        )
    with shaken(replica, torch.finfo(DTYPES[COARSEST]).eps):
        moved = log_probs_of(replica, [token_ids] * NUM_SHAKEN)
    rounding = sum(mean_difference(log_probs, each) for each in moved) / NUM_SHAKEN
    spreads = {own: orders, COARSEST: max(orders, rounding)}
    return {name: round(value, DECIMALS) for name, value in spreads.items()}


def mean_difference(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Mean absolute difference of all log-probs but the first."""
    return float(np.abs(one - other)[1:].mean())


@contextmanager
def shaken(replica: Replica, eps: float) -> Generator[None]:
    """Multiply outputs of attention, MLP and layers with random numbers of 1 - eps to 1 + eps inside the block.

    The numbers depend on the place alone, so ranks that hold the same output get the same.
    """

    def shake(seed: int, _module: Any, _inputs: Any, output: Any) -> Any:
        hidden, *others = output
        generator = torch.Generator(hidden.device).manual_seed(seed)
        factors = torch.rand(hidden.shape, generator=generator, device=hidden.device)
        return (hidden.float() * (1 + eps * (2 * factors - 1))).to(hidden.dtype), *others

    layers = [each for chunk in replica.chunks for each in chunk.modules() if isinstance(each, TransformerLayer)]
    hooks = [
        module.register_forward_hook(partial(shake, 3 * layer.layer_number + number))
        for layer in layers
        for number, module in enumerate((layer.self_attention, layer.mlp, layer))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def log_probs_of(replica: Replica, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
    """Compute the log-probs of sequences in one forward pass. A collective; the result is the same on all ranks.

    Raises:
        FloatingPointError: a log-prob is not finite.
    """
    lengths = np.array([len(each) for each in sequences])
    starts = np.cumsum(lengths) - lengths
    column = np.full(int(lengths.sum()), -np.inf, dtype=np.float32)  # each context-parallel rank fills its part
    column[starts] = 0.0
    replica.fill_log_probs([_micro_batch(replica, sequences)], column, temperature=1.0)
    column = ranks.max_over_replicas(torch.from_numpy(column)).numpy()
    if not np.isfinite(column).all():
        raise FloatingPointError(f"the log-probs of the probe are {column.tolist()}")
    return np.split(column, starts[1:])


def _micro_batch(replica: Replica, sequences: Sequence[Sequence[int]]) -> MicroBatch:
    """Lay sequences out as samples in which all tokens but the first train."""
    inputs = np.array([len(each) - 1 for each in sequences])
    if replica.packed:
        lengths = packed_lengths(inputs, replica.length_multiple, replica.context)
    else:
        multiple = replica.length_multiple
        lengths = np.full(len(inputs), -(-int(inputs.max()) // multiple) * multiple)
    starts = (np.cumsum(lengths) - lengths)[: len(inputs)]
    positions = np.concatenate([start + np.arange(size) for start, size in zip(starts, inputs, strict=True)])
    columns = np.concatenate([np.arange(size) for size in inputs]) + np.repeat(
        np.cumsum(inputs + 1) - inputs - 1, inputs
    )
    tokens = np.zeros(int(lengths.sum()), dtype=np.int64)
    sources = np.full_like(tokens, -1)
    every = np.concatenate([np.asarray(each, dtype=np.int64) for each in sequences])
    tokens[positions], sources[positions] = every[columns], columns
    rows = 1 if replica.packed else len(inputs)
    whole = MicroBatch(
        tokens=tokens.reshape(rows, -1),
        rows_M=positions,
        targets_M=every[columns + 1],
        columns_M=columns + 1,
        samples=np.arange(len(inputs)),
        sources=sources.reshape(rows, -1),
        bounds=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32) if replica.packed else None,
    )
    return part_of(whole, lengths, replica.context)
