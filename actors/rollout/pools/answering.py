"""Turns of a conversation from an engine pool whose model does not change, for generate functions."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from actors.rollout.pools.frozen import FrozenPool
from actors.rollout.sglang.served_model import ServedModel
from messages import SamplingParams


class PoolTurn(NamedTuple):
    """A turn in tokens of the trained model. The pool's model sampled it, so it has no log-probs to train with."""

    ids: list[int]
    log_probs: None
    text: str


class AnsweringPool:
    """A pool that a generate function may choose for a turn.

    If its model has the trained model's tokens, they go there and back as they are; otherwise both ways as text.
    """

    def __init__(self, pool: FrozenPool, served: ServedModel, trained: ServedModel) -> None:
        """Compare the tokenizers.

        Raises:
            ValueError: a tokenizer cannot be read.
        """
        self._pool, self._served, self._trained = pool, served, trained
        self._has_same_tokens = served.has_tokens_of(trained)

    async def turn(
        self, rid: str, ids: Sequence[int], params: SamplingParams, max_new_tokens: int, seed: int
    ) -> PoolTurn:
        """Return the next turn.

        Args:
            rid: names the request.
            ids: all tokens before the turn, of the trained model.
            params: sampling parameters.
            max_new_tokens: most tokens of the turn.
            seed: of the sampling.

        Raises:
            RequestRefused, EnginesUnwilling: as by `FrozenPool.answer`.
            ValueError: a text cannot be encoded.
        """
        if self._has_same_tokens:
            answer = await self._pool.answer(rid, ids, params, max_new_tokens, seed)
            return PoolTurn(answer.ids, None, answer.text)
        params = msgspec.structs.replace(params, skip_special_tokens=True, stop_token_ids=())
        given = self._served.encode(self._trained.decode(ids))
        text = (await self._pool.answer(rid, given, params, max_new_tokens, seed)).text
        own = self._trained.encode(text)
        if len(own) > max_new_tokens:  # the trained model needs more tokens for the same text
            own = own[:max_new_tokens]
            text = self._trained.decode(own)
        return PoolTurn(own, None, text)


AnsweringPools = Mapping[str, AnsweringPool]  # by name
