"""Buckets on their way to engines: a sink of the export (models/handover.py).

A bucket is one buffer, in which its tensors lie one behind the other (SGLang's `flattened_bucket`).
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from actors.trainer.models.gathering import Bucket
from actors.trainer.models.shards import bytes_of, entry_of
from actors.trainer.sending.asking import Ask
from actors.trainer.sending.reckoning import OfLayouts, Reckoning
from messages import BucketSent
from runtime.checksums import fingerprint


class Way(Protocol):
    """Gets buckets to the engines of a session."""

    def carry(self, step: BucketSent, flat: Tensor, ask: Ask, timeout_s: float) -> Mapping[str, str]:
        """Have engines take a bucket; why some did not, by engine.

        Args:
            step: what it holds.
            flat: its bytes; shape (bytes,), uint8.
            ask: has the engines take it.
            timeout_s: for that.

        Raises:
            RuntimeError, OSError: it could not be sent.
        """
        ...


class Sent(NamedTuple):
    """What a rank has sent."""

    num_buckets: int = 0
    size_bytes: int = 0
    fingerprints: dict[str, str] = {}  # by tensor; empty: they were not wanted
    failed: dict[str, str] = {}  # reason by engine; of the rank itself under no name
    expected: OfLayouts = {}  # what engines will say of the stage's tensors


class NoSink:
    """Of ranks to which no tensors come."""

    is_free = True

    def hand_over(self, bucket: Bucket, *, wait: bool = False) -> None:
        """There is nothing in it."""
        assert not bucket

    def close(self) -> Sent:
        """Nothing was sent."""
        return Sent()


class BucketSink:
    """Sends a bucket on a thread of its own while the next one is gathered, and has engines take it meanwhile."""

    def __init__(
        self,
        session: str,
        stage: int,
        way: Way,
        ask: Ask,
        reckoning: Reckoning,
        *,
        fingerprints: bool,
        timeout_s: float,
    ) -> None:
        """Nothing is sent yet.

        Args:
            session: for which.
            stage: of the pipeline.
            way: to the engines.
            ask: has the session's engines take something.
            reckoning: is fed with what is sent, meanwhile.
            fingerprints: of the tensors, are wanted.
            timeout_s: for a bucket.
        """
        self._session = session
        self._stage = stage
        self._way = way
        self._ask = ask
        self._reckoning = reckoning
        self._timeout_s = timeout_s
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="send")
        self._beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reckon")
        self._sending: Future[None] | None = None
        self._rooms: list[Tensor] = []  # of the bucket that is sent, and of the one that is filled
        self._num_buckets = self._size_bytes = 0
        self._are_noted = fingerprints
        self._fingerprints: dict[str, str] = {}
        self._failed: dict[str, str] = {}

    @property
    def is_free(self) -> bool:
        """Whether nothing is being sent."""
        return self._sending is None or self._sending.done()

    def hand_over(self, bucket: Bucket, *, wait: bool = False) -> None:
        """Have a bucket sent, once the one before is. What comes after a failure is dropped."""
        ordered = aligned(bucket)
        flat = self._flattened(ordered) if bucket and not self._failed else None  # while the one before is sent
        self._wait()
        if flat is not None and not self._failed:
            self._sending = self._executor.submit(self._send, ordered, flat)
        if wait:
            self._wait()

    def close(self) -> Sent:
        """Wait until all is sent and say what was."""
        self._wait()
        self._rooms.clear()  # engines in turns want the memory next
        self._executor.shutdown()
        self._beside.shutdown()
        expected = {} if self._failed else self._reckoning.result()
        return Sent(self._num_buckets, self._size_bytes, self._fingerprints, self._failed, expected)

    def _flattened(self, bucket: Bucket) -> Tensor:
        """The bytes of a bucket, in memory that is used again: new pages take longer than the copy."""
        size = sum(tensor.nbytes for _, tensor in bucket)
        room = self._rooms.pop(0) if len(self._rooms) > 1 else None
        if room is None or len(room) < size:
            room = torch.empty(size, dtype=torch.uint8, device=bucket[0][1].device)
        self._rooms.append(room)
        return flattened(bucket, room[:size])

    def _wait(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            try:
                sending.result()  # ends by the group's time limit
            except (RuntimeError, OSError, ValueError) as error:
                self._failed.setdefault("", f"bucket {self._num_buckets}: {error}")

    def _send(self, bucket: Bucket, flat: Tensor) -> None:
        step = described(self._session, self._stage, self._num_buckets, bucket)
        noted = self._beside.submit(self._note, bucket)
        failed = self._way.carry(step, flat, self._ask, self._timeout_s)
        self._failed |= {engine: f"bucket {step.index}: {reason}" for engine, reason in failed.items()}
        noted.result(self._timeout_s)
        self._num_buckets += 1
        self._size_bytes += flat.nbytes

    def _note(self, bucket: Bucket) -> None:
        self._fingerprints |= fingerprints_of(bucket) if self._are_noted else {}
        self._reckoning.add(bucket)


def described(session: str, stage: int, index: int, bucket: Bucket) -> BucketSent:
    """What engines are told of a bucket, whichever way it goes."""
    return BucketSent(
        session=session,
        stage=stage,
        index=index,
        names=tuple(name for name, _ in bucket),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket),
        shapes=tuple(tuple(tensor.shape) for _, tensor in bucket),
    )


def fingerprints_of(bucket: Bucket) -> dict[str, str]:
    """Of each tensor, by name."""
    entries = [(entry_of(name, tensor), tensor) for name, tensor in bucket]
    return {
        entry.name: fingerprint(entry.name, entry.dtype, entry.shape, bytes_of(tensor)) for entry, tensor in entries
    }


def aligned(bucket: Sequence[tuple[str, Tensor]]) -> Bucket:
    """A bucket in which each tensor begins at a multiple of its numbers' size: SGLang refuses others."""
    return sorted(bucket, key=lambda item: -item[1].element_size())


def flattened(bucket: Bucket, out: Tensor | None = None) -> Tensor:
    """The bytes of all tensors, one behind the other; shape (bytes,), uint8, on their device. Always a copy.

    Args:
        bucket: of at least one tensor.
        out: where they go; as many bytes. None: into new memory.
    """
    tensors = [tensor.detach().contiguous().flatten().view(torch.uint8) for _, tensor in bucket]
    return torch.cat(tensors, out=out)
