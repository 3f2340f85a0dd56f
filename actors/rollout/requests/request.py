"""What is asked of an engine, and what came of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from actors.rollout.sglang.answers import Answer
from actors.rollout.sglang.streams import Stream
from messages import SamplingParams


@dataclass(frozen=True)
class GenerateRequest:
    """What is asked of an engine: one response for each list of token ids."""

    rid: str
    input_ids: list[list[int]]
    params: SamplingParams
    seeds: list[int]  # of sampling, one per list of input_ids
    max_new_tokens: int
    min_version: int
    round: int | None  # None: an evaluation, which no halt touches


@dataclass(eq=False)
class OpenRequest:
    """A request that was sent and is not answered yet."""

    sent_at: float  # seconds of the loop's clock
    stream: Stream | None  # none: its answer comes whole
    num_tokens: int = 0  # when it was last looked at
    token_at: float = 0.0  # when there were more than at the look before
    engine: str = ""  # that has it; empty: not known before its first token
    given_up: bool = False  # it is to be sent again elsewhere
    lost: str = ""  # why it is, where the engine that has it makes tokens of others
    give_up: Callable[[], None] = lambda: None  # ends the waiting for its answer


class Generated(NamedTuple):
    """What came of a request."""

    answers: list[Answer]  # one per list of input_ids
    cut_short: bool  # the request was lost, or gave way to new weights: it may go on from these tokens
