"""Kinds of functions that users write. The setting that names a function declares its kind, and all else follows.

What follows: a setting's paths become absolute, a stranger's file may not set it (`--trust`), `--check` finds and tries
the function, `bin/try` calls it, and docs/reference/functions.md has its row. Places in this program are texts, since
actors are floors above: "module:name".
"""

from importlib import import_module
from math import inf
from typing import Any, Final, Literal

import msgspec

Home = Literal["grader process", "own process", "rollout", "trainer"]  # or in a process of these actors


class UserFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of function, or of class, that users write."""

    name: str  # also of `bin/try`, for those that it calls
    about: str  # what it decides or computes
    runs_in: Home
    page: str  # in docs/, with an example
    timeout_s: float = inf  # that a call may take
    limited_by: str = "nothing"  # in place of that: the setting with the limit, and what it limits
    parameters: tuple[str, ...] = ()  # of its calls, by position
    of_several: tuple[str, ...] = ()  # the same, if a call gets several samples or groups
    may_wait: bool = False  # it may be an async function
    waits_for: str = ""  # it must be one, to wait for this
    methods: tuple[str, ...] = ()  # of a class
    further_methods: tuple[str, ...] = ()  # of a class that has them
    answering: str = ""  # takes key and name, in its process; returns what answers a call, from bytes to bytes
    built_in: str = ""  # finds a built-in function by a name without a colon
    trial: str = ""  # tries it at the start; takes topology, kind, key, name and directories

    @property
    def also(self) -> str:
        """What the trial does, for the notice that it takes long."""
        return " and trying it on two samples" if self.runs_in == "trainer" else ""

    @property
    def called(self) -> str:
        """How it is called."""
        if self.methods:
            return ", ".join(f"`{method}`" for method in (*self.methods, *self.further_methods))
        several = f" or `({', '.join(self.of_several)})`" if self.of_several else ""
        return f"`{'async ' if self.waits_for else ''}({', '.join(self.parameters)})`{several}"


def at(place: str) -> Any:
    """Import what a text of the table names."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


_SOURCE: Final = "actors.buffer.prompts.source_worker:answering"
_FILTERS: Final = "actors.filter.filters"
_SELECTIONS: Final = "actors.buffer.deciding"
_DRY_RUN: Final = "actors.trainer.plugins.dry_run:try_plugin"  # on two samples; it loads hooks, which act on the model

