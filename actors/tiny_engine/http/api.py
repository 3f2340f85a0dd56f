"""Parses and validates the body of POST /generate."""

import uuid
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec

from actors.rollout.sglang.facts import KEPT_OF_INPUT, KEPT_OF_RESPONSE
from actors.tiny_engine.engine.requests import Request, Sampling, Stopping
from actors.tiny_engine.http.bodies import (
    DEFAULT_NEW_TOKENS,
    MAX_BATCH,
    MAX_MASK,
    MAX_STOPS,
    NEUTRAL,
    UNSUPPORTED_FIELDS,
    UNSUPPORTED_SAMPLING,
    GenerateBody,
    OneOrMany,
    SamplingParams,
    SchemaError,
    decode_body,
)
from actors.tiny_engine.model.sampling import request_seed
from actors.tiny_engine.model.text import Text

T = TypeVar("T")


class BrokenRequest(Exception):
    """A request that fails with status 500 instead of 400, as in SGLang when its tokenizer raises."""


class Rendering(NamedTuple):
    """Parts that the caller wants in the answer, such as log-probs."""

    log_probs: bool
    text_in_log_probs: bool
    prompt_ids: bool
    skip_special_tokens: bool
    stop_trim: bool


class Job(NamedTuple):
    """One request of a call, and the contents of its answer."""

    request: Request
    rendering: Rendering


class Call(NamedTuple):
    """A POST /generate: its jobs, in the order of the answer. If `single`, the answer is an object, not a list."""

    jobs: list[Job]
    single: bool
    stream: bool


class Limits(NamedTuple):
    """Limits of every request, from the model and the server's flags."""

    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]
    stream_interval: int
    random_seed: int


