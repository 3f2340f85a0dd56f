"""The data plane: sample payloads, read by sequence number."""

from typing import Any

from messages.arrays import Float32Array, Int32Array
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
    prompt: str = ""  # text, for people and replay; only the beginning if the prompt is stored separately
    label: Any = None  # None if the prompt is stored separately

    def key(self) -> str:
        return f"{self.group_id}.{self.attempt}"


@register
class PromptStored(Message, kw_only=True, tag="prompt_stored", eq=False):
    """A chunk of a prompt too large for tasks and events, which refer to it. Written by buffer, read by many."""

    plane = Plane.DATA
    topic = "prompt"
    keyed = True
    data: str  # name of the data source
    row: int
    part: int  # from 0
    num_parts: int
    content: bytes  # a chunk; all chunks concatenated are a Prompt in msgpack, or those of an evaluation set
    digest: str = ""  # of all chunks: the first 32 hex digits of their SHA-256; "" in old messages

    def key(self) -> str:
        return f"{self.digest or self.row}.{self.part}"


@register
class SnapshotChunk(Message, kw_only=True, tag="snapshot_chunk", eq=False):
    """A chunk of a ledger snapshot, cited by its SnapshotTaken. Written and read by buffer, read by trainer."""

    plane = Plane.DATA
    topic = "snapshot"
    keyed = True
    covers: int  # log sequence of the last event in the snapshot
    part: int  # from 0
    num_parts: int
    content: bytes  # all chunks concatenated are zlib-compressed JSON lines

    def key(self) -> str:
        return f"{self.covers}.{self.part}"


@register
class DrawsStored(Message, kw_only=True, tag="draws_stored", eq=False):
    """A chunk of rows that a data source with a state drew, and of its state after them. Written and read by buffer."""

    plane = Plane.DATA
    topic = "draws"
    keyed = True
    first: int  # number of the first drawn prompt
    part: int  # from 0
    num_parts: int
    content: bytes  # all chunks concatenated are msgpack: rows and state

    def key(self) -> str:
        return f"{self.first}.{self.part}"


@register
class ColumnPublished(Message, kw_only=True, tag="column_published", eq=False):
    """A named per-token column of one sample, such as teacher_log_probs. Written by rollout, read by the trainer.

    The likeliest tokens of a model, K at each of these T places, may come with its log-probs.
    """

    plane = Plane.DATA
    topic = "column"
    keyed = True
    sample: SampleKey
    column: str
    values: Float32Array  # [T], of all tokens after the sample's first prompt, those between turns included
    topk_ids: Int32Array | None = None  # [T x K], of the first token first
    topk_log_probs: Float32Array | None = None  # [T x K], natural log

    def key(self) -> str:
        return f"{self.sample.group_id}.{self.sample.attempt}"
