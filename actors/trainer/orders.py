"""What rank 0 tells the other ranks of the trainer to do, and a batch on its way to them."""

from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from actors.trainer.batches.batch import TrainBatch
from messages import EngineLayout
from runtime.settings.topology import WeightFormat


class Load(msgspec.Struct, tag=True):
    """Take the state of a checkpoint of this run."""

    path: str


class Begin(msgspec.Struct, tag=True):
    """Begin from another run's checkpoint."""

    path: str  # of another run's checkpoint
    of_megatron_lm: bool


class Train(msgspec.Struct, tag=True):
    """Train a batch."""

    size_bytes: int  # of the batch, which follows by broadcast


class ComputeLogProbs(msgspec.Struct, tag=True):
    """Compute the log-probs of groups that a train step will want."""

    size_bytes: int  # of the groups, as a batch that follows by broadcast


class Save(msgspec.Struct, tag=True):
    """Begin a checkpoint."""

    step: int
    incarnation: int
    frontier: int


class FinishSave(msgspec.Struct, tag=True):
    """Give the checkpoint that was begun its name."""


class Export(msgspec.Struct, tag=True):
    """Begin to write the weights."""

    directory: str
    copy: bool = False  # of a copy, so that training can go on
    weight_format: WeightFormat = "as_trained"
    delta: str = ""  # directory for what changed since the version before, too; none: that is not wanted
    base: str = ""  # whole files of that version


class AdvanceExport(msgspec.Struct, tag=True):
    """Gather another bucket of them."""


class FinishExport(msgspec.Struct, tag=True):
    """Gather and write what is left."""


class OpenGroups(msgspec.Struct, tag=True):
    """Listen for engines in new groups."""

    name: str
    part: int  # of the engines
    world_size: int
    timeout_s: float  # of a broadcast


class JoinGroups(msgspec.Struct, tag=True):
    """Wait for engines in them."""

    part: int


class LeaveGroups(msgspec.Struct, tag=True):
    """End them."""

    part: int


class SendWeights(msgspec.Struct, tag=True):
    """Send the weights to engines."""

    session: str
    instances: tuple[str, ...]  # rollout actors that have them
    readers: dict[str, int]  # their ranks, by engine
    timeout_s: float  # for a bucket
    layouts: tuple[EngineLayout, ...]  # of which checksums are reckoned
    part: int  # of the engines
    fingerprints: bool  # of the tensors, are wanted


class CopyWeights(msgspec.Struct, tag=True):
    """Copy the weights, to be gathered and kept for sending while training goes on."""

    version: int  # that they are


class AdvanceCopy(msgspec.Struct, tag=True):
    """Gather another bucket of the copy."""


class FinishCopy(msgspec.Struct, tag=True):
    """Gather what is left, and keep it in the place of the copy before."""


class SendCopy(SendWeights, tag=True):
    """Begin to send what is kept."""

    version: int  # that it is to be
    beside: bool  # go on meanwhile, until `FinishSend`


class FinishSend(msgspec.Struct, tag=True):
    """Wait until it is sent."""


class Offload(msgspec.Struct, tag=True):
    """Free what only training needs."""


class Onload(msgspec.Struct, tag=True):
    """Take it back."""


class Probe(msgspec.Struct, tag=True):
    """Compute the log-probs of the probe."""


class Stop(msgspec.Struct, tag=True):
    """Leave."""


SendingOrder = (
    OpenGroups | JoinGroups | LeaveGroups | SendWeights | CopyWeights | AdvanceCopy | FinishCopy | SendCopy | FinishSend
)
Order = (
    Load
    | Begin
    | Train
    | ComputeLogProbs
    | Save
    | FinishSave
    | Export
    | AdvanceExport
    | FinishExport
    | SendingOrder
    | Offload
    | Onload
    | Probe
    | Stop
)


def encode_batch(batch: TrainBatch) -> bytes:
    """A batch as rank 0 broadcasts it."""
    columns = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "step"}
    arrays = {
        name: (array.dtype.str, array.shape, array.tobytes()) for name, array in columns.items() if array is not None
    }
    return msgspec.msgpack.encode((batch.step, arrays))


def decode_batch(data: bytes) -> TrainBatch:
    """The batch again."""
    step, arrays = msgspec.msgpack.decode(data, type=tuple[int, dict[str, tuple[str, tuple[int, ...], bytes]]])
    columns: dict[str, Any] = {
        name: np.frombuffer(raw, dtype=dtype).reshape(shape) for name, (dtype, shape, raw) in arrays.items()
    }
    return TrainBatch(step=step, **columns)
