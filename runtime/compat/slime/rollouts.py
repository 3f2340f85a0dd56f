"""The names of slime that rollout functions import: they generate prompt groups that a call has leased."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from runtime.compat.slime.functions import GENERATE_URL, PAGE, GenerateState, Sample, post

MAX_EMPTY: Final = 1_000  # empty answers of get_samples, one after the other


class RolloutCall(Protocol):
    """One call of a rollout function of slime."""

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end in the thread of the call."""
        ...

    async def generate(self, args: Any, sample: Any, sampling_params: Mapping[str, Any], *, evaluation: bool) -> Any:
        """Generate and grade one sample."""
        ...

    async def evaluate(self, args: Any) -> "RolloutFnEvalOutput":
        """Generate and grade all samples of an evaluation."""
        ...


rollout_call: ContextVar[RolloutCall | None] = ContextVar("rollout_call", default=None)


@dataclass
class RolloutFnTrainOutput:
    """What a rollout function returns for training."""

    samples: list[list[Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """What a rollout function returns for an evaluation."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


class DataBuffer:
    """slime's data buffer: it hands out the prompt groups of a call.

    Args:
        groups: of the call.
        refuse: ends the call with an error.
    """

    def __init__(self, groups: Sequence[list[Sample]], refuse: Callable[[Exception], None]) -> None:
        self._refuse = refuse
        self._waiting, self._given_back = deque(groups), deque[list[Sample]]()
        self._known = {id_of(sample) for group in groups for sample in group}
        self._num_empty = 0
        self._is_closed = False

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return so many groups, or as many as the call still has: first those that were given back.

        Raises:
            RuntimeError: the call is over, or has had no group for a long time.
            NotImplementedError: a thread of the function's own asks. The call ends: it could wait for that thread.
        """
        if rollout_call.get() is None:
            problem = "data_buffer.get_samples in a thread of the function's own, which would go on between calls"
            error = NotImplementedError(f"{problem}, is not provided: {PAGE}")
            self._refuse(error)
            raise error
        if self._is_closed:
            raise RuntimeError(f"data_buffer.get_samples: the call of the rollout function is over: {PAGE}")
        found: list[list[Sample]] = []
        while len(found) < num_samples and (source := self._given_back or self._waiting):
            found.append(source.popleft())
        self._num_empty = 0 if found or num_samples <= 0 else self._num_empty + 1
        if self._num_empty > MAX_EMPTY:
            raise RuntimeError(f"data_buffer.get_samples: this call has no further prompt groups: {PAGE}")
        return found

    def add_samples(self, samples: Sequence[list[Sample]]) -> None:
        """Give groups back, which `get_samples` then hands out again. At the end of the call they fail.

        Raises:
            ValueError: a sample is not of this call.
        """
        for group in samples:
            for each in flat(group):
                if id_of(each) not in self._known:
                    raise ValueError(f"data_buffer.add_samples: a sample that get_samples did not hand out: {PAGE}")
            self._given_back.append(group)

    def get_buffer_length(self) -> int:
        """Return the number of groups that were given back."""
        return len(self._given_back)

    def close(self) -> None:
        """Hand out no more groups."""
        self._is_closed = True

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"data_buffer.{name} is not provided to functions of slime: {PAGE}")


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end."""
    try:
        return _call("run").run(coroutine)
    finally:
        coroutine.close()  # no effect if it ran


async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any]) -> Any:
    """Generate a sample in a single turn, as slime does without a generate function."""
    params = dict(sampling_params)
    tokens = list(sample.tokens)
    if not tokens:
        tokens = GenerateState(args).tokenizer.encode(sample.prompt, add_special_tokens=False)
    params["max_new_tokens"] -= sample.response_length
    if params["max_new_tokens"] <= 0:
        sample.status = Sample.Status.TRUNCATED
        return sample
    output = await post(GENERATE_URL, {"input_ids": tokens, "sampling_params": params, "return_logprob": True})
    meta = output["meta_info"]
    pairs = meta.get("output_token_logprobs", [])
    sample.tokens = sample.tokens or tokens
    sample.append_response_tokens(
        args,
        tokens=[pair[1] for pair in pairs],
        log_probs=[pair[0] for pair in pairs],
        meta_info=meta,
        text=output["text"],
    )
    return sample


async def generate_and_rm(args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False) -> Any:
    """Generate a sample with the generate function of the recipe, and set its reward."""
    return await _call("generate_and_rm").generate(args, sample, sampling_params, evaluation=evaluation)


async def generate_and_rm_group(
    args: Any, group: Sequence[Any], sampling_params: Mapping[str, Any], evaluation: bool = False
) -> list[Any]:
    """Generate the samples of a group at the same time."""
    own = [generate_and_rm(args, sample, dict(sampling_params), evaluation) for sample in group]
    return list(await asyncio.gather(*own))


async def eval_rollout(args: Any, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[Any]]:
    """Generate all samples of the evaluation that the function was called for."""
    del rollout_id
    return await _call("eval_rollout").evaluate(args), []


def get_rollout_num_engines(args: Any) -> int:
    """1: the engines are one to a function, whose `args.sglang_server_concurrency` is that of all of them."""
    del args
    return 1


def _call(name: str) -> RolloutCall:
    call = rollout_call.get()
    if call is None:
        where = "in a rollout function, in its thread and its tasks alone"
        raise NotImplementedError(f"{name}: {where}: {PAGE}")
    return call


def id_of(sample: Any) -> tuple[Any, Any]:
    """What names a sample of a call, also in a copy."""
    return getattr(sample, "group_index", None), getattr(sample, "index", None)


def flat(given: Sequence[Any]) -> list[Sample]:
    """Return samples without the lists that fan-out makes of them."""
    found: list[Sample] = []
    for item in given:
        found += cast("list[Sample]", item) if isinstance(item, list) else [item]
    return found


def samples_in(returned: Any) -> list[list[Sample]]:
    """Return the samples that a function returned, each with its siblings.

    Raises:
        TypeError: it returned something else.
    """
    groups: Any = returned.samples if isinstance(returned, RolloutFnTrainOutput) else returned
    data: Any = returned.data if isinstance(returned, RolloutFnEvalOutput) else returned
    if isinstance(data, dict):
        sets = list(cast("dict[str, Any]", data).values())
        groups = [each["samples"] for each in sets if isinstance(each, dict) and "samples" in each]
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in cast("list[Any]", groups)):
        raise TypeError(f"the function returned {returned!r:.100}; expected groups of samples, or an output of slime")
    found: list[list[Sample]] = []
    for item in (item for group in cast("list[list[Any]]", groups) for item in group):
        samples = cast("list[Any]", item) if isinstance(item, list) else [item]
        if not samples or not all(isinstance(each, Sample) for each in samples):
            raise TypeError(f"the function returned {item!r:.100} in a group; expected a Sample or a list of them")
        found.append(samples)
    return found
