"""Orders from rank 0 to the other ranks of the trainer, and the encoding of a batch for them."""

from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from actors.trainer.data.batch import TrainBatch
from runtime.settings.topology import WeightFormat


class Load(msgspec.Struct, tag=True):
    """Load a checkpoint of this run."""

    path: str


class LoadCheckpoint(msgspec.Struct, tag=True):
    """Start from another run's checkpoint."""

    path: str
    of_megatron_lm: bool


class Train(msgspec.Struct, tag=True):
    """Train a batch."""

    size_bytes: int  # of the encoded batch, which is broadcast next


class ComputeValues(msgspec.Struct, tag=True):
    """Compute the values of a batch, on the critic's own ranks."""

    size_bytes: int  # of the encoded batch, which is the payload


class LearnReturns(msgspec.Struct, tag=True):
    """Train the critic on the returns of the batch whose values it computed last."""

    size_bytes: int  # of the encoded `Returns`, which are the payload


class ShareValues(msgspec.Struct, tag=True):
    """Take the values of the batch that is being trained, on the actor's ranks."""

    size_bytes: int  # of the values, which are broadcast next


class ComputeLogProbs(msgspec.Struct, tag=True):
    """Precompute log-probs of groups for a later train step."""

    size_bytes: int  # of the groups, encoded as a batch that is broadcast next


class Evaluate(msgspec.Struct, tag=True):
    """Evaluate held-out preference pairs."""

    size_bytes: int  # of the pairs, encoded as a batch that is broadcast next


class Save(msgspec.Struct, tag=True):
    """Start a checkpoint."""

    step: int
    incarnation: int
    frontier: int


class FinishSave(msgspec.Struct, tag=True):
    """Wait until the checkpoint is written, and give it its name."""


class Export(msgspec.Struct, tag=True):
    """Start to write the weights."""

    directory: str
    copy: bool = False  # write a copy, so that training can continue
    weight_format: WeightFormat = "as_trained"
    delta: str = ""  # directory for the delta to the previous version; empty: no delta
    base: str = ""  # full files of the previous version
    of_critic: bool = False  # write the critic, not the policy


class AdvanceExport(msgspec.Struct, tag=True):
    """Gather the next bucket of the export."""


class FinishExport(msgspec.Struct, tag=True):
    """Gather and write the remaining buckets."""


class OpenGroups(msgspec.Struct, tag=True):
    """Open new torch process groups for engines to join."""

    name: str
    part: int  # index of the engines' update group
    world_size: int
    timeout_s: float  # seconds, for a broadcast


class JoinGroups(msgspec.Struct, tag=True):
    """Wait until engines have joined the process groups."""

    part: int


class LeaveGroups(msgspec.Struct, tag=True):
    """Close the process groups."""

    part: int


class SendWeights(msgspec.Struct, tag=True):
    """Send the weights to engines."""

    session: str
    instances: tuple[str, ...]  # rollout actors of the engines
    readers: dict[str, int]  # ranks by engine
    timeout_s: float  # seconds, for a bucket
    part: int  # index of the engines' update group
    fingerprints: bool  # compute fingerprints of the tensors


class CopyWeights(msgspec.Struct, tag=True):
    """Copy the weights. While training continues, `AdvanceCopy` gathers the copy, and `SendCopy` sends it."""

    version: int  # of the copy


class AdvanceCopy(msgspec.Struct, tag=True):
    """Gather the next bucket of the copy."""


class FinishCopy(msgspec.Struct, tag=True):
    """Gather the remaining buckets, and replace the kept copy."""


class SendCopy(SendWeights, tag=True):
    """Start to send the kept copy."""

    version: int  # expected version of the copy
    in_background: bool  # send in the background, until `FinishSend`


class FinishSend(msgspec.Struct, tag=True):
    """Wait until the copy is sent."""


class Offload(msgspec.Struct, tag=True):
    """Free memory that only training needs."""


class Onload(msgspec.Struct, tag=True):
    """Move back what `Offload` freed."""


class Probe(msgspec.Struct, tag=True):
    """Compute the log-probs of the probe."""


class Stop(msgspec.Struct, tag=True):
    """Stop and leave the process group."""


SendingOrder = (
    OpenGroups | JoinGroups | LeaveGroups | SendWeights | CopyWeights | AdvanceCopy | FinishCopy | SendCopy | FinishSend
)
Order = (
    Load
    | LoadCheckpoint
    | Train
    | ComputeValues
    | LearnReturns
    | ShareValues
    | ComputeLogProbs
    | Evaluate
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


class Returns(msgspec.Struct, frozen=True):
    """What a critic on ranks of its own learns of the batch whose values it computed."""

    returns: bytes  # [N], float64
    loss_mask: bytes  # [N], uint8


class LearnedStep(msgspec.Struct, frozen=True):
    """One optimizer step of a critic on ranks of its own."""

    masked: bytes  # [B], bool: samples whose loss was not finite
    norm: float
    is_taken: bool


class Learned(msgspec.Struct, frozen=True):
    """What a critic on ranks of its own answers when it has learned."""

    steps: list[LearnedStep]
    metrics: dict[str, float]


def encode_batch(batch: TrainBatch) -> bytes:
    """Encode a batch for rank 0's broadcast."""
    columns = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "step"}
    arrays = {
        name: (array.dtype.str, array.shape, array.tobytes()) for name, array in columns.items() if array is not None
    }
    return msgspec.msgpack.encode((batch.step, arrays))


def decode_batch(data: bytes) -> TrainBatch:
    """Decode a batch that rank 0 broadcast."""
    step, arrays = msgspec.msgpack.decode(data, type=tuple[int, dict[str, tuple[str, tuple[int, ...], bytes]]])
    columns: dict[str, Any] = {
        name: np.frombuffer(raw, dtype=dtype).reshape(shape) for name, (dtype, shape, raw) in arrays.items()
    }
    return TrainBatch(step=step, **columns)
