"""Runs generate functions that were written for slime: what they post to slime's router are turns of their sample.

The tokens and log-probs that train are those of the engines. What the function says of them in its sample is compared:
a sample with other tokens fails. The mask may exclude tokens of the model from the loss, and nothing else.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import msgspec
import numpy as np

from actors.rollout.samples.arguments import checked_ids, checked_text
from actors.rollout.samples.context import Context, TurnTokens
from actors.rollout.samples.conversation import Conversation, GenerateFunction
from actors.rollout.sglang.served_model import ServedModel
from messages import SamplingParams
from runtime.compat.slime.functions import FIELDS, PAGE, ROUTER, Args, Sample, router_of_function

MAX_NOTE_BYTES: Final = 8_192  # of one attribute as JSON; larger ones are not kept
NOTED: Final = ("prompt", "label", "metadata")  # fields of a sample that are noted if the function changed them
REFUSED: Final = ("teacher_log_probs", "multimodal_train_inputs", "rollout_routed_experts", "train_metadata")
CHANGEABLE: Final = ("max_new_tokens", "temperature", "top_p", "top_k", "stop")  # of the sampling parameters


class Tokenizer:
    """The tokenizer of the model, with the calls of slime's that functions make."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text, add_special_tokens)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text."""
        if add_special_tokens:
            raise ValueError(f"the tokenizer adds no special tokens here, pass add_special_tokens=False: {PAGE}")
        return self._model.encode(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Decode tokens."""
        if skip_special_tokens:
            raise ValueError(f"the tokenizer keeps special tokens here, leave skip_special_tokens out: {PAGE}")
        return self._model.decode(checked_ids(self._model, ids))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"tokenizer.{name} is not provided to functions of slime: {PAGE}")


def params_of(sampling: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters as slime's functions get them."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "skip_special_tokens": sampling.skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


@dataclass(eq=False)
class _Talk:
    """A conversation of the sample, as the function's requests show it."""

    context: Context
    prompt: str | None  # of its first request; None: that came as tokens
    starts: list[int] = field(default_factory=list[int])  # first token of each turn in the response
    is_taken: bool = False  # a sample that the function returned holds it

    @property
    def ids(self) -> list[int]:
        """All tokens so far."""
        return [*self.context.prompt_ids, *self.context.ids]

    @property
    def generated(self) -> list[int]:
        """The tokens up to the end of the last turn."""
        turns = self.context.turns
        end = self.starts[len(turns) - 1] + len(turns[-1].ids) if turns else 0
        return [*self.context.prompt_ids, *self.context.ids[:end]]

    def rest_of(self, request: str | list[int]) -> str | list[int] | None:
        """Return what a request has after this conversation; None: it does not continue it."""
        if not self.starts or self.context.asking:
            return None
        if isinstance(request, str):
            known = None if self.prompt is None else self.prompt + self.context.text
            return request[len(known) :] if known is not None and request.startswith(known) else None
        ids = self.ids
        return request[len(ids) :] if request[: len(ids)] == ids else None


class EngineRouter:
    """Answers what a function posts to slime's router. Each request is a turn of a conversation of the sample.

    A request that continues a conversation is its next turn, after the input that it adds. The first other request
    begins the sample, with its own prompt; further ones open further conversations.
    """

    def __init__(self, conversation: Conversation) -> None:
        self.tokenizer = Tokenizer(conversation.model)
        self.sampling_params = params_of(conversation.sampling)
        self.talks: list[_Talk] = []
        self._conversation = conversation

    async def answer(self, payload: Any) -> dict[str, Any]:
        """Answer a request to `/generate`, with the fields that slime's functions read.

        Raises:
            ValueError: the request has a field that is not provided, or leaves no room.
        """
        request, params, with_log_probs = self._read(payload)
        talk = self._talk_of(request)
        context, model, limit = talk.context, self._conversation.model, params.max_new_tokens
        rest = talk.rest_of(request) or []
        new = model.encode(rest) if isinstance(rest, str) else rest
        start = len(context.ids) + len(new)
        limit = min(limit, context.room - len(new))
        if limit <= 0:
            return _answer(TurnTokens([], [], ""), len(context.prompt_ids) + start, "length", with_log_probs)
        run = self._conversation.sampling
        with context.input_of_a_turn():
            if talk.starts:
                context.append_ids(new)
                context.text += rest if isinstance(rest, str) else model.decode(new)
            talk.starts.append(start)
            try:
                await context.generate(
                    stop=params.stop,
                    max_new_tokens=limit,
                    temperature=None if params.temperature == run.temperature else params.temperature,
                    top_p=None if params.top_p == run.top_p else params.top_p,
                    top_k=None if params.top_k == run.top_k else params.top_k,
                )
            except BaseException:
                talk.starts.pop()
                raise
        turn = context.turns[-1]
        is_cut = len(turn.ids) >= limit and model.end_in(np.asarray(turn.ids, np.int32), params) is None
        return _answer(turn, len(context.prompt_ids) + start, "length" if is_cut else "stop", with_log_probs)

    async def grade(self, sample: Any) -> float:
        """Return the reward that the grader of the row gives a sample, whose prompt is a text."""
        return await self._conversation.grade(sample.response, sample.prompt)

    def continues(self, request: str | list[int]) -> bool:
        """Whether a request is the next turn of a conversation."""
        return any(talk.rest_of(request) for talk in self.talks)

    def holds(self, tokens: list[int]) -> bool:
        """Whether these are the tokens of a conversation."""
        return any(talk.starts and _holds(tokens, talk) for talk in self.talks)

    def _read(self, payload: Any) -> tuple[str | list[int], SamplingParams, bool]:
        """Return the prompt, the sampling parameters, and whether log-probs are wanted."""
        if not isinstance(payload, dict):
            raise TypeError(f"post to the router: {payload!r:.200} is not a dict")
        fields = dict(cast("dict[str, Any]", payload))
        request = fields.pop("input_ids", None)
        text = fields.pop("text", None)
        request = text if request is None else checked_ids(self._conversation.model, request)
        params = cast("dict[str, Any]", fields.pop("sampling_params", None) or {})
        with_log_probs = bool(fields.pop("return_logprob", False))
        if more := sorted(name for name, value in fields.items() if value and name not in ("rid", "session_id")):
            raise ValueError(f"post to the router: {', '.join(more)} is not provided: {PAGE}")
        if not isinstance(request, str | list) or not request:
            raise ValueError("post to the router: neither text nor input_ids of one sample")
        for name, value in params.items():
            own = self.sampling_params.get(name)
            if name not in CHANGEABLE and value != own and (value or own):
                raise ValueError(
                    f"sampling_params: {name} = {value!r:.100} is not the run's; that is not provided: {PAGE}"
                )
        given = self.sampling_params | params
        stop = () if given["stop"] is None else given["stop"]
        sampling = msgspec.structs.replace(
            self._conversation.sampling,
            max_new_tokens=int(given["max_new_tokens"]),
            temperature=float(given["temperature"]),
            top_p=float(given["top_p"]),
            top_k=int(given["top_k"]),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
        )
        return cast("str | list[int]", request), sampling, with_log_probs

    def _talk_of(self, request: str | list[int]) -> _Talk:
        """Return the conversation that a request continues, or a new one."""
        continued = [talk for talk in self.talks if talk.rest_of(request)]
        if continued:
            return max(continued, key=lambda talk: len(talk.ids))
        conversation, prompt = self._conversation, request if isinstance(request, str) else None
        ids = conversation.model.encode(request) if isinstance(request, str) else request
        for talk in self.talks:
            if not talk.starts and talk.context.prompt_ids == ids:  # its first request failed
                talk.prompt = prompt
                return talk
        if self.talks:
            context = conversation.open(ids)
        else:
            context = conversation
            if ids != conversation.prompt_ids:
                conversation.begin(ids)
        self.talks.append(_Talk(context, prompt))
        return self.talks[-1]


def _answer(turn: TurnTokens, num_before: int, end: str, with_log_probs: bool) -> dict[str, Any]:
    meta = {"finish_reason": {"type": end}, "prompt_tokens": num_before, "completion_tokens": len(turn.ids)}
    pairs = zip(turn.log_probs, turn.ids, strict=True)
    more = {"output_token_logprobs": [[value, token, None] for value, token in pairs]} if with_log_probs else {}
    return {"text": turn.text, "output_ids": turn.ids, "meta_info": meta | more}


def conversing(function: Callable[..., Awaitable[Any]]) -> GenerateFunction:
    """Wrap a generate function of slime: (args, sample, sampling_params), perhaps with `evaluation`."""
    has_evaluation = "evaluation" in inspect.signature(function).parameters

    @functools.wraps(function)
    async def converse(conversation: Conversation) -> None:
        router, sample = EngineRouter(conversation), _fresh_sample(conversation)
        more = {"evaluation": conversation.evaluation} if has_evaluation else {}
        token = router_of_function.set(router)
        try:
            returned = await function(_args(conversation), sample, dict(router.sampling_params), **more)
        finally:
            router_of_function.reset(token)
        settle(conversation, router, returned)

    return converse


def args_of(model: ServedModel, sampling: SamplingParams, context_len: int) -> dict[str, Any]:
    """Return slime's `args`, as functions that generate read them."""
    return {
        "sglang_router_ip": ROUTER[0],
        "sglang_router_port": ROUTER[1],
        "hf_checkpoint": str(model.directory),
        "partial_rollout": False,  # a halted sample goes on by itself
        "reward_key": None,
        "rollout_max_context_len": context_len,
        "eval_max_context_len": context_len,
        "rollout_max_response_len": sampling.max_new_tokens,
        "rollout_temperature": sampling.temperature,
        "rollout_top_p": sampling.top_p,
        "rollout_top_k": sampling.top_k,
        "rollout_stop": list(sampling.stop) or None,
        "rollout_stop_token_ids": list(sampling.stop_token_ids) or None,
        "use_rollout_routing_replay": False,
        "ci_test": False,
    }


def _args(conversation: Conversation) -> Args:
    context_len = len(conversation.prompt_ids) + conversation.room
    return Args(**args_of(conversation.model, conversation.sampling, context_len))


def _fresh_sample(conversation: Conversation) -> Sample:
    return Sample(
        index=conversation.index,
        prompt=conversation.prompt,
        label=conversation.label,
        metadata=dict(conversation.metadata),
    )


def settle(conversation: Conversation, router: EngineRouter, returned: Any) -> None:
    """Take what the function returned: text, status, mask, reward and notes. A sample that is wrong fails alone."""
    try:
        _settle(conversation, router, returned)
    except (TypeError, ValueError) as error:
        conversation.end("failed", f"the function of slime returned a sample that cannot be used: {error}")


def _settle(conversation: Conversation, router: EngineRouter, returned: Any) -> None:
    """Take what the function returned.

    Raises:
        TypeError, ValueError: it is not a sample of this run, or has other tokens than the engines gave.
    """
    samples = cast("list[Any]", returned) if isinstance(returned, list) else [returned]
    for sample in samples:
        if not isinstance(sample, Sample):
            raise TypeError(f"{sample!r:.100} is not a Sample")
    status = Sample.Status
    for sample in samples:
        sample.status = status(sample.status)  # tau-bench writes its text
    states = [sample.status for sample in samples]
    if status.ABORTED in states:
        conversation.end("aborted", "the function of slime returned it as aborted")
        return
    if all(state is status.FAILED for state in states):
        conversation.end("failed", "the function of slime returned it as failed")
        return
    for sample in samples:
        _settle_sample(conversation, router, sample)
    for talk in router.talks:
        if not talk.is_taken:  # a conversation that is in no sample
            _train_nothing(talk)
    conversation.end("truncated" if all(state is status.TRUNCATED for state in states) else "completed")


def _settle_sample(conversation: Conversation, router: EngineRouter, sample: Any) -> None:
    for name in REFUSED:
        if getattr(sample, name, None) is not None:
            raise ValueError(f"sample.{name} is not taken: {PAGE}")
    tokens = [int(token) for token in sample.tokens]
    holding = [talk for talk in router.talks if talk.starts and not talk.is_taken and _holds(tokens, talk)]
    if not holding:
        raise ValueError("sample.tokens must be the tokens of the prompt and those that the engines gave")
    talk = min(holding, key=lambda talk: abs(len(talk.generated) - len(tokens)))
    talk.is_taken, context = True, talk.context
    if len(tokens) - int(sample.response_length) != len(context.prompt_ids):
        of = f"{len(tokens)} tokens, of which {len(context.prompt_ids)} are the prompt"
        raise ValueError(f"response_length = {sample.response_length}, with {of}")
    if sample.remove_sample or sample.status is Sample.Status.FAILED:
        _train_nothing(talk)
    else:
        _mask(talk, sample.loss_mask, int(sample.response_length))
    context.text = checked_text(sample.response, "sample.response")
    if isinstance(sample.reward, dict):
        raise TypeError("its reward is a dict: set a number")
    context.reward = sample.reward
    context.sample_metadata.update(_notes(conversation, sample))


def _holds(tokens: list[int], talk: _Talk) -> bool:
    """Whether these are the tokens of a conversation, perhaps cut off, or with input after its last turn."""
    generated, num_prompt = talk.generated, len(talk.context.prompt_ids)
    common = min(len(tokens), len(generated))
    return len(tokens) > num_prompt and tokens[:common] == generated[:common]


def _mask(talk: _Talk, mask: Sequence[int] | None, length: int) -> None:
    """Exclude tokens of the model from the loss: those with mask 0, and those that the function cut off."""
    context = talk.context
    if mask is None:  # the model's tokens train
        trains = np.ones(length, dtype=bool)
    else:
        trains = np.asarray(mask) != 0
        if trains.shape != (length,):
            raise ValueError(f"loss_mask has {len(mask)} values, response_length = {length}")
    generated = np.zeros(length, dtype=bool)
    for number, (start, turn) in enumerate(zip(talk.starts, context.turns, strict=True)):
        end = start + len(turn.ids)
        generated[start:end] = True
        own = np.zeros(len(turn.ids) + 2, dtype=np.int8)  # 1 where a token does not train
        own[1:-1] = 1
        own[1 : 1 + len(trains[start:end])] = ~trains[start:end]
        edges = np.diff(own)
        for first, last in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True):
            context.do_not_train(number, int(first), int(last))
    if mask is not None and (trains & ~generated).any():
        place = int(np.argmax(trains & ~generated))
        raise ValueError(f"loss_mask[{place}] is 1, and no engine generated that token")


def _train_nothing(talk: _Talk) -> None:
    for number in range(talk.context.num_turns):
        talk.context.do_not_train(number)


def _notes(conversation: Conversation, sample: Sample) -> dict[str, Any]:
    """Return the attributes that the function added or changed, for graders: small ones that are JSON."""
    before = {name: getattr(conversation, name) for name in NOTED}
    values = {name: value for name, value in vars(sample).items() if name not in FIELDS or name in NOTED}
    changed = {name: value for name, value in values.items() if name not in NOTED or value != before[name]}
    return {name: value for name, value in changed.items() if _is_small(value)}


def _is_small(value: Any) -> bool:
    try:
        return len(msgspec.json.encode(value)) <= MAX_NOTE_BYTES
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False
