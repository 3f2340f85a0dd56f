"""The work plane: tasks, each for one of many workers."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from messages.arrays import Float32Array, Int32Array, UInt8Array
from messages.base import Message, Plane, register
from messages.samples import SampleStatus, SampleSummary, SamplingParams
from messages.subjects import OWN_GRADERS, grader_token


class Demonstration(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A response to train on as it is."""

    response_ids: Int32Array  # [T]
    loss_mask: UInt8Array  # [T]
    text: str = ""  # response_ids as text


class Prompt(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A prompt, rendered and tokenised once, with the data that graders need."""

    data: str  # name of the data source
    row: int  # in the file, from 0
    text: str  # rendered with the chat template
    prompt_ids: Int32Array  # [P]
    label: Any = None
    metadata: dict[str, Any] = {}
    rm_type: str | None = None  # a built-in grader or a plug-in
    response_ids: Int32Array | None = None  # [T], of a demonstration (SFT), trained as it is
    loss_mask: UInt8Array | None = None  # [T], of a demonstration
    response: str = ""  # response_ids as text
    rejected: Demonstration | None = None  # the worse response of a preference pair; response_ids is the better one
    parts: tuple[int, ...] = ()  # data messages that hold the prompt, if it is too large for tasks and events
    keys: tuple[str, ...] = ()  # keys of those messages, by which reward workers fetch them


@register
class RolloutRequested(Message, kw_only=True, tag="rollout_requested", eq=False):
    """Task: generate and score the samples of one prompt group. Put by the buffer, pulled by rollout actors."""

    plane = Plane.WORK
    topic = "rollout"
    keyed = True
    group_id: int
    attempt: int
    round: int
    min_version: int  # lowest verified weight version of an engine that may answer
    prompt: Prompt
    num_samples: int
    sampling: SamplingParams
    baseline: bool = False  # whether to add a greedy sample, which is scored and not trained
    carried: tuple[SampleSummary, ...] = ()  # results of earlier attempts: finished samples, tokens to continue from
    prefers: str | UnsetType = UNSET  # rollout actor whose engines may have these tokens in their caches; not sent: any
    held: int | UnsetType = UNSET  # generate functions of the group that wait there; not sent: none

    def key(self) -> str:
        return f"{self.group_id}.{self.attempt}"


@register
class EvalRequested(Message, kw_only=True, tag="eval_requested", eq=False):
    """Task: generate and score one evaluation item on one fixed weight version. Halts do not affect it."""

    plane = Plane.WORK
    topic = "eval"
    keyed = True
    step: int
    set: str
    item: int
    version: int
    prompt: Prompt
    num_samples: int
    sampling: SamplingParams

    def key(self) -> str:
        return f"{self.step}.{self.set}.{self.item}"


@register
class EvalSetRequested(Message, kw_only=True, tag="eval_set_requested", eq=False):
    """Task: evaluate a whole set by its evaluation function, on one fixed weight version. Halts do not affect it."""

    plane = Plane.WORK
    topic = "eval_set"
    keyed = True
    step: int
    set: str
    version: int
    num_items: int
    prompts: tuple[Prompt, ...] = ()  # in the order of the items; empty if they are stored
    parts: tuple[int, ...] = ()  # data messages that hold the prompts, if these are too large for a task

    def key(self) -> str:
        return f"{self.step}.{self.set}"


class TurnSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of the model: the tokens [start, end) of a response, and their text."""

    start: int
    end: int
    text: str


class ScoreItem(msgspec.Struct, frozen=True, kw_only=True):
    """One sample as a grader sees it. Fields without a value are not sent."""

    index: int
    part: int = 0
    prompt: str
    response: str
    status: SampleStatus
    response_len: int = 0  # tokens
    label: Any = None
    metadata: dict[str, Any] = {}
    sample_metadata: dict[str, Any] | UnsetType = UNSET  # of this sample alone, set by a generate function
    prompt_ids: Int32Array | UnsetType = UNSET  # [P]
    tokens: Int32Array | UnsetType = UNSET  # [T], ids of the response, those between turns included
    log_probs: Float32Array | UnsetType = UNSET  # [T], natural log, of the policy that sampled; 0 between turns
    turns: tuple[TurnSpan, ...] | UnsetType = UNSET  # of the model, in order


@register
class ScoreRequested(Message, kw_only=True, tag="score_requested"):
    """Task: score samples of one group. Put by rollout, pulled by reward workers, which answer to `reply_to`."""

    plane = Plane.WORK
    topic = "score"
    keyed = True
    request_id: str
    reply_to: str  # subject of the answer, a ScoresGiven
    group_id: int
    attempt: int
    rm_type: str  # a built-in grader, a plug-in or a name of the topology
    own: bool = False  # whether only the run's own reward actors may grade it
    group_rm: bool = False  # one call for all items, which are the whole group
    prompt_keys: tuple[str, ...] = ()  # PromptStored messages with prompt, label and metadata; the items omit these
    timeout_s: float = 0.0  # seconds from the delivery until the caller no longer waits; 0: unlimited
    evaluation: bool = False  # whether the items are samples of an evaluation
    per: Literal["turn", "token"] | UnsetType = UNSET  # what a list of rewards of one sample is for; not sent: nothing
    items: tuple[ScoreItem, ...]

    def key(self) -> str:
        return f"{self.token()}.{self.request_id}"

    def token(self) -> str:
        """The subject token of the workers that may grade it."""
        return OWN_GRADERS if self.own else grader_token(self.rm_type)
