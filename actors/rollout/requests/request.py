"""A request to an engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from actors.rollout.samples.buffer import SampleBuffer
from actors.rollout.sglang.reading import AnswerReader
from messages import Int32Array, SamplingParams


@dataclass(eq=False)
class SampleInput:
    """What a request sends for one sample: prompt, response so far and new input."""

    prompt_ids: Int32Array  # [P]
    buffer: SampleBuffer  # the response so far; the answer enters it
    new_input: Int32Array = field(default_factory=Int32Array)  # input between turns that no request had yet
    seed: int = 0  # sampling seed

    def ids(self) -> NDArray[np.int32]:
        """[P + T + N], all tokens that the engine gets."""
        if not self.buffer.num_tokens and not len(self.new_input):
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, self.buffer.ids, self.new_input])


@dataclass(eq=False)
class GenerateRequest:
    """A request to an engine: one response for each sample."""

    rid: str
    inputs: Sequence[SampleInput]
    params: SamplingParams
    max_new_tokens: int
    min_version: int
    round: int | None  # None: an evaluation, which no halt affects
    may_stream: bool = False  # for one sample whose tokens are stored while it generates
    begun: Callable[[], None] | None = None  # called with the chunks of its answer, which is streamed if it may be
    readers: Sequence[AnswerReader] = ()  # of the answers to its newest try, one per input
    engine: str = ""  # name of the engine that got its newest try; empty: the router chose

    def engine_rids(self, rid: str) -> list[str]:
        """Return the ids of a try on the engine: those of a batch are <rid>_0, <rid>_1, ..."""
        return [rid] if len(self.inputs) == 1 else [f"{rid}_{index}" for index in range(len(self.inputs))]


@dataclass(eq=False)
class OpenRequest:
    """A request in flight: sent, without its final answer yet."""

    sent_at: float  # seconds of the loop's clock
    reader: AnswerReader | None  # of its stream; None: it is not streamed
    num_tokens: int = 0  # at the last check
    token_at: float = 0.0  # time of the last check that found new tokens
    engine: str = ""  # the engine that has it; empty: unknown before the first token
    adapter: str = ""  # name of the LoRA adapter that it names
    given_up: bool = False  # it will be resent elsewhere
    lost: str = ""  # reason of the loss, if its engine generates tokens for other requests
    give_up: Callable[[], None] = lambda: None  # stops waiting for its answer
