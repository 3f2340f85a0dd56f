"""Link between rank 0 of the actor and a critic on ranks of its own: calls one way, answers the other way.

Actor and critic are two process groups of torch.distributed, each with Megatron's groups of its own. They share only
the TCP store of rank 0, through which calls, payloads and answers go. So no rank waits for the other model inside of
a collective. A payload is stored before its call, and deleted by its only reader.
"""

import time
from datetime import timedelta
from typing import Any, Final, TypeVar

import msgspec
import torch.distributed as dist

from actors.trainer.ranks import POLL, RankCalls
from runtime.process.actor import InputError
from runtime.util.disk import NoSpace

T = TypeVar("T")
ANSWER_TIMEOUT_S: Final = 3600.0  # for the values or the training of a batch, a checkpoint, or an export
PART_BYTES: Final = 4 << 20  # torch's store refuses values over 8 MiB
FAILED: Final = "failed"  # key of the first failure of a rank of the critic


class Failure(msgspec.Struct, frozen=True):
    """The error of a rank of the critic."""

    kind: str  # key in `KINDS`
    text: str  # names the rank


KINDS: Final[dict[str, type[Exception]]] = {"input": InputError, "no space": NoSpace}


class CriticRankFailed(Exception):
    """A rank of the critic failed, or did not answer in time."""


class CriticLink:
    """Rank 0's end of the link."""

    def __init__(self, store: Any, calls: RankCalls, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Create the link, before the first call.

        Args:
            store: Store that both ends share.
            calls: Calls to the critic's ranks.
            timeout_s: Longest wait for an answer, in seconds.
        """
        self._store = store
        self._calls = calls
        self._timeout_s = timeout_s
        self._num_payloads = 0
        self._num_answers = 0

    def tell(self, name: str, payload: bytes | None = None, **arguments: Any) -> None:
        """Call a method of `CriticRank` on all ranks of the critic, with a payload for the first.

        The method gets the size of the payload as `size_bytes`.
        """
        if payload is not None:
            self._num_payloads += 1
            _put(self._store, f"payload/{self._num_payloads}", payload)
            arguments["size_bytes"] = len(payload)
        self._calls.tell(name, **arguments)

    def stop(self) -> None:
        """Have the critic's ranks end."""
        self._calls.stop_others()

    def answer(self, kind: type[T]) -> T:
        """Wait for the next answer of the critic's first rank.

        Raises:
            InputError, NoSpace: A rank of the critic raised it; the text names the rank.
            CriticRankFailed: A rank of the critic failed in another way, or there is no answer in time.
        """
        self._num_answers += 1
        key, deadline = f"answer/{self._num_answers}", time.monotonic() + self._timeout_s
        while not _is_there(self._store, key, min(POLL, timedelta(seconds=self._timeout_s))):
            if self._store.check([FAILED]):
                failure = msgspec.msgpack.decode(self._store.get(FAILED), type=Failure)
                raise KINDS.get(failure.kind, CriticRankFailed)(failure.text)
            if time.monotonic() > deadline:
                raise CriticRankFailed(f"the critic's ranks did not answer within {self._timeout_s:g} s")
        size_bytes = int(self._store.get(key))
        self._store.delete_key(key)
        return msgspec.msgpack.decode(_take(self._store, f"{key}/", size_bytes), type=kind)


class CriticEnd:
    """A critic rank's end of the link."""

    def __init__(self, store: Any, calls: RankCalls, *, is_first: bool) -> None:
        """Create the link, before the first call.

        Args:
            store: Store that both ends share.
            calls: Calls of the actor's rank 0, which also broadcast among the critic's ranks.
            is_first: Whether this is the critic's first rank.
        """
        self._store = store
        self._calls = calls
        self._is_first = is_first
        self._num_payloads = 0
        self._num_answers = 0

    def payload(self, size_bytes: int) -> bytes:
        """Return the payload of a call. A collective of the critic's ranks."""
        self._num_payloads += 1
        taken = _take(self._store, f"payload/{self._num_payloads}", size_bytes) if self._is_first else b""
        return self._calls.broadcast(taken, size_bytes)

    def answer(self, value: Any) -> None:
        """Answer the call, on the first rank; other ranks do nothing."""
        if not self._is_first:
            return
        self._num_answers += 1
        key, encoded = f"answer/{self._num_answers}", msgspec.msgpack.encode(value)
        _put(self._store, f"{key}/", encoded)
        self._store.set(key, str(len(encoded)))

    def fail(self, error: Exception, name: str) -> None:
        """Report that this rank fails, unless another one did so before.

        Args:
            error: The error.
            name: Of this rank.
        """
        kind = next((kind for kind, one in KINDS.items() if isinstance(error, one)), "other")
        text = str(error) if kind != "other" else repr(error)
        failure = msgspec.msgpack.encode(Failure(kind, f"{name}: {text}"))
        if not self._store.check([FAILED]):
            self._store.set(FAILED, failure)


def _put(store: Any, key: str, payload: bytes) -> None:
    for begin in range(0, len(payload), PART_BYTES):
        store.set(f"{key}/{begin}", payload[begin : begin + PART_BYTES])


def _take(store: Any, key: str, size_bytes: int) -> bytes:
    """Read a stored payload, and delete it."""
    parts: list[bytes] = []
    for begin in range(0, size_bytes, PART_BYTES):
        parts.append(store.get(f"{key}/{begin}"))
        store.delete_key(f"{key}/{begin}")
    return b"".join(parts)


def _is_there(store: Any, key: str, timeout: timedelta) -> bool:
    """Wait for a key, up to a timeout."""
    try:
        store.wait([key], timeout)
    except dist.DistStoreError:  # timed out
        return False
    return True


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
