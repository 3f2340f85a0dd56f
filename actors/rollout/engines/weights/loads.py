"""The loads of weights into engines, by label, and which of them are proven. Tokens of others are not used."""

import uuid
from collections import deque
from collections.abc import Callable, Collection
from enum import Enum
from typing import Final

import anyio

from actors.rollout.sglang.labels import SEPARATOR, label_of

KEPT: Final = 256  # proven loads of an engine, which is more updates than a sample spans


class LoadStanding(Enum):
    """What is known of a load."""

    OPEN = "open"  # it is being looked at
    PROVEN = "proven"
    REFUSED = "refused"  # or never ours


class Loads:
    """Labels for loads, each used once, and what became of them.

    What is proven is kept, the newest of each engine. One that is not known any more counts as refused: its tokens are
    dropped, which costs work and nothing else.
    """

    def __init__(self, *, settle_timeout_s: float = 600.0) -> None:
        """Begin without any; for a proof that tokens wait for, so long as given is waited."""
        self._settle_timeout_s = settle_timeout_s
        self._session = uuid.uuid4().hex[:8]  # labels that another rollout actor gave out are not ours
        self._num_begun = 0
        self._open: set[str] = set()
        self._proven: dict[str, deque[str]] = {}  # by engine
        self._num_refused = 0
        self._settled = anyio.Event()  # replaced whenever a load has settled

    def engine_of(self, label: str) -> str:
        """The engine that a label of ours was given out to; empty: it is none."""
        return label.partition(SEPARATOR)[2].rpartition(f".{self._session}.")[0] if self._is_ours(label) else ""

    def begin(self, engine: str, version: int) -> str:
        """A label for a load into an engine. It stays open until it is proven or refused."""
        self._num_begun += 1
        label = label_of(version, f"{engine}.{self._session}.{self._num_begun}")
        self._open.add(label)
        return label

    def prove(self, label: str) -> None:
        """Say that the engine holds what it was to load."""
        self._proven.setdefault(self.engine_of(label), deque(maxlen=KEPT)).append(label)
        self._settle(label)

    def refuse(self, label: str) -> None:
        """Say that it does not, or that nobody will know; nothing if that is settled."""
        if label in self._open:
            self._num_refused += 1
            self._settle(label)

    def standing(self, label: str) -> LoadStanding:
        """What is known of the load that a label names."""
        if label in self._open:
            return LoadStanding.OPEN
        return LoadStanding.PROVEN if label in self._proven.get(self.engine_of(label), ()) else LoadStanding.REFUSED

    def is_proven(self, label: str) -> bool:
        """Whether tokens under that label may be used."""
        return self.standing(label) is LoadStanding.PROVEN

    def trust_from_now_on(self) -> Callable[[str], bool]:
        """Like `is_proven`, for the labels of a request that is sent now, as long as no load is refused meanwhile.

        A stream names a label with each chunk, and not until its end the labels of all tokens: a load that was refused
        between two chunks would not be seen.
        """
        num_refused = self._num_refused
        return lambda label: self._num_refused == num_refused and self.is_proven(label)

    async def settled(self, labels: Collection[str]) -> bool:
        """Wait until none of the loads is open; whether all are proven."""
        with anyio.move_on_after(self._settle_timeout_s):
            while any(label in self._open for label in labels):
                await self._settled.wait()
        return all(self.is_proven(label) for label in labels)

    def _settle(self, label: str) -> None:
        self._open.discard(label)
        settled, self._settled = self._settled, anyio.Event()
        settled.set()

    def _is_ours(self, label: str) -> bool:
        """Whether it was given out here."""
        load = label.partition(SEPARATOR)[2]
        _, _, rest = load.rpartition(f".{self._session}.")
        return rest.isdecimal() and 0 < int(rest) <= self._num_begun
