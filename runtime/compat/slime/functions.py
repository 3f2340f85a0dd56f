"""Runs functions written for slime: "slime:module:function". Offers them the names of slime that they import.

Only what docs/reference/slime-functions.md lists is offered. An installed slime is used in its place, never hidden.
"""

import enum
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol, Self

from runtime.functions.load import Plugin, PluginError, load_plugin
from runtime.functions.table import (
    ADVANTAGE,
    EVALUATION,
    FILTER,
    GENERATE,
    GRADER,
    PARSER,
    ROLLOUT,
    SOURCE_CLASS,
    WEIGHTS,
    UserFunction,
    at,
)

PREFIX: Final = "slime:"
PAGE: Final = "docs/reference/slime-functions.md"


class Called(NamedTuple):
    """How slime calls a kind of function."""

    parameters: tuple[str, ...]  # by position
    named: tuple[str, ...] = ()  # by name, if it has them


CALLED: Final[Mapping[UserFunction, Called]] = {
    GRADER: Called(("args", "sample")),
    PARSER: Called(("args", "sample")),
    FILTER: Called(("args", "samples")),
    GENERATE: Called(("args", "sample", "sampling_params"), ("evaluation",)),
    ROLLOUT: Called(("args", "rollout_id", "data_buffer"), ("evaluation",)),
    ADVANTAGE: Called(("args", "samples")),
    WEIGHTS: Called(
        (),
        ("args", "pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths"),
    ),
}
OF_SEVERAL: Final = Called(("args", "samples"))  # a grader of a group
REFUSED: Final[Mapping[UserFunction, str]] = {
    SOURCE_CLASS: "classes of slime do not run here; the page says what does",
    EVALUATION: "a function of slime returns the samples, and this one asks for them",
}
ROUTER: Final = ("slime-router.invalid", 30000)  # no such host: `post` gives what is sent there to our engines
GENERATE_URL: Final = f"http://{ROUTER[0]}:{ROUTER[1]}/generate"
MIN_STD: Final = 1e-6


class Args:
    """slime's `args`. What is not provided raises an error that names the page."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"args.{name} is not provided to functions of slime: {PAGE}")


class Router(Protocol):
    """Answers the requests of a generate function of slime, as slime's router does."""

    tokenizer: Any
    sampling_params: dict[str, Any]

    async def answer(self, payload: Any) -> dict[str, Any]:
        """Answer a request to `/generate`."""
        ...

    async def grade(self, sample: Any) -> float:
        """Return the reward of a sample, from the grader of its row."""
        ...


router_of_function: ContextVar[Router | None] = ContextVar("router_of_function", default=None)


class Sample:
    """slime's sample. A function gets one with the fields that the caller has; one that it creates has all of these.

    What a generate function noted are attributes too.
    """

    prompt: str
    tokens: list[int]
    response: str
    response_length: int
    loss_mask: list[int] | None
    rollout_log_probs: list[float] | None
    reward: Any
    remove_sample: bool

    class Status(enum.Enum):
        """The state of a sample."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status

    def __init__(self, **fields: Any) -> None:
        if unknown := ", ".join(sorted(set(fields) - set(FIELDS))):
            raise TypeError(f"Sample has no {unknown} here: {PAGE}")
        self.__dict__.update({name: default() for name, default in FIELDS.items()})
        self.__dict__.update(fields)

    @classmethod
    def given(cls, **fields: Any) -> Self:
        """Create a sample that has these fields alone."""
        sample = cls.__new__(cls)
        sample.__dict__.update(fields)
        return sample

    def __getattr__(self, name: str) -> Any:
        if name == "tokens":
            fields = 'reward.sample_fields = ["prompt_ids", "tokens"]'
            raise AttributeError(f"sample.tokens: a reward function gets them with {fields}: {PAGE}")
        raise AttributeError(f"sample.{name} is not provided to functions of slime: {PAGE}")

    def get_reward_value(self, args: Any) -> float:
        """The reward, which has been taken out of a dict by `reward.reward_key` already."""
        del args
        return self.reward

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens to the response, as slime does: those that do not train have log-prob 0."""
        del args
        new = [] if tokens is None else [int(token) for token in tokens]
        given = None if log_probs is None else [float(value) for value in log_probs]
        if given is not None and len(given) != len(new):
            raise ValueError(f"log_probs length {len(given)} != tokens length {len(new)}")
        if new and trainable is (given is None):
            raise ValueError("tokens that train need log-probs, and others have none")
        self.response += text or ""
        if new:
            before = self.response_length
            if self.loss_mask is None:
                self.loss_mask = [1] * before
            if self.rollout_log_probs is None:
                self.rollout_log_probs = [0.0] * before
            self.tokens += new  # in place, as slime does: functions hold these lists
            self.loss_mask += [int(trainable)] * len(new)
            self.rollout_log_probs += given or [0.0] * len(new)
            self.response_length = before + len(new)
        if meta_info is not None and update_terminal_info and "finish_reason" in meta_info:
            self.status = _ENDS.get(meta_info["finish_reason"]["type"], self.status)


