"""KV cache: one contiguous slot per running request, filled by prefill and extended by decode.

Running requests occupy the first slots, so a decode works on plain slices. When requests end, the last ones move
into the holes. Requests with equal tokens, such as the samples of a group, are prefilled once: the others copy the
keys and values, and the states of linear layers behind these tokens.

Shapes: n running, E hidden size, B x Q prefill.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from actors.tiny_engine.engine.requests import Request, Sampling
from actors.tiny_engine.model import sampling
from actors.tiny_engine.model.adapters import Adapter, rows_of
from actors.tiny_engine.model.caches import NEVER, Border, Caches, Decode, Prefill
from actors.tiny_engine.model.forward import Weights, hidden_states, logits_of

MIN_CAPACITY: Final = 64  # tokens per slot; doubles as sequences grow
_TOKEN, _POSITION, _SEED, _TOP_K = range(4)
_TEMPERATURE, _TOP_P, _MIN_P, _KIND = range(4)
_PLAIN, _TRUNCATING, _GREEDY = 0.0, 1.0, 2.0  # kinds of sampling


class SampledTokens(NamedTuple):
    """Sampled tokens of consecutive slots, and their log-probs."""

    first: int  # slot
    tokens: list[int]
    log_probs: list[float]
    masks: dict[int, tuple[list[int], float]] = {}  # by slot: the kept tokens, and the log-prob among them


class Prefilled(NamedTuple):
    """What the prefill of a slot computed: the hidden state of the last token, under the weights of a stamp."""

    ids: bytes
    state: Tensor  # [E]
    stamp: int
    adapter: Adapter | None
    border: Border  # states behind the last token; decodes of the slot change its own

    @property
    def num_tokens(self) -> int:
        """Number of the tokens."""
        return len(self.ids) // array("q").itemsize


class KvSlots:
    """Running requests and their KV cache. Runs on one thread, in inference mode."""

    def __init__(self, weights: Weights, *, num_slots: int, context_length: int) -> None:
        self.requests: list[Request] = []  # running, by slot
        self._prefilled: list[Prefilled] = []  # by slot
        self.weights = weights
        self.num_slots = num_slots
        self.context_length = context_length
        self.caches = Caches(weights.config, num_slots=num_slots, dtype=weights.embedding.dtype)
        self._longest = 0  # tokens of a slot since the last `empty`
        self._ints = torch.zeros(num_slots, 4, dtype=torch.int64)
        self._floats = torch.zeros(num_slots, 4)
        self._num_greedy = 0
        self._num_truncating = 0
        self._num_floored = 0
        self._num_tempered = 0
        self._num_adapted = 0

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return self.num_slots - len(self.requests)

    @property
    def num_used_tokens(self) -> int:
        """Number of tokens in the KV cache."""
        return int(self._ints[: len(self.requests), _POSITION].sum())

    def prefill(self, requests: Sequence[Request]) -> SampledTokens:
        """Put requests into the next free slots: compute their tokens so far and sample one more for each.

        Tokens of a running request, or of an earlier one of these, are copied instead. Copies take the last slots.
        """
        first = len(self.requests)
        computed, copied = self._split(requests)
        seated = [*computed, *copied]
        lengths = [request.num_tokens for request in seated]
        self._reserve(max(lengths) + 1)
        self._seat(seated, lengths)
        if computed:
            self._compute(computed, first)
        if copied:
            self._copy(copied, first + len(computed))
        return self._draw(torch.stack([each.state for each in self._prefilled[first:]]), first)

    def decode(self) -> SampledTokens:
        """Advance every running request by one token."""
        num = len(self.requests)
        positions = self._ints[:num, _POSITION]
        self._reserve(int(positions.max()) + 1)
        states = self._decode_states(positions)
        positions += 1
        return self._draw(states, 0)

    def leave(self, slots: Sequence[int]) -> None:
        """Free some slots, given in ascending order, and move the last requests into the holes."""
        remaining = len(self.requests) - len(slots)
        gone = set(slots)
        for slot in slots:
            self._count(self.requests[slot], -1)
        movers = [slot for slot in range(remaining, len(self.requests)) if slot not in gone]
        holes = [slot for slot in slots if slot < remaining]
        if movers:
            self._ints[holes] = self._ints[movers]
            self._floats[holes] = self._floats[movers]
            used = int(self._ints[holes, _POSITION].max())
            self.caches.move(movers, holes, used)
            for hole, mover in zip(holes, movers, strict=True):
                self.requests[hole] = self.requests[mover]
                self._prefilled[hole] = self._prefilled[mover]
        del self.requests[remaining:], self._prefilled[remaining:]

    def clear(self) -> list[Request]:
        """Free all slots and return their requests, in slot order."""
        requests, self.requests, self._prefilled = self.requests, [], []
        self._num_greedy = self._num_truncating = self._num_floored = self._num_tempered = self._num_adapted = 0
        return requests

    def empty(self) -> None:
        """Clear the cache of the slots, all of which must be free. Its memory stays unless it was hardly used."""
        longest, self._longest = self._longest, 0
        if self.caches.capacity > max(2 * longest, MIN_CAPACITY):
            self.free()
        else:
            self.caches.clear()  # NaNs of broken weights must not stay; fresh pages would take ten times longer

    def free(self) -> None:
        """Release the memory of the slots, all of which must be free; it is allocated again on demand."""
        assert not self.requests, "slots in use are not freed"
        self.caches.allocate(0, is_used=False)

    def _reserve(self, length: int) -> None:
        """Make every slot at least `length` tokens long."""
        self._longest = max(self._longest, length)
        if length > (old := self.caches.capacity):
            new = min(self.context_length, max(length, 2 * old, MIN_CAPACITY))
            self.caches.allocate(new, is_used=bool(self.requests))

    def _seat(self, requests: Sequence[Request], lengths: Sequence[int]) -> None:
        rows = slice(len(self.requests), len(self.requests) + len(requests))
        vocabulary = self.weights.config.vocab_size
        ints = [
            (0, length, request.seed, request.sampling.top_k or vocabulary)
            for request, length in zip(requests, lengths, strict=True)
        ]
        wanted = [request.sampling for request in requests]
        floats = [(one.temperature, one.top_p, one.min_p, _kind(one)) for one in wanted]
        self._ints[rows] = torch.tensor(ints)
        self._floats[rows] = torch.tensor(floats)
        for request in requests:
            self._count(request, 1)
        self.requests.extend(requests)

    def _count(self, request: Request, sign: int) -> None:
        self._num_greedy += sign * request.sampling.greedy
        self._num_truncating += sign * request.sampling.truncates
        self._num_floored += sign * (request.stopping.floor > 0)
        self._num_tempered += sign * (request.sampling.temperature != 1.0)
        self._num_adapted += sign * (request.adapter is not None)

    def _split(self, requests: Sequence[Request]) -> tuple[dict[Request, bytes], dict[Request, int]]:
        """Return the requests to compute, with their tokens, and those to copy, with the slots to copy from.

        A prompt whose log-probs are wanted is computed: slots keep the last hidden state alone.
        """
        stamp, first = self.weights.stamp, len(self.requests)
        holders = {
            (each.ids, each.adapter): slot
            for slot, (each, num_kept) in enumerate(zip(self._prefilled, self._num_kept(), strict=True))
            if each.stamp == stamp and self.caches.has_first(each.num_tokens, num_kept)
        }
        computed: dict[Request, bytes] = {}
        copied: dict[Request, int] = {}
        for request in requests:
            ids = array("q", request.prompt_ids + request.output_ids).tobytes()
            source = holders.get((ids, request.adapter))
            if source is None or _wants_scores(request):
                holders[ids, request.adapter] = first + len(computed)
                computed[request] = ids
            else:
                copied[request] = source
        return computed, copied

    def _num_kept(self) -> list[int]:
        """Return the number of tokens in the cache, by slot."""
        return self._ints[: len(self._prefilled), _POSITION].tolist()

    def _compute(self, requests: Mapping[Request, bytes], first: int) -> None:
        """Fill the slots from `first` on with the keys and values of requests, given with their tokens."""
        ids = [request.prompt_ids + request.output_ids for request in requests]
        ends = [len(row) for row in ids]
        longest = max(ends)
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
        past, adapters = Prefill(self.caches, first, ends), rows_of([request.adapter for request in requests])
        states = hidden_states(self.weights, padded, past, adapters)
        self._score_prompts(list(requests), states)
        last = states[torch.arange(len(ends)), torch.tensor(ends) - 1]
        stamp = self.weights.stamp
        borders = self.caches.borders(range(first, first + len(ends)))
        self._prefilled += [
            Prefilled(own, state, stamp, request.adapter, border)
            for (request, own), state, border in zip(requests.items(), last, borders, strict=True)
        ]

    def _copy(self, sources: Mapping[Request, int], first: int) -> None:
        """Fill the slots from `first` on with the keys and values of other slots, given with the requests."""
        slots = list(sources.values())
        longest = max(request.num_tokens for request in sources)
        self.caches.copy(slots, [self._prefilled[slot].border for slot in slots], first, longest)
        self._prefilled += [self._prefilled[source] for source in sources.values()]
        for request in sources:
            if not request.output_ids:
                request.num_cached = len(request.prompt_ids)

    def _decode_states(self, positions: Tensor) -> Tensor:
        """Hidden states [n, E] of the running requests' last tokens."""
        tokens = self._ints[: len(self.requests), _TOKEN]
        adapters = rows_of([request.adapter for request in self.requests]) if self._num_adapted else ()
        return hidden_states(self.weights, tokens, Decode(self.caches, positions), adapters)

    def _draw(self, states: Tensor, first: int) -> SampledTokens:
        """Sample the next tokens of the slots from `first` on; `states` are their last hidden states, [n, E]."""
        ints, floats = self._ints[first : len(self.requests)], self._floats[first : len(self.requests)]
        logits = logits_of(self.weights, states)
        if self._num_floored:
            self._forbid_stops(logits, first)
        if self._num_tempered:
            logits /= floats[:, _TEMPERATURE, None]
        log_probs = logits.log_softmax(-1)
        uniform = sampling.uniforms(ints[:, _SEED], ints[:, _POSITION])
        tokens = sampling.draw(log_probs, uniform)
        kinds = floats[:, _KIND]
        kept = None
        if self._num_truncating:
            kept = sampling.truncated(
                log_probs, top_k=ints[:, _TOP_K], top_p=floats[:, _TOP_P], min_p=floats[:, _MIN_P]
            )
            tokens = torch.where(kinds == _TRUNCATING, sampling.draw_truncated(kept, uniform), tokens)
        if self._num_greedy:
            tokens = torch.where(kinds == _GREEDY, log_probs.argmax(-1), tokens)
        tokens = tokens.clamp_(max=log_probs.shape[-1] - 1)  # NaNs yield an index past the last token
        ints[:, _TOKEN] = tokens
        drawn = log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)
        return SampledTokens(first, tokens.tolist(), drawn.tolist(), self._masks(first, tokens.tolist(), kept))

    def _masks(
        self, first: int, tokens: Sequence[int], kept: sampling.Truncated | None
    ) -> dict[int, tuple[list[int], float]]:
        """Return the kept tokens of the requests that want them. Greedy ones keep their token alone."""
        found: dict[int, tuple[list[int], float]] = {}
        for row, (token, request) in enumerate(zip(tokens, self.requests[first:], strict=True)):
            if not request.sampling.returns_mask:
                continue
            if kept is None or request.sampling.greedy:
                found[first + row] = [token], 0.0
            else:
                found[first + row] = sampling.sampling_mask(kept, row, token)
        return found

    def _forbid_stops(self, logits: Tensor, first: int) -> None:
        for row, request in enumerate(self.requests[first:]):
            if len(request.output_ids) < request.stopping.floor and request.stopping.token_ids:
                logits[row, list(request.stopping.token_ids)] = NEVER

    def _score_prompts(self, requests: Sequence[Request], states: Tensor) -> None:
        """Fill `input_log_probs` and `input_top` where requested, without temperature, as SGLang does."""
        for row, request in enumerate(requests):
            if not _wants_scores(request):
                continue
            start, end = request.logprob_start, len(request.prompt_ids) - 1
            log_probs = logits_of(self.weights, states[row, start:end]).log_softmax(-1)
            following = torch.tensor(request.prompt_ids[start + 1 :]).unsqueeze(1)
            request.input_log_probs = log_probs.gather(1, following).squeeze(1).tolist() if len(following) else []
            if request.num_top and len(following):
                values, ids = log_probs.topk(request.num_top, dim=1)
                request.input_top = values.tolist(), ids.tolist()


def _wants_scores(request: Request) -> bool:
    return request.logprob_start >= 0 and request.input_log_probs is None


def _kind(wanted: Sampling) -> float:
    if wanted.greedy:
        return _GREEDY
    return _TRUNCATING if wanted.truncates else _PLAIN
