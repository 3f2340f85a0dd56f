"""Continuous batching: admits waiting requests into slots, advances them token by token, detects their ends.

Single-threaded and without a clock; driven by the torch thread, or by tests.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from actors.tiny_engine.engine.requests import Finish, Request, Span
from actors.tiny_engine.model.forward import Weights
from actors.tiny_engine.model.kv_slots import KvSlots, SampledTokens

HEADROOM: Final = 16  # tokens reserved per running request when another one is admitted
STATISTICS_EVERY: Final = 40  # decoded tokens between two statistics, as in SGLang; each prefill makes them anew, too
MAX_PREFILL_TOKENS: Final = 16384  # padded tokens per prefill; bounds memory and the delay of decodes
QUEUED_ABORT: Final = Finish(type="abort", message="Abort in waiting queue", queued=True)
RUNNING_ABORT: Final = Finish(type="abort", message="Aborted")

Detokenize = Callable[[Sequence[int]], str]


class TokenReport(NamedTuple):
    """Progress of a request: its number of output tokens; final if `finish` is set."""

    request: Request
    num_tokens: int
    finish: Finish | None
    spans: tuple[Span, ...]  # weight versions of these tokens


class Scheduler:
    """Waiting and running requests, the weights and their version."""

    def __init__(
        self, slots: KvSlots, *, version: str, max_total_tokens: int | None = None, max_loras: int | None = None
    ) -> None:
        """Start without requests.

        Args:
            slots: empty slots.
            version: weight version of the slots' weights.
            max_total_tokens: limit on the tokens of all running requests; beyond it, the youngest are retracted.
            max_loras: limit on the adapters of running requests, the base model among them; others wait, and are
                overtaken.
        """
        self.slots = slots
        self.max_total_tokens = max_total_tokens or slots.num_slots * slots.context_length
        self._limited = max_total_tokens is not None
        self._max_loras = max_loras
        self.waiting: deque[Request] = deque()
        self.version = version
        self.paused = False
        self.num_generated = 0  # tokens since the start
        self.num_steps = 0
        self.num_retracted = 0  # requests retracted for lack of cache before the newest statistics
        self._num_retracted_since = 0
        self._num_decodes = 0
        self.detokenize: Detokenize | None = None  # required for requests with stop texts
        self._reports: list[TokenReport] = []

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return self.paused or not (self.waiting or self.slots.requests)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, first come, first served. The caller bounds their number."""
        for request in requests:
            request.next_look = self._next_look(request)
        self.waiting.extend(requests)

    def step(self) -> None:
        """Advance all running requests by one token, then prefill as many waiting ones as fit."""
        self.num_steps += 1
        if self.slots.requests:
            self._make_room()
            self._take(self.slots.decode())
            self._num_decodes += 1
            if self._num_decodes % STATISTICS_EVERY == 0:
                self._note_statistics()
        if self.waiting and self.slots.num_free:
            admitted = self._admitted()
            if admitted:
                self._take(self.slots.prefill(admitted))
                self._note_statistics()

    def _note_statistics(self) -> None:
        self.num_retracted, self._num_retracted_since = self._num_retracted_since, 0

    def take_reports(self) -> list[TokenReport]:
        """Return the reports since the last call, in order."""
        reports, self._reports = self._reports, []
        return reports

    def abort(self, rids: frozenset[str] | None) -> None:
        """Abort requests; None = all. Running ones get one more token first, as in SGLang."""
        kept: deque[Request] = deque()
        for request in self.waiting:
            if rids is None or request.rid in rids:
                self._end(request, QUEUED_ABORT)
            else:
                kept.append(request)
        self.waiting = kept
        for request in self.slots.requests:
            if rids is None or request.rid in rids:
                request.aborted, request.next_look = True, 0

    def retract(self) -> None:
        """Requeue running requests at the head of the queue; they keep their tokens and lose their slots."""
        retracted = self.slots.clear()
        for request in retracted:
            request.num_retractions += 1
        self.waiting.extendleft(reversed(retracted))

    def flush(self) -> bool:
        """Clear the cache; return False without doing so while requests run or are about to run."""
        if self.slots.requests or (self.waiting and not self.paused):
            return False
        self.slots.empty()
        return True

    def use_weights(self, weights: Weights) -> None:
        """Sample from other weights of the same shape from the next token on; cached keys and values stay."""
        self.slots.weights = weights

    def use_version(self, version: str) -> None:
        """Set the weight version of the next tokens."""
        for request in (*self.slots.requests, *self.waiting):
            request.close_span(self.version)
        self.version = version

    def _admitted(self) -> list[Request]:
        """Take requests from the queue, in order, as far as free slots, prefill tokens and cache allow."""
        admitted: list[Request] = []
        overtaken: list[Request] = []
        adapters = {request.adapter for request in self.slots.requests}
        longest = total = num_computed = 0
        room = self.max_total_tokens - self.slots.num_used_tokens - HEADROOM * len(self.slots.requests)
        while self.waiting and len(admitted) < self.slots.num_free:
            request = self.waiting[0]
            if self._max_loras is not None and len(adapters | {request.adapter}) > self._max_loras:
                overtaken.append(self.waiting.popleft())
                continue
            longest = max(longest, request.num_tokens)
            total += request.num_tokens + HEADROOM
            if not (admitted and _shares_prompt(request, admitted[-1])):
                num_computed += 1  # others of its group, which follow it, are copied
            if admitted and longest * num_computed > MAX_PREFILL_TOKENS:
                break
            if total > room and (admitted or self.slots.requests):
                break  # a single request always fits: the server bounds the context by the total
            adapters.add(request.adapter)
            admitted.append(self.waiting.popleft())
        self.waiting.extendleft(reversed(overtaken))
        return admitted

    def _make_room(self) -> None:
        """Retract the youngest requests until all others have room for a token. A single request always has room."""
        if not self._limited:
            return
        requests = self.slots.requests
        used = self.slots.num_used_tokens
        while len(requests) > 1 and used + len(requests) > self.max_total_tokens:
            request = requests[-1]
            used -= request.num_tokens
            request.num_retractions += 1
            self._num_retracted_since += 1
            self.slots.leave([len(requests) - 1])
            self.waiting.appendleft(request)

    def _take(self, drawn: SampledTokens) -> None:
        leaving: list[int] = []
        requests = self.slots.requests
        for slot, (token, log_prob) in enumerate(zip(drawn.tokens, drawn.log_probs, strict=True), drawn.first):
            request = requests[slot]
            request.output_ids.append(token)
            request.log_probs.append(log_prob)
            if slot in drawn.masks:
                mask, mask_log_prob = drawn.masks[slot]
                request.masks.append(mask)
                request.mask_log_probs.append(mask_log_prob)
            if (token in request.stopping.token_ids or len(request.output_ids) >= request.next_look) and self._look(
                request, token
            ):
                leaving.append(slot)
        self.num_generated += len(drawn.tokens)
        if leaving:
            self.slots.leave(leaving)

    def _look(self, request: Request, token: int) -> bool:
        """Report progress, and end the request if it is complete; True if it ended."""
        if request.stopping.limit == 0:  # a request for its prompt's log-probs only
            request.output_ids.clear()
            request.log_probs.clear()
            request.masks.clear()
            request.mask_log_probs.clear()
        finish = self._finish(request, token)
        if finish is not None:
            self._end(request, finish)
            return True
        request.next_look = self._next_look(request)
        length = len(request.output_ids)
        if request.stream_interval and (length == 1 or length % request.stream_interval == 0):
            request.num_reported = length
            self._reports.append(TokenReport(request, length, None, request.spans_so_far(self.version)))
        return False

    def _finish(self, request: Request, token: int) -> Finish | None:
        stopping, length = request.stopping, len(request.output_ids)
        if request.aborted:
            return RUNNING_ABORT  # even if the token is a stop token
        if length and stopping.texts and (text := self._matched_text(request)) is not None:
            return Finish(type="stop", matched=text)
        if length >= max(stopping.floor, 1) and token in stopping.token_ids:
            return Finish(type="stop", matched=token)
        return Finish(type="length") if length >= stopping.limit else None

    def _matched_text(self, request: Request) -> str | None:
        """The stop text in the last tokens, if any."""
        assert self.detokenize is not None, "stop texts are refused without a tokenizer"
        tail = self.detokenize(request.output_ids[-request.stopping.window :])
        return next((text for text in request.stopping.texts if text in tail), None)

    def _next_look(self, request: Request) -> int:
        """Output length at which the request can next end or needs a report, not counting stop tokens."""
        length, interval = len(request.output_ids), request.stream_interval
        if request.stopping.texts or (interval and not length):
            return length + 1
        report = (length // interval + 1) * interval if interval else request.stopping.limit
        return min(report, request.stopping.limit)

    def _end(self, request: Request, finish: Finish) -> None:
        request.close_span(self.version)
        request.finish = finish
        num_tokens = request.num_reported if finish.queued else len(request.output_ids)
        self._reports.append(TokenReport(request, num_tokens, finish, _within(request.spans, num_tokens)))


def _shares_prompt(request: Request, before: Request) -> bool:
    same = request.prompt_ids == before.prompt_ids and request.adapter is before.adapter
    return same and not request.output_ids


def _within(spans: Sequence[Span], num_tokens: int) -> tuple[Span, ...]:
    """Limit spans to the first tokens."""
    return tuple(Span(span.version, span.start, min(span.end, num_tokens)) for span in spans if span.start < num_tokens)
