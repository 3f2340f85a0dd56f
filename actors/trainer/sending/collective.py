"""Buckets on their way to engines: a sink of the export (models/handover.py)."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from torch import Tensor

from actors.trainer.models.gathering import Bucket
from actors.trainer.models.shards import bytes_of, entry_of
from actors.trainer.sending.asking import Ask
from actors.trainer.sending.ways import Way, aligned, flattened
from messages import BucketSent
from runtime.checksums import tensor_checksum


class Sent(NamedTuple):
    """What a rank has sent."""

    num_buckets: int = 0
    size_bytes: int = 0
    checksums: dict[str, str] = {}  # by tensor
    failed: dict[str, str] = {}  # reason by engine; of the rank itself under no name


class NoSink:
    """Of ranks to which no tensors come."""

    is_free = True

    def hand_over(self, bucket: Bucket, *, wait: bool = False) -> None:
        """There is nothing in it."""
        assert not bucket

    def close(self) -> Sent:
        """Nothing was sent."""
        return Sent()


class BroadcastSink:
    """Sends a bucket on a thread of its own while the next one is gathered, and has engines take it meanwhile."""

    def __init__(self, session: str, stage: int, way: Way, ask: Ask, *, timeout_s: float) -> None:
        """Nothing is sent yet.

        Args:
            session: for which.
            stage: of the pipeline.
            way: to the engines.
            ask: has the session's engines take something.
            timeout_s: for a bucket.
        """
        self._session = session
        self._stage = stage
        self._way = way
        self._ask = ask
        self._timeout_s = timeout_s
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="send")
        self._sending: Future[None] | None = None
        self._num_buckets = self._size_bytes = 0
        self._checksums: dict[str, str] = {}
        self._failed: dict[str, str] = {}

    @property
    def is_free(self) -> bool:
        """Whether nothing is being sent."""
        return self._sending is None or self._sending.done()

    def hand_over(self, bucket: Bucket, *, wait: bool = False) -> None:
        """Have a bucket sent, once the one before is. What comes after a failure is dropped."""
        self._wait()
        if bucket and not self._failed:
            ordered = aligned(bucket)
            self._sending = self._executor.submit(self._send, ordered, flattened(ordered))
        if wait:
            self._wait()

    def close(self) -> Sent:
        """Wait until all is sent and say what was."""
        self._wait()
        self._executor.shutdown()
        return Sent(self._num_buckets, self._size_bytes, self._checksums, self._failed)

    def _wait(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            try:
                sending.result()  # ends by the group's time limit
            except (RuntimeError, TimeoutError) as error:
                self._failed.setdefault("", f"bucket {self._num_buckets}: {error}")

    def _send(self, bucket: Bucket, flat: Tensor) -> None:
        step = BucketSent(
            session=self._session,
            stage=self._stage,
            index=self._num_buckets,
            names=tuple(name for name, _ in bucket),
            dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket),
            shapes=tuple(tuple(tensor.shape) for _, tensor in bucket),
        )
        failed = self._way.carry(step, flat, self._ask, self._timeout_s)
        self._failed |= {engine: f"bucket {step.index}: {reason}" for engine, reason in failed.items()}
        self._note(bucket, flat.nbytes)

    def _note(self, bucket: Bucket, size_bytes: int) -> None:
        self._num_buckets += 1
        self._size_bytes += size_bytes
        for name, tensor in bucket:
            entry = entry_of(name, tensor)
            self._checksums[name] = tensor_checksum(name, entry.dtype, entry.shape, bytes_of(tensor))