_ENDS: Final = {"length": Sample.Status.TRUNCATED, "abort": Sample.Status.ABORTED, "stop": Sample.Status.COMPLETED}
FIELDS: Final[Mapping[str, Callable[[], Any]]] = {
    **dict.fromkeys(("group_index", "index", "rollout_id", "multimodal_inputs", "label", "reward"), lambda: None),
    **dict.fromkeys(("loss_mask", "rollout_log_probs", "session_id"), lambda: None),
    **dict.fromkeys(("rollout_top_p_token_ids", "rollout_top_p_token_offsets"), lambda: None),
    **dict.fromkeys(("prompt", "response"), str),
    **dict.fromkeys(("tokens", "weight_versions"), list[Any]),
    **dict.fromkeys(("response_length",), int),
    **dict.fromkeys(("remove_sample",), bool),
    "metadata": dict[str, Any],
    "status": lambda: Sample.Status.PENDING,
}  # of a sample that a function creates, with their defaults


@dataclass
class DynamicFilterOutput:
    """What a filter of groups answers."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False  # has no effect: there are always further groups


def check_reward_nonzero_std(args: Any, samples: Sequence[Any], **_: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ by more than rounding, as slime's filter of this name."""
    rewards = [float(sample.get_reward_value(args)) for sample in samples]
    keep = len(rewards) > 1 and statistics.stdev(rewards) > MIN_STD
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(args: Any, samples: Sequence[Any], **_: Any) -> DynamicFilterOutput:
    """As `check_reward_nonzero_std`."""
    return replace(check_reward_nonzero_std(args, samples), keep_when_insufficient=True)


class GenerateState:
    """slime's state of generation, for generate and rollout functions: the tokenizer and the sampling parameters."""

    def __init__(self, args: Any) -> None:
        router = router_of_function.get()
        if router is None:
            raise NotImplementedError(f"GenerateState: only generate and rollout functions have it: {PAGE}")
        self.args = args
        self.tokenizer = router.tokenizer
        self.processor = None  # of images
        self.sampling_params = dict(router.sampling_params)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"GenerateState.{name} is not provided to functions of slime: {PAGE}")


async def post(url: str, payload: Any, max_retries: int = 60, headers: Mapping[str, str] | None = None) -> Any:
    """Send JSON to a server and return the JSON of its answer. It is sent once: the run repeats a failed score.

    What a generate function sends to the router becomes a turn of its sample, from the engines of this run.
    """
    import aiohttp  # heavier than everything else here

    del max_retries
    if url.startswith(f"http://{ROUTER[0]}"):
        router = router_of_function.get()
        if router is None or url != GENERATE_URL:
            raise ValueError(f"{url}: only a generate function posts to the router, and only to /generate: {PAGE}")
        return await router.answer(payload)
    async with aiohttp.ClientSession() as session, session.post(url, json=payload, headers=headers) as response:
        response.raise_for_status()
        return await response.json(content_type=None)


