"""Decisions to republish weights when engines cannot use the files on disk. Pure."""

from typing import Final, Protocol

MAX_TIMES: Final = 3  # republications of the same weights in a row


class Refusals(Protocol):
    """Versions that engines confirmed or refused. Each property is the newest such version; 0: none."""

    @property
    def confirmed(self) -> int:
        """Newest version that an engine holds."""
        ...

    @property
    def refused(self) -> int:
        """Newest version that an engine refused at least once."""
        ...

    @property
    def refused_again(self) -> int:
        """Newest version that an engine refused repeatedly, some seconds apart."""
        ...

    @property
    def unusable(self) -> int:
        """Newest version whose files differ from the announcement."""
        ...


class WeightsUnusable(Exception):
    """The same weights were published repeatedly, and engines could use none of the versions."""


class Republishing:
    """Tracks the last announced version and how often its weights were republished, in one trainer incarnation."""

    def __init__(self) -> None:
        self.first = 0  # version of these weights' first announcement; 0: there are none in files
        self.times = 0  # republications of these weights
        self.whole_version = 0  # newest version published in full
        self._version = 0

    def announced(self, version: int, *, again: bool, is_whole: bool) -> None:
        """Record an announcement of weights in files."""
        self._version = version
        self.first, self.times = (self.first, self.times + 1) if again else (version, 0)
        if is_whole:
            self.whole_version = version

    def is_wanted(self, refusals: Refusals) -> bool:
        """Whether no engine can use the newest version, so that generation would stop.

        A refused delta has to be published in full. Files that differ from the announcement have to be written again.
        If the files are right but engines refuse them repeatedly and none confirms them, they are republished once. The
        export itself may have been wrong.
        """
        if not self._version:
            return False
        if refusals.unusable >= self._version or (self.whole_version < self._version <= refusals.refused):
            return True
        return self.times == 0 and refusals.confirmed < self._version <= refusals.refused_again

    def must_be_whole(self, refusals: Refusals) -> bool:
        """Whether the next version must be published in full.

        This is so if a delta since the newest full version was refused, or if that version's files are damaged.
        """
        return refusals.refused > self.whole_version or refusals.unusable >= self.whole_version