class CallReader:
    """Converts bodies of POST /generate into requests for the engine."""

    def __init__(self, limits: Limits, text: Text | None) -> None:
        self._limits = limits
        self._text = text
        self._num_seeded = 0

    def read(self, data: bytes) -> Call:
        """Validate a body and build its requests.

        Raises:
            SchemaError: the body is not JSON, or a field has the wrong type.
            ValueError: a value is impossible or unsupported.
        """
        body = decode_body(data, GenerateBody)
        for name in UNSUPPORTED_FIELDS:
            if getattr(body, name):
                raise ValueError(f"{name} is not supported by the tiny engine")
        prompts, single = self._prompts(body)
        params = _params(body.sampling_params, len(prompts))
        num_samples = params[0].n
        if any(other.n != num_samples for other in params):
            raise ValueError("n must be the same for all requests of a batch")
        if len(prompts) * num_samples > MAX_BATCH:
            raise ValueError(f"a call may hold at most {MAX_BATCH} requests, got {len(prompts)} x {num_samples}")
        rids = _rids(body.rid, len(prompts), num_samples, single)
        log_probs = _broadcast(body.return_logprob or False, len(prompts), "return_logprob")
        starts = _broadcast(-1 if body.logprob_start_len is None else body.logprob_start_len, len(prompts), "starts")
        masks = _broadcast(body.return_sampling_mask or False, len(prompts), "return_sampling_mask")
        tops = _broadcast(body.top_logprobs_num or 0, len(prompts), "top_logprobs_num")
        loras = _broadcast(body.lora_path, len(prompts), "lora_path")
        jobs: list[Job] = []
        for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            for sample in range(num_samples):
                request = self._request(rids[len(jobs)], prompt, param, sample, body.stream, mask=masks[index])
                request.logprob_start = _logprob_start(starts[index], prompt) if log_probs[index] else -1
                request.num_top = self._num_top(tops[index], param) if log_probs[index] else 0
                request.lora = loras[index] or None
                jobs.append(Job(request, self._rendering(body, param, log_probs[index])))
        return Call(jobs=jobs, single=single and num_samples == 1, stream=body.stream)

    def _num_top(self, wanted: int, params: SamplingParams) -> int:
        """Check the number of likeliest tokens of the prompt's places. Those of generated tokens are not supported."""
        if wanted and params.max_new_tokens != 0:
            raise ValueError("top_logprobs_num is not supported by the tiny engine unless max_new_tokens is 0")
        if not 0 <= wanted <= self._limits.vocab_size:
            raise ValueError(f"top_logprobs_num must be in [0, {self._limits.vocab_size}], got {wanted}")
        return wanted

    def _prompts(self, body: GenerateBody) -> tuple[list[list[int]], bool]:
        """The prompts' token ids, and whether the body holds a single prompt instead of a list."""
        ids = bytes(body.input_ids)
        given = (ids != b"null") + (body.text is not None)
        if given != 1:
            raise ValueError("Either text or input_ids should be provided, and not both.")
        if body.text is not None:
            if self._text is None:
                raise ValueError("text needs a tokenizer, and the model directory has no tokenizer.json")
            single = isinstance(body.text, str)
            prompts = [self._text.encode(text) for text in ([body.text] if isinstance(body.text, str) else body.text)]
        else:
            single = ids[1:].lstrip()[:1] != b"["
            prompts = [decode_body(ids, list[int])] if single else decode_body(ids, list[list[int]])
        if not prompts:
            raise ValueError("a batch must hold at least one prompt")
        for prompt in prompts:
            self._check_prompt(prompt)
        return prompts, single

    def _check_prompt(self, prompt: list[int]) -> None:
        limits = self._limits
        if not prompt:
            raise ValueError("input_ids must hold at least one token")
        if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
            bad = next(token for token in prompt if not 0 <= token < limits.vocab_size)
            raise ValueError(f"input_ids holds {bad}, out of the vocabulary of {limits.vocab_size} tokens")
        if len(prompt) >= limits.context_length:
            raise ValueError(
                f"The input ({len(prompt)} tokens) is longer than the model's context length "
                f"({limits.context_length} tokens)."
            )
        longest = limits.context_length - KEPT_OF_INPUT
        if len(prompt) >= longest:
            raise ValueError(
                f"Input length ({len(prompt)} tokens) exceeds the maximum allowed length ({longest} tokens). "
                "Use a shorter input or enable --allow-auto-truncate."
            )

    def _request(
        self, rid: str, prompt: list[int], params: SamplingParams, sample: int, stream: bool, *, mask: bool
    ) -> Request:
        interval = (params.stream_interval or self._limits.stream_interval) if stream else 0
        return Request(
            rid=rid,
            prompt_ids=prompt,
            sampling=_sampling(params, returns_mask=mask),
            stopping=self._stopping(params, len(prompt)),
            seed=self._seed(params, sample),
            stream_interval=interval,
        )

    def _seed(self, params: SamplingParams, sample: int) -> int:
        """Seed of a sample: from the request's own seed, else from the server's seed and the order of arrival."""
        if params.sampling_seed is not None:
            return request_seed(params.sampling_seed, sample)
        self._num_seeded += 1
        return request_seed(self._limits.random_seed, "arrival", self._num_seeded)

    def _stopping(self, params: SamplingParams, num_prompt: int) -> Stopping:
        limits, wanted = self._limits, params.max_new_tokens
        room = limits.context_length - num_prompt
        if wanted is not None and wanted > room:
            raise ValueError(
                f"Requested token count exceeds the model's maximum context length of {limits.context_length} tokens. "
                f"You requested a total of {num_prompt + wanted} tokens: {num_prompt} tokens from the input messages "
                f"and {wanted} tokens for the completion."
            )
        texts = _listed(params.stop)
        own = frozenset(params.stop_token_ids or ())
        if any(not 0 <= token < limits.vocab_size for token in own):
            raise ValueError(f"stop_token_ids must be in the vocabulary of {limits.vocab_size} tokens")
        return Stopping(
            limit=min(room - KEPT_OF_RESPONSE, DEFAULT_NEW_TOKENS if wanted is None else wanted),
            floor=params.min_new_tokens,
            token_ids=frozenset() if params.ignore_eos else own | limits.eos_token_ids,
            texts=tuple(texts),  # an empty one ends at the first token, as in SGLang
            window=self._window(texts),
        )

    def _window(self, texts: Sequence[str]) -> int:
        """Number of last tokens that SGLang searches for stop texts."""
        if len(texts) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings are allowed, got {len(texts)}")
        if not texts:
            return 0
        if self._text is None:
            raise ValueError("stop needs a tokenizer, and the model directory has no tokenizer.json")
        try:
            return max(map(self._text.width, texts)) + 1
        except Exception as error:
            raise BrokenRequest(f"stop: {error}") from error

    def _rendering(self, body: GenerateBody, params: SamplingParams, log_probs: bool) -> Rendering:
        if body.return_text_in_logprobs and self._text is None:
            raise ValueError("return_text_in_logprobs needs a tokenizer, and the model directory has none")
        return Rendering(
            log_probs=log_probs,
            text_in_log_probs=body.return_text_in_logprobs,
            prompt_ids=body.return_prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop_trim=not params.no_stop_trim,
        )


