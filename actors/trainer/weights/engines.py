"""Sink of a weight sync, which sends buckets to engines by broadcast or in shared memory.

A bucket is one buffer that holds its tensors one after another (SGLang's `flattened_bucket`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from actors.trainer.models.shards import bytes_of, entry_of
from actors.trainer.weights.calls import Ask
from actors.trainer.weights.engine_sums import SumsSink
from actors.trainer.weights.export import Work
from actors.trainer.weights.gathering import Bucket
from messages import BucketSent
from runtime.models.checksums import fingerprint


class BucketTransport(Protocol):
    """Transport of buckets to the engines of a weight sync."""

    def carry(
        self, step: BucketSent, flat: Tensor, ask: Ask, timeout_s: float, meanwhile: Callable[[], None]
    ) -> Mapping[str, str]:
        """Have the engines load a bucket. Returns the reasons of failures by engine.

        Args:
            step: metadata of the bucket.
            flat: bytes of the bucket; shape (bytes,), uint8.
            ask: calls the engines to load it.
            timeout_s: seconds for that call.
            meanwhile: called once, while the engines load it.

        Raises:
            RuntimeError, OSError: it could not be sent.
        """
        ...


class Sent(NamedTuple):
    """What one rank sent in a weight sync, and the failures."""

    num_buckets: int = 0
    size_bytes: int = 0
    fingerprints: dict[str, str] = {}  # by tensor; empty: not requested
    sums: dict[str, list[str]] = {}  # checksums of the engines' tensors on each of an engine's ranks; empty: none
    failed: dict[str, str] = {}  # reason by engine; the rank's own failure under ""


class EngineSink:
    """Sends buckets to the engines of a weight sync."""

    def __init__(
        self,
        session: str,
        stage: int,
        transport: BucketTransport,
        ask: Ask,
        *,
        fingerprints: bool,
        timeout_s: float,
        sums: SumsSink | None = None,
    ) -> None:
        """Prepare to send the buckets of one stage.

        Args:
            session: ID of the weight sync.
            stage: pipeline stage of this rank.
            transport: transport to the engines.
            ask: calls the member engines.
            fingerprints: compute fingerprints of the tensors while they are sent.
            timeout_s: seconds for a bucket.
            sums: computes checksums of the engines' tensors meanwhile.
        """
        self._sums = sums
        self._session = session
        self._stage = stage
        self._transport = transport
        self._ask = ask
        self._timeout_s = timeout_s
        self._rooms: list[Tensor] = []  # buffers of the bucket being sent and of the one being filled
        self._num_buckets = self._size_bytes = 0
        self._takes_fingerprints = fingerprints
        self._fingerprints: dict[str, str] = {}
        self._failed: dict[str, str] = {}

    def take(self, bucket: Bucket) -> Work:
        """Copy the bytes of a bucket."""
        if self._failed:
            return lambda: None
        ordered = aligned(bucket)
        flat = self._flattened(ordered)
        return lambda: self._send(ordered, flat)

    def close(self) -> Sent:
        """Return the result."""
        self._rooms.clear()  # colocated engines need the memory next
        sums = {} if self._sums is None or self._failed else self._sums.close()
        return Sent(self._num_buckets, self._size_bytes, self._fingerprints, sums, self._failed)

    def _flattened(self, bucket: Bucket) -> Tensor:
        """Copy the bytes of a bucket to a reused buffer: new memory pages take longer than the copy."""
        size = sum(tensor.nbytes for _, tensor in bucket)
        room = self._rooms.pop(0) if len(self._rooms) > 1 else None
        if room is None or len(room) < size:
            room = torch.empty(size, dtype=torch.uint8, device=bucket[0][1].device)
        self._rooms.append(room)
        return flattened(bucket, room[:size])

    def _send(self, bucket: Bucket, flat: Tensor) -> None:
        if self._failed:
            return
        index = self._num_buckets
        step = described(self._session, self._stage, index, bucket)
        try:
            failed = self._transport.carry(
                step, flat, self._ask, self._timeout_s, lambda: self._add_fingerprints(bucket)
            )
        except (RuntimeError, OSError, ValueError) as error:
            self._failed[""] = f"bucket {index}: {error}"
            return
        self._failed |= {engine: f"bucket {index}: {reason}" for engine, reason in failed.items()}
        self._num_buckets += 1
        self._size_bytes += flat.nbytes

    def _add_fingerprints(self, bucket: Bucket) -> None:
        self._fingerprints |= fingerprints_of(bucket) if self._takes_fingerprints else {}
        if self._sums is not None:
            self._sums.take(bucket)()


def described(session: str, stage: int, index: int, bucket: Bucket) -> BucketSent:
    """Describe a bucket for engines, independent of the transport."""
    return BucketSent(
        session=session,
        stage=stage,
        index=index,
        names=tuple(name for name, _ in bucket),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket),
        shapes=tuple(tuple(tensor.shape) for _, tensor in bucket),
    )


def fingerprints_of(bucket: Bucket) -> dict[str, str]:
    """Compute the fingerprint of each tensor, by name."""
    entries = [(entry_of(name, tensor), tensor) for name, tensor in bucket]
    return {
        entry.name: fingerprint(entry.name, entry.dtype, entry.shape, bytes_of(tensor)) for entry, tensor in entries
    }


def aligned(bucket: Sequence[tuple[str, Tensor]]) -> Bucket:
    """Sort a bucket so that each tensor starts at a multiple of its element size: SGLang rejects others."""
    return sorted(bucket, key=lambda item: -item[1].element_size())


def flattened(bucket: Bucket, out: Tensor | None = None) -> Tensor:
    """Copy the bytes of all tensors, one after another; shape (bytes,), uint8, on their device.

    Args:
        bucket: at least one tensor.
        out: buffer for the bytes, of the same size; None: new memory.
    """
    tensors = [tensor.detach().contiguous().flatten().view(torch.uint8) for _, tensor in bucket]
    return torch.cat(tensors, out=out)
