"""The data plane: sample payloads, read by sequence number."""

from typing import Any

from messages.arrays import Float32Array
from messages.base import Message, Plane, register
from messages.samples import SampleKey, Segment


@register
class SegmentsPublished(Message, kw_only=True, tag="segments_published", eq=False):
    """Segments of one group that ended together. Written by rollout, read by trainer readers."""

    plane = Plane.DATA
    topic = "segments"
    keyed = True
    group_id: int
    attempt: int
    lease: str  # delivery of the task that produced them
    segments: tuple[Segment, ...]
    prompt: str = ""  # as text, for people and replay; the beginning of one that is stored by itself
    label: Any = None  # none of a prompt that is stored by itself

    def key(self) -> str:
        return f"{self.group_id}.{self.attempt}"


@register
class PromptStored(Message, kw_only=True, tag="prompt_stored", eq=False):
    """A stretch of a prompt that is too large for tasks and events, which cite it. Written by buffer, read by many."""

    plane = Plane.DATA
    topic = "prompt"
    keyed = True
    data: str  # name of the data source
    row: int
    part: int  # from 0
    num_parts: int
    content: bytes  # of all parts behind each other: a Prompt in msgpack

    def key(self) -> str:
        return f"{self.row}.{self.part}"


@register
class ColumnPublished(Message, kw_only=True, tag="column_published", eq=False):
    """A named column of one sample, added by a declared stage: ref_log_probs, values, teacher_log_probs."""

    plane = Plane.DATA
    topic = "column"
    keyed = True
    sample: SampleKey
    column: str
    values: Float32Array  # [T] over the sample's response tokens, all segments

    def key(self) -> str:
        return f"{self.sample.group_id}.{self.sample.attempt}"