def whole_column(values: Any, total_length: int, response_length: int, *_: Any, **__: Any) -> Any:
    """Gather or slice over context-parallel ranks: each rank has whole sequences where functions of slime run."""
    del total_length, response_length
    return values


async def async_rm(args: Any, sample: Any, **_: Any) -> float:
    """Return the reward of a sample, from the grader of the recipe: in generate functions alone."""
    del args
    router = router_of_function.get()
    if router is None:
        raise NotImplementedError(f"async_rm: only generate functions ask the grader: {PAGE}")
    return await router.grade(sample)


async def batched_async_rm(args: Any, samples: Sequence[Any], **_: Any) -> list[float]:
    """Return the rewards of samples, one after the other."""
    return [await async_rm(args, sample) for sample in samples]


def load_function(path: str) -> Any:
    """Import the function of a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


_ROLLOUTS: Final = "runtime.compat.slime.rollouts"
# The names of each module; a text is the place of a function that is imported with the module, from the floor above
_NAMES: Final[Mapping[str, Mapping[str, Any]]] = {
    "slime": {},
    "slime.utils": {},
    "slime.utils.types": {"Sample": Sample},
    "slime.utils.http_utils": {"post": post, "get_rollout_num_engines": f"{_ROLLOUTS}:get_rollout_num_engines"},
    "slime.utils.async_utils": {"run": f"{_ROLLOUTS}:run"},
    "slime.utils.misc": {"load_function": load_function},
    "slime.backends": {},
    "slime.backends.megatron_utils": {},
    "slime.backends.megatron_utils.cp_utils": {
        "all_gather_with_cp": whole_column,
        "slice_log_prob_with_cp": whole_column,
    },
    "slime.rollout": {},
    "slime.rollout.base_types": {
        name: f"{_ROLLOUTS}:{name}" for name in ("RolloutFnTrainOutput", "RolloutFnEvalOutput")
    },
    "slime.rollout.sglang_rollout": {
        "GenerateState": GenerateState,
        **{
            name: f"{_ROLLOUTS}:{name}"
            for name in ("generate", "generate_and_rm", "generate_and_rm_group", "eval_rollout")
        },
    },
    "slime.rollout.rm_hub": {"async_rm": async_rm, "batched_async_rm": batched_async_rm},
    "slime.rollout.rm_hub.math_dapo_utils": {"compute_score": "actors.reward.graders.stated:slime_dapo"},
    "slime.rollout.filter_hub": {},
    "slime.rollout.filter_hub.base_types": {"DynamicFilterOutput": DynamicFilterOutput},
    "slime.rollout.filter_hub.dynamic_sampling_filters": {
        function.__name__: function for function in (check_reward_nonzero_std, check_reward_nonzero_std_with_fallback)
    },
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `slime` that are offered, and refuses the others by name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname.partition(".")[0] != "slime":
            return None
        if fullname not in _NAMES:
            raise ModuleNotFoundError(f"{fullname} is not provided to functions of slime: {PAGE}")
        is_package = any(name.startswith(f"{fullname}.") for name in _NAMES)
        return importlib.machinery.ModuleSpec(fullname, self, origin=PAGE, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        def missing(name: str) -> Any:
            raise AttributeError(f"{module.__name__}.{name} is not provided to functions of slime: {PAGE}")

        for name, value in _NAMES[module.__name__].items():
            place, _, attribute = value.partition(":") if isinstance(value, str) else ("", "", "")
            module.__dict__[name] = getattr(importlib.import_module(place), attribute) if place else value
        module.__dict__["__getattr__"] = missing
        module.__file__ = f"not provided: {PAGE}"  # Python shows it when a name cannot be imported


def offer() -> bool:
    """Offer the modules of slime to imports. Return whether slime is installed: then it is imported instead."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return False
    if _is_installed():
        return True
    sys.meta_path.append(_Finder())
    return False