GRADER: Final = UserFunction(
    name="grader",
    about="Rewards a sample, or all samples of a group or a batch.",
    runs_in="grader process",
    limited_by="`reward.timeout_s`",
    page="train/own-functions.md#graders",
    parameters=("sample",),
    of_several=("samples",),
    may_wait=True,
    built_in="actors.reward.graders.builtin:find_grader",
    trial="actors.reward.recipe:check_grader",
)
PARSER: Final = UserFunction(
    name="parser",
    about="Reads a score from the answer of a judge.",
    runs_in="grader process",
    limited_by="`reward.timeout_s`",
    page="train/judges.md",
    parameters=("sample",),
    may_wait=True,
    built_in="actors.reward.graders.parsers:find_parser",
    trial="actors.reward.recipe:check_grader",
)
SOURCE: Final = UserFunction(
    name="source",
    about="Returns the row of a prompt's number.",
    runs_in="own process",
    limited_by="`data.timeout_s`",
    page="train/data.md#a-function-instead-of-a-file",
    parameters=("number",),
    answering=_SOURCE,
)
SOURCE_CLASS: Final = UserFunction(
    name="source class",
    about="Draws rows, and gets the outcomes of their prompt groups.",
    runs_in="own process",
    limited_by="`data.timeout_s`",
    page="train/own-functions.md#data-sources-with-a-state",
    methods=("draw", "state", "restore"),
    further_methods=("told",),
    answering=_SOURCE,
)
FILTER: Final = UserFunction(
    name="filter",
    about="Keeps or drops a completed group.",
    runs_in="own process",
    timeout_s=10.0,
    page="train/filters.md#drop-groups",
    parameters=("group",),
    may_wait=True,
    built_in=f"{_FILTERS}:built_in_filter",
    answering=f"{_FILTERS}:answering",
)
OVER_SAMPLING_FILTER: Final = UserFunction(
    name="over_sampling_filter",
    about="Selects the batch from more completed groups than it needs.",
    runs_in="own process",
    timeout_s=10.0,
    page="train/filters.md#choose-a-batch-and-what-continues-first",
    parameters=("groups",),
    built_in=f"{_SELECTIONS}.selection:built_in_over_sampling",
    answering=f"{_SELECTIONS}.selecting:answering",
)
BUFFER_FILTER: Final = UserFunction(
    name="buffer_filter",
    about="Selects the halted groups that are issued again.",
    runs_in="own process",
    timeout_s=10.0,
    page="train/filters.md#choose-a-batch-and-what-continues-first",
    parameters=("groups", "n"),
    built_in=f"{_SELECTIONS}.selection:built_in_buffer",
    answering=f"{_SELECTIONS}.selecting:answering",
)
METRICS: Final = UserFunction(
    name="metrics",
    about="Computes metrics from all samples of an evaluation set.",
    runs_in="own process",
    timeout_s=30.0,
    page="train/own-functions.md#metrics-of-an-evaluation-set",
    parameters=("samples",),
    answering=f"{_SELECTIONS}.measuring:answering",
)
GENERATE: Final = UserFunction(
    name="generate",
    about="Generates a sample in several turns.",
    runs_in="rollout",
    limited_by="`rollout.custom_generate_timeout_s` between turns",
    page="train/multi-turn.md",
    parameters=("conversation",),
    waits_for="the model",
)
ROLLOUT: Final = UserFunction(
    name="rollout",
    about="Decides how and in which order the samples of prompt groups are generated.",
    runs_in="rollout",
    limited_by="`rollout.custom_generate_timeout_s` between samples",
    page="train/own-functions.md#rollout-functions",
    parameters=("group",),
    of_several=("groups",),
    waits_for="samples",
    trial="actors.rollout.samples.rollout_function:check_rollout_function",
)
EVALUATION: Final = UserFunction(
    name="evaluation",
    about="Decides of which prompts of an evaluation set how many samples are generated.",
    runs_in="rollout",
    limited_by="`rollout.custom_generate_timeout_s` between samples",
    page="train/own-functions.md#evaluation-functions",
    parameters=("evaluation",),
    waits_for="samples",
)
SAMPLING: Final = UserFunction(
    name="sampling",
    about="Chooses the sampling parameters of a prompt.",
    runs_in="own process",
    timeout_s=10.0,
    page="train/multi-turn.md#sampling-of-a-prompt",
    parameters=("prompt",),
    answering="actors.rollout.samples.sampling_function:answering",
    trial="actors.rollout.samples.sampling_function:check_sampling_function",
)
ADVANTAGE: Final = UserFunction(
    name="advantage",
    about="Computes the advantage of each sample or token.",
    runs_in="trainer",
    page="train/own-functions.md#advantages",
    parameters=("inputs",),
    trial=_DRY_RUN,
)
LOSS: Final = UserFunction(
    name="loss",
    about="Computes the policy loss of each token.",
    runs_in="trainer",
    page="train/own-functions.md#losses",
    parameters=("inputs",),
    trial=_DRY_RUN,
)
WEIGHTS: Final = UserFunction(
    name="weights",
    about="Computes the importance weight of each token.",
    runs_in="trainer",
    page="train/own-functions.md#importance-weights",
    parameters=("inputs",),
    trial=_DRY_RUN,
)
REDUCER: Final = UserFunction(
    name="reducer",
    about="Decides how token losses become one loss.",
    runs_in="trainer",
    page="train/own-functions.md#reductions",
    parameters=("inputs",),
    trial=_DRY_RUN,
)
POSTPROCESS: Final = UserFunction(
    name="postprocess",
    about="Masks tokens of a batch, or changes its advantages, before it trains.",
    runs_in="trainer",
    page="train/own-functions.md#data-of-a-batch",
    parameters=("data",),
    trial=_DRY_RUN,
)
INIT_HOOK: Final = UserFunction(
    name="init hook",
    about="Runs before a trainer process builds the model.",
    runs_in="trainer",
    page="train/own-functions.md#around-train-steps",
    parameters=("topology",),
    trial=_DRY_RUN,
)
LOG_PROB_HOOK: Final = UserFunction(
    name="log-prob hook",
    about="Runs before a trainer process computes log-probs without training.",
    runs_in="trainer",
    page="train/own-functions.md#around-train-steps",
    parameters=("topology", "model", "store_prefix"),
    trial=_DRY_RUN,
)
STEP_HOOK: Final = UserFunction(
    name="step hook",
    about="Runs before each optimizer step of a trainer process.",
    runs_in="trainer",
    page="train/own-functions.md#around-train-steps",
    parameters=("topology", "rollout_id", "step_id", "model", "optimizer"),
    trial=_DRY_RUN,
)

ALL: Final = tuple(value for value in list(globals().values()) if isinstance(value, UserFunction))
