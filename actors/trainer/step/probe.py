"""Weight probe: log-probs of fixed tokens under the published weights, to verify the weights of an engine."""

import random
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch

from actors.trainer.data.batch import MicroBatch, packed_lengths, part_of
from actors.trainer.megatron import groups as ranks
from actors.trainer.megatron.rank_model import Replica
from messages import WeightProbe
from runtime.models.directory import MAX_TOKENIZER_BYTES, TOKENIZER, ModelError, read_json
from runtime.settings.topology import POLICY, Topology

MAX_TOKENS: Final = 64
DECIMALS: Final = 6  # of log-probs; engines are compared with a tolerance of 1e-3


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
    length = max(2, min(MAX_TOKENS, context // 2))
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


def probe(replica: Replica, token_ids: Sequence[int]) -> WeightProbe:
    """Compute the weight probe of the current weights. A collective of all ranks; the result is the same on each.

    Raises:
        FloatingPointError: A log-prob is not finite; the weights are unusable.
    """
    column = np.full(len(token_ids), -np.inf, dtype=np.float32)  # each context-parallel rank fills its part
    column[0] = 0.0
    replica.fill_log_probs([_micro_batch(replica, token_ids)], column, temperature=1.0)
    column = ranks.max_over_replicas(torch.from_numpy(column)).numpy()
    if not np.isfinite(column).all():
        raise FloatingPointError(f"the log-probs of the probe are {column.tolist()}")
    return WeightProbe(token_ids=tuple(token_ids), log_probs=tuple(round(float(value), DECIMALS) for value in column))


def _micro_batch(replica: Replica, token_ids: Sequence[int]) -> MicroBatch:
    """Lay the tokens out as one sample in which all tokens but the first train."""
    inputs, positions = len(token_ids) - 1, np.arange(len(token_ids) - 1)
    lengths = packed_lengths(np.array([inputs]), replica.length_multiple, replica.context)
    if not replica.packed:
        lengths = lengths.sum(keepdims=True)
    tokens = np.zeros((1, int(lengths.sum())), dtype=np.int64)
    tokens[0, :inputs] = token_ids[:-1]
    whole = MicroBatch(
        tokens=tokens,
        rows_M=positions,
        targets_M=np.array(token_ids[1:], dtype=np.int64),
        columns_M=positions + 1,
        samples=np.zeros(1, dtype=np.int64),
        sources=np.where(np.arange(tokens.shape[1]) < inputs, np.arange(tokens.shape[1]), -1)[None],
        bounds=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32) if replica.packed else None,
    )
    return part_of(whole, lengths, replica.context)
