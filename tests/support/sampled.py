"""What a generator sampled for a request, as tests compare it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.rollout.requests.request import GenerateRequest, SampleInput
from actors.rollout.requests.sending import Generator
from actors.rollout.requests.verdict import Outcome
from actors.rollout.samples.buffer import SampleBuffer
from messages import Int32Array, SampleKey, SampleStatus, SamplingParams, Segment

KEY = SampleKey(group_id=0, attempt=0, index=0)


@dataclass(frozen=True)
class Sampled:
    """The answer of one sample."""

    segment: Segment
    status: SampleStatus
    finish_reason: dict[str, Any]

    @property
    def output_ids(self) -> list[int]:
        return self.segment.response_ids.tolist()

    @property
    def log_probs(self) -> list[float]:
        return self.segment.rollout_log_probs.tolist()

    @property
    def text(self) -> str:
        return self.segment.text


@dataclass(frozen=True)
class Generated:
    """The answers to a request, and whether the samples may go on with another one."""

    answers: list[Sampled]
    cut_short: bool


def request_of(
    rid: str,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    seeds: Sequence[int],
    streamed: bool = False,
    round: int | None = 0,
    max_new_tokens: int | None = None,
) -> GenerateRequest:
    """Make a request of one or several samples without tokens."""
    inputs = [
        SampleInput(Int32Array(prompt), SampleBuffer(), seed=seed) for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    return GenerateRequest(
        rid=rid,
        inputs=inputs,
        params=params,
        max_new_tokens=max_new_tokens or params.max_new_tokens,
        min_version=1,
        round=round,
        may_stream=streamed,
    )


async def generate(generator: Generator, request: GenerateRequest) -> Generated | None:
    """Send a request; return what it sampled, None if its round was halted before it was sent."""
    outcome = await generator.generate(request)
    if outcome is Outcome.ABORTED and not request.readers:
        return None
    return Generated(taken(request), outcome is Outcome.RESEND)


def taken(request: GenerateRequest) -> list[Sampled]:
    """Take what the newest try of a request sampled so far."""
    return [
        Sampled(each.buffer.take(KEY, each.prompt_ids), reader.status, reader.meta.finish_reason or {})
        for each, reader in zip(request.inputs, request.readers, strict=True)
    ]
