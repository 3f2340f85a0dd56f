"""Updates in groups: engines of one group take new weights while the others serve. Pure."""

from collections.abc import Callable, Collection


class Rolling:
    """Who of the engines of a rollout actor may be in an update.

    An engine's group is its place among the names, so that it is the same for the same engines. Where weights are in
    files, engines take turns here; in sessions the trainer opens one for each group.

    Args:
        num_groups: of engines; 1: there are no turns.
        names: of all engines that there are.
    """

    def __init__(self, num_groups: int, names: Callable[[], Collection[str]]) -> None:
        self._num_groups = num_groups
        self._names = names
        self._waiting: list[str] = []  # in the order in which they came
        self._at_work: set[str] = set()  # of one group
        self._group = 0
        self._had: set[str] = set()  # engines that have taken this turn of the group

    @property
    def is_on(self) -> bool:
        """Whether there is more than one group."""
        return self._num_groups > 1

    def group_of(self, engine: str, num_groups: int | None = None) -> int:
        """The group that an engine is in."""
        return sorted({*self._names(), engine}).index(engine) % (num_groups or self._num_groups)

    def wait(self, engine: str) -> None:
        """Have an engine stand in line."""
        self._waiting.append(engine)

    def take(self, engine: str) -> bool:
        """Let an engine that stands in line begin, if it may: nobody of another group is at work.

        One that had this turn of its group already, and wants newer weights, lets other groups go first.
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
        """Have an engine stand in line no more, or its turn be over."""
        if engine in self._waiting:
            self._waiting.remove(engine)
        self._at_work.discard(engine)
