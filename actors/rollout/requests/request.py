"""A request to an engine, and its result."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from actors.rollout.sglang.answers import Answer
from actors.rollout.sglang.streams import Stream
from messages import SamplingParams


@dataclass(frozen=True)
class GenerateRequest:
    """A request to an engine: one response for each list of token ids."""

    rid: str
    input_ids: list[list[int]]
    params: SamplingParams
    seeds: list[int]  # sampling seeds, one per list of input_ids
    max_new_tokens: int
    min_version: int
    round: int | None  # None: an evaluation, which no halt affects


@dataclass(eq=False)
class OpenRequest:
    """A request in flight: sent, without its final answer yet."""

    sent_at: float  # seconds of the loop's clock
    stream: Stream | None  # None: it is not streamed
    num_tokens: int = 0  # at the last check
    token_at: float = 0.0  # time of the last check that found new tokens
    engine: str = ""  # the engine that has it; empty: unknown before the first token
    given_up: bool = False  # it will be resent elsewhere
    lost: str = ""  # reason of the loss, if its engine generates tokens for other requests
    give_up: Callable[[], None] = lambda: None  # stops waiting for its answer


class Generated(NamedTuple):
    """The answers to a request, possibly cut short."""

    answers: list[Answer]  # one per list of input_ids
    cut_short: bool  # the request was lost or interrupted by a weight update: it can continue from these tokens