def _params(data: msgspec.Raw, num_prompts: int) -> list[SamplingParams]:
    raw = bytes(data)
    if raw.startswith(b"["):
        many = [_checked(decoded) for decoded in _decoded_params(raw, list[SamplingParams])]
        if len(many) != num_prompts:
            raise ValueError(f"sampling_params has {len(many)} entries for {num_prompts} prompts")
        return many
    one = NEUTRAL if raw == b"null" else _checked(_decoded_params(raw, SamplingParams))
    return [one] * num_prompts


def _decoded_params(data: bytes, struct: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=struct)
    except msgspec.ValidationError as error:
        message = f"sampling_params: {error}"
        if "unknown field" in message:
            message += f"; known: {', '.join(SamplingParams.__struct_fields__)}"
        raise ValueError(message) from error
    except msgspec.DecodeError as error:
        raise SchemaError(str(error)) from error


def _checked(params: SamplingParams) -> SamplingParams:
    for name in UNSUPPORTED_SAMPLING:
        value = getattr(params, name)
        if value != getattr(NEUTRAL, name) and value not in ([], {}, ""):
            raise ValueError(f"sampling_params: {name} is not supported by the tiny engine")
    if params.top_k < 1 and params.top_k != -1:
        raise ValueError(f"top_k must be -1 (disable) or at least 1, got {params.top_k}.")
    limit = DEFAULT_NEW_TOKENS if params.max_new_tokens is None else params.max_new_tokens
    if params.min_new_tokens > limit:
        raise ValueError(f"min_new_tokens must be in [0, max_new_tokens({limit})], got {params.min_new_tokens}.")
    return params


def _sampling(params: SamplingParams, *, returns_mask: bool) -> Sampling:
    greedy = params.temperature < 1e-6  # SGLang's threshold
    if returns_mask and not greedy and not 1 <= params.top_k <= MAX_MASK:
        raise ValueError(
            f"return_sampling_mask requires top_k=1 for greedy sampling or finite 1 < top_k <= {MAX_MASK}; "
            f"got top_k={params.top_k}."
        )
    return Sampling(
        temperature=1.0 if greedy else params.temperature,
        greedy=greedy or params.top_k == 1,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        returns_mask=returns_mask,
    )


def _rids(given: OneOrMany, num_prompts: int, num_samples: int, single: bool) -> list[str]:
    """Ids of all requests: random ones if n > 1 or none are given, else the given ids or the given id as a prefix."""
    if num_samples > 1 or not given:
        return [uuid.uuid4().hex for _ in range(num_prompts * num_samples)]
    if isinstance(given, str):
        return [given] if single else [f"{given}_{index}" for index in range(num_prompts)]
    if len(given) != num_prompts:
        raise ValueError(f"rid has {len(given)} entries for {num_prompts} prompts")
    return given


def _broadcast(value: T | list[T], size: int, name: str) -> list[T]:
    if not isinstance(value, list):
        return [value] * size
    many: list[T] = value
    if len(many) != size:
        raise ValueError(f"{name} has {len(many)} entries for {size} prompts")
    return many


def _logprob_start(start: int, prompt: Sequence[int]) -> int:
    if start < -1 or start >= len(prompt):
        raise ValueError(f"logprob_start_len ({start}) must be -1 or less than the number of input tokens")
    return start


def _listed(value: OneOrMany) -> list[str]:
    return [value] if isinstance(value, str) else value or []
