"""Rolling updates: the engines of one update group take new weights while the others serve. Pure."""

from collections.abc import Callable, Collection


class RollingUpdate:
    """Decides which engines of a rollout actor may be updated now.

    An engine's update group follows from its position among the sorted names, so equal sets of engines give equal
    groups. For weights in files, engines are scheduled here. For a weight sync, the trainer opens one per update group.

    Args:
        num_groups: number of update groups; 1: no scheduling.
        names: names of all engines.
    """

    def __init__(self, num_groups: int, names: Callable[[], Collection[str]]) -> None:
        self._num_groups = num_groups
        self._names = names
        self._waiting: list[str] = []  # in order of arrival
        self._at_work: set[str] = set()  # engines that are being updated, all of one update group
        self._group = 0
        self._had: set[str] = set()  # engines updated since the group became active

    @property
    def is_on(self) -> bool:
        """Whether there is more than one update group."""
        return self._num_groups > 1

    def group_of(self, engine: str, num_groups: int | None = None) -> int:
        """Return the update group of an engine."""
        return sorted({*self._names(), engine}).index(engine) % (num_groups or self._num_groups)

    def wait(self, engine: str) -> None:
        """Add an engine to the queue."""
        self._waiting.append(engine)

    def take(self, engine: str) -> bool:
        """Start the update of a queued engine if no other update group is being updated; return whether it may start.

        An engine that was already updated in the current pass of its update group lets other groups go first.
        """
        group = self.group_of(engine)
        others = [each for each in self._waiting if self.group_of(each) != group and each not in self._had]
        if (self._at_work and group != self._group) or (engine in self._had and others):
            return False
        if not self._at_work:
            self._had = set()
        self._group = group
        self._waiting.remove(engine)
        self._at_work.add(engine)
        self._had.add(engine)
        return True

    def leave(self, engine: str) -> None:
        """Remove an engine from the queue, or end its update."""
        if engine in self._waiting:
            self._waiting.remove(engine)
        self._at_work.discard(engine)
