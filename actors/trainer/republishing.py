"""When the same weights are published once more, since engines cannot use what lies on the disk. Pure."""

from typing import Final, Protocol

MAX_TIMES: Final = 3  # the same weights in a row


class Refusals(Protocol):
    """What engines said of versions; each is the newest one, 0: none."""

    @property
    def confirmed(self) -> int:
        """Held by engines."""
        ...

    @property
    def refused(self) -> int:
        """Refused once at least."""
        ...

    @property
    def refused_again(self) -> int:
        """Refused repeatedly, some seconds apart."""
        ...

    @property
    def unusable(self) -> int:
        """Whose files are not what was announced."""
        ...


class WeightsUnusable(Exception):
    """The same weights were published repeatedly, and their files were damaged each time."""


class Republishing:
    """The version that one incarnation of the trainer announced last, and how often its weights were published."""

    def __init__(self) -> None:
        self.first = 0  # version under which the weights were announced first; 0: none are in files
        self.times = 0  # that they were published again
        self.whole_version = 0  # the newest one in whole files
        self._version = 0

    def announced(self, version: int, *, again: bool, is_whole: bool) -> None:
        """Note an announcement of weights in files."""
        self._version = version
        self.first, self.times = (self.first, self.times + 1) if again else (version, 0)
        if is_whole:
            self.whole_version = version

    def is_wanted(self, told: Refusals) -> bool:
        """Whether no engine can use the newest version, so that nothing would come from it.

        Changes that are refused have to go whole. Files that are not what was announced have to be written again. If
        the files are right and all engines refuse, writing them again is tried once: what was exported may be wrong.
        """
        if not self._version:
            return False
        if told.unusable >= self._version or (self.whole_version < self._version <= told.refused):
            return True
        return self.times == 0 and told.confirmed < self._version <= told.refused_again

    def must_be_whole(self, told: Refusals) -> bool:
        """Whether changes since the newest whole version may lead nowhere: some were refused, or its files damaged."""
        return told.refused > self.whole_version or told.unusable >= self.whole_version
