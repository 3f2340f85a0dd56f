"""A generation request: sampling parameters, stop conditions, output, and why it ended."""

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from actors.tiny_engine.model.adapters import Adapter


class EngineRefusal(Exception):
    """The engine's state does not allow the operation, or the request is invalid. The text says why."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Validated sampling parameters. Temperature 0 is `greedy` with temperature 1."""

    temperature: float = 1.0
    greedy: bool = False
    top_k: int = 0  # 0 = all
    top_p: float = 1.0
    min_p: float = 0.0
    returns_mask: bool = False  # the answer has the tokens that truncation kept

    @property
    def truncates(self) -> bool:
        """Whether tokens may be removed from the distribution before sampling."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


class Stopping(msgspec.Struct, frozen=True, kw_only=True):
    """Stop conditions of a request."""

    limit: int  # maximum number of generated tokens
    floor: int = 0  # tokens generated before `token_ids` count; a text ends before it too, as in SGLang
    token_ids: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()
    window: int = 0  # number of last tokens that are searched for `texts`


class Span(NamedTuple):
    """Output tokens [start, end) were sampled under one weight version."""

    version: str
    start: int
    end: int


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request ended: `stop` (at `matched`), `length`, or `abort` (with a message)."""

    type: str
    matched: int | str | None = None
    message: str = ""
    queued: bool = False  # aborted while it waited for a slot: tokens that were not streamed are lost


@dataclass(slots=True, eq=False)
class Request:
    """A request in the engine. Only the torch thread changes it; its lists only grow."""

    rid: str
    prompt_ids: list[int]
    sampling: Sampling
    stopping: Stopping
    seed: int
    stream_interval: int = 0  # tokens between reports; 0 = report only the end
    logprob_start: int = -1  # first prompt position whose log-prob is requested; -1 = none
    lora: str | None = None  # name of its adapter; None: the base model
    adapter: Adapter | None = None  # set when it is admitted, and kept to its end, whatever is loaded or unloaded
    num_top: int = 0  # likeliest tokens at each place of the prompt whose log-prob is requested
    output_ids: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])  # natural log, of output_ids
    masks: list[list[int]] = field(default_factory=list[list[int]])  # kept tokens of each output id, if requested
    mask_log_probs: list[float] = field(default_factory=list[float])  # natural log, of output_ids among the kept ones
    input_log_probs: list[float] | None = None  # of prompt_ids[logprob_start + 1:]
    input_top: tuple[list[list[float]], list[list[int]]] = (
        [],
        [],
    )  # log-probs and ids at these places, likeliest first
    spans: list[Span] = field(default_factory=list[Span])
    num_retractions: int = 0
    num_cached: int = 0  # prompt tokens that a running request had
    num_reported: int = 0  # streamed tokens
    aborted: bool = False  # ends with its next token
    finish: Finish | None = None
    next_look: int = 1  # output length of the next check for an end or a report

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    def spans_so_far(self, version: str) -> tuple[Span, ...]:
        """The spans so far, with the open one closed under `version`."""
        start = self.spans[-1].end if self.spans else 0
        end = len(self.output_ids)
        return (*self.spans, Span(version, start, end)) if end > start else tuple(self.spans)

    def close_span(self, version: str) -> None:
        """Record that all tokens since the last span were sampled under `version`."""
        start = self.spans[-1].end if self.spans else 0
        end = len(self.output_ids)
        if end == start:
            return
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = Span(version, self.spans[-1].start, end)
        else:
            self.spans.append(Span(version, start, end))
