"""What is asked of an engine, and what came of it."""

from dataclasses import dataclass
from typing import NamedTuple

from actors.rollout.sglang.answers import Answer
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


class Generated(NamedTuple):
    """What came of a request."""

    answers: list[Answer]  # one per list of input_ids
    cut_short: bool  # the request was lost, or gave way to new weights: it may go on from these tokens
