"""vLLM's /inference/v1/generate, by which verifiers sends prompts as tokens, and the list of models."""

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import Struct

from actors.sessions.dialects.chat import openai_error
from actors.sessions.dialects.reading import (
    Asked,
    Count,
    Neutral,
    ParameterRefused,
    Problem,
    Stop,
    Stops,
    Temperature,
    TokenId,
    TopK,
    TopP,
    Turn,
    decode,
    refuse_others,
    top_k_of,
)
from runtime.sessions.turns import TurnRequest, TurnSampling

LOWEST_LOG_PROB: Final = -9999.0  # JSON has no infinity
CREATED: Final = 0  # of a model


class _Sampling(Struct):
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    max_tokens: Count | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: list[TokenId] | None = None
    n: Any = None
    logit_bias: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    min_p: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None


NEUTRAL: Final[Neutral] = {
    "n": (1,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
}


class _Body(Struct):
    token_ids: list[TokenId]
    model: str = ""
    sampling_params: _Sampling = msgspec.field(default_factory=_Sampling)
    stream: bool | None = None
    features: Any = None
    content_parts: Any = None


class GenerateDialect:
    """Requests and answers of POST /inference/v1/generate."""

    def read(self, body: bytes) -> Asked:
        """Read a request."""
        asked, given = decode(body, _Body), TurnSampling()
        refuse_others(asked, {"stream": (False,), "features": (), "content_parts": ([],)})
        refuse_others(asked.sampling_params, NEUTRAL)
        if not asked.token_ids:
            raise ParameterRefused("token_ids", "at least one is needed")
        params = asked.sampling_params
        given = TurnSampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=top_k_of(params.top_k),
            max_tokens=params.max_tokens,
            stop=(params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ()),
            stop_token_ids=tuple(params.stop_token_ids or ()),
        )
        return Asked(TurnRequest((), sampling=given, model=asked.model, prompt_ids=tuple(asked.token_ids)))

    def answer(self, asked: Asked, turn: Turn) -> bytes:
        """Return the body of an answer: the tokens, and the log-prob of each."""
        answer = turn.answers[0]
        pairs = zip(answer.token_ids, answer.log_probs, strict=True)
        content = [{"token": f"token_id:{one}", "logprob": max(log_prob, LOWEST_LOG_PROB)} for one, log_prob in pairs]
        choice = {
            "index": 0,
            "logprobs": {"content": content},
            "finish_reason": "length" if answer.finish == "length" else "stop",
            "token_ids": answer.token_ids,
        }
        return msgspec.json.encode({"request_id": turn.id, "choices": [choice], "prompt_logprobs": None})

    def opening(self, asked: Asked, turn: Turn) -> bytes:
        """Return nothing: there are no streams here."""
        return b""

    def hold(self, asked: Asked, turn: Turn) -> bytes:
        """Return nothing."""
        return b""

    def events(self, asked: Asked, turn: Turn) -> Iterator[bytes]:
        """Return nothing."""
        yield from ()

    def problem(self, problem: Problem) -> bytes:
        """Return the body of an error."""
        return msgspec.json.encode(openai_error(problem))

    def problem_event(self, problem: Problem) -> bytes:
        """Return nothing."""
        return b""


def models(name: str, max_tokens: int) -> bytes:
    """Return the list of models, with the fields of OpenAI, vLLM and Anthropic.

    Args:
        name: of the run's model.
        max_tokens: of its context.
    """
    both = {"id": name, "object": "model", "type": "model", "created": CREATED, "created_at": "1970-01-01T00:00:00Z"}
    model = both | {"display_name": name, "owned_by": "physarum", "max_model_len": max_tokens}
    ends = {"first_id": name, "last_id": name, "has_more": False}
    return msgspec.json.encode({"object": "list", "data": [model], **ends})