def _is_installed() -> bool:
    try:  # a folder of the name `slime`, such as a checkout, is not a package
        return importlib.util.find_spec("slime.utils.types") is not None
    except ModuleNotFoundError:
        return False


def sample_class() -> Any:
    """The class of samples: that of an installed slime, or ours."""
    return importlib.import_module("slime.utils.types").Sample


def given_sample(**fields: Any) -> Any:
    """Create a sample for a function, with these fields alone if the class is ours."""
    kind = sample_class()
    return kind.given(**fields) if kind is Sample else kind(**fields)


def load(
    function: UserFunction, key: str, value: str, base_dirs: Sequence[Path] = (), *, several: bool = False
) -> Plugin:
    """Load a function of slime's signature, and wrap it into ours if the caller does not. Raises as `original` does."""
    plugin = original(function, key, value, base_dirs, several=several)
    if function is GENERATE:
        return Plugin(at("actors.rollout.slime.generate:conversing")(plugin.function), is_async=True)
    converts = {FILTER: _samples_of_group, GRADER: _samples if several else _sample, PARSER: _sample}
    if (convert := converts.get(function)) is None:
        return plugin
    call, args = plugin.function, Args(reward_key=None)

    async def call_async(given: Any) -> Any:
        return await call(args, convert(given))

    def call_plain(given: Any) -> Any:
        return call(args, convert(given))

    return Plugin(wraps(call)(call_async if plugin.is_async else call_plain), plugin.is_async)


def original(
    function: UserFunction, key: str, value: str, base_dirs: Sequence[Path] = (), *, several: bool = False
) -> Plugin:
    """Load a function of slime's signature.

    Args:
        function: its kind.
        key: setting that names it, for messages.
        value: its name, with PREFIX.
        base_dirs: directories to look up relative files in.
        several: whether a call gets several samples or groups.

    Raises:
        PluginError: it cannot be found, or does not run here; names the page.
    """
    called = OF_SEVERAL if several and function is GRADER else CALLED.get(function)
    if called is None:
        refusal = REFUSED.get(function, "functions of slime do not run here; the page lists where they do")
        raise PluginError(key, value, f"{refusal}: {PAGE}")
    has_slime, waits = offer(), bool(function.waits_for)
    if has_slime and waits:
        raise PluginError(key, value, f"slime is installed, and its own `post` would find no router: {PAGE}")
    try:
        plugin = load_plugin(
            key,
            value.removeprefix(PREFIX),
            parameters=called.parameters,
            optional=called.named,
            base_dirs=base_dirs,
            allow_async=function.may_wait or waits,
        )
    except PluginError as error:
        raise PluginError(key, value, error.problem) from error
    if waits and plugin.is_async is (function is ROLLOUT):
        problem = f"a plain function cannot wait for {function.waits_for}: write `async def`"
        if plugin.is_async:
            problem = f"slime calls it as a plain function: let one call `run` of slime.utils.async_utils: {PAGE}"
        raise PluginError(key, value, problem)
    return plugin


def _sample(graded: Any) -> Any:
    kind = sample_class()
    sample = given_sample(
        index=graded.index,
        prompt=graded.prompt,
        response=graded.response,
        response_length=graded.response_len,
        label=graded.label,
        metadata=dict(graded.metadata),
        status=kind.Status(graded.status),
    )
    if graded.packed_prompt_ids is not None and graded.packed_tokens is not None:
        sample.tokens = [*graded.prompt_ids, *graded.tokens]
    for name, value in graded.sample_metadata.items():
        setattr(sample, name, value)
    return sample


def _samples(graded: Sequence[Any]) -> list[Any]:
    return [_sample(sample) for sample in graded]


def _samples_of_group(group: Any) -> list[Any]:
    kind = sample_class()
    return [
        given_sample(
            group_index=group.group_id,
            index=index,
            reward=reward,
            response_length=length,
            status=kind.Status(status),
            metadata=dict(group.metadata),
        )
        for index, reward, length, status in zip(
            group.indices, group.rewards, group.response_lens, group.statuses, strict=True
        )
    ]
