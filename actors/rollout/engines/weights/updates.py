"""Tracks weight updates by label; tokens sampled from unverified updates are discarded."""

import uuid
from collections import deque
from collections.abc import Callable, Collection
from enum import Enum
from typing import Final

import anyio

from actors.rollout.sglang.labels import SEPARATOR, label_of

KEPT: Final = 256  # verified updates kept per engine, more than a sample spans


class UpdateStatus(Enum):
    """Verification status of a weight update."""

    OPEN = "open"  # verification is in progress
    VERIFIED = "verified"
    REFUSED = "refused"  # refused, forgotten, or not a label of this actor


class UpdateTracker:
    """Unique labels for weight updates, and the verification status of each.

    Only the newest verified updates of each engine are kept. A forgotten one counts as refused: its tokens are
    discarded, which costs only work.
    """

    def __init__(self, *, settle_timeout_s: float = 600.0) -> None:
        """Start without updates; `settle_timeout_s` limits how long tokens wait for a verification."""
        self._settle_timeout_s = settle_timeout_s
        self._session = uuid.uuid4().hex[:8]  # distinguishes our labels from those of other rollout actors
        self._num_begun = 0
        self._open: set[str] = set()
        self._verified: dict[str, deque[str]] = {}  # verified labels by engine
        self._num_refused = 0
        self._settled = anyio.Event()  # replaced whenever a status becomes final

    def engine_of(self, label: str) -> str:
        """Return the engine that one of our labels was given to; empty for other labels."""
        return label.partition(SEPARATOR)[2].rpartition(f".{self._session}.")[0] if self._is_ours(label) else ""

    def begin(self, engine: str, version: int) -> str:
        """Create a label for the update of an engine. It stays open until it is verified or refused."""
        self._num_begun += 1
        label = label_of(version, f"{engine}.{self._session}.{self._num_begun}")
        self._open.add(label)
        return label

    def accept(self, label: str) -> None:
        """Mark an update as verified: the engine holds the weights."""
        self._verified.setdefault(self.engine_of(label), deque(maxlen=KEPT)).append(label)
        self._settle(label)

    def refuse(self, label: str) -> None:
        """Mark an open update as refused: the verification failed or was abandoned. No-op if its status is final."""
        if label in self._open:
            self._num_refused += 1
            self._settle(label)

    def status(self, label: str) -> UpdateStatus:
        """Return the status of the update with this label."""
        if label in self._open:
            return UpdateStatus.OPEN
        return UpdateStatus.VERIFIED if label in self._verified.get(self.engine_of(label), ()) else UpdateStatus.REFUSED

    def is_verified(self, label: str) -> bool:
        """Whether tokens under this label may be used."""
        return self.status(label) is UpdateStatus.VERIFIED

    def trust_from_now_on(self) -> Callable[[str], bool]:
        """Return a check like `is_verified` for a request sent now, valid until any update is refused.

        A streamed chunk names one label; only the last chunk names the labels of all tokens. An update refused between
        two chunks would otherwise go unnoticed.
        """
        num_refused = self._num_refused
        return lambda label: self._num_refused == num_refused and self.is_verified(label)

    async def settled(self, labels: Collection[str]) -> bool:
        """Wait until no update is open; return whether all are verified."""
        with anyio.move_on_after(self._settle_timeout_s):
            while any(label in self._open for label in labels):
                await self._settled.wait()
        return all(self.is_verified(label) for label in labels)

    def _settle(self, label: str) -> None:
        self._open.discard(label)
        settled, self._settled = self._settled, anyio.Event()
        settled.set()

    def _is_ours(self, label: str) -> bool:
        """Whether this object created the label."""
        load = label.partition(SEPARATOR)[2]
        _, _, rest = load.rpartition(f".{self._session}.")
        return rest.isdecimal() and 0 < int(rest) <= self._num_begun
