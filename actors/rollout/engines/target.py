"""The target weights of the engines, and whose turn it is to take them.

The target is the newest announced weights, unless an evaluation pins its own version.
"""

import math
from collections.abc import Callable, Collection

import anyio

from actors.rollout.engines.status import MemoryLevel
from messages import EvalEnded, EvalIssued, PhaseChanged, TrainerStarted, WeightsAnnounced, WeightsLost
from runtime.ledger.steps import Trainers


class TargetWeights:
    """Folds the log into the target weights.

    Between an evaluation's issue and its end, in log order, newer announcements than its weights are held back. The
    same weights, published again because engines could not read their files, do not count as newer.

    Readers of the log reach the same target regardless of when they start, except for weights given up meanwhile.
    """

    def __init__(self) -> None:
        self.newest: WeightsAnnounced | None = None  # newest weights that engines may take
        self.evaluated_step = -1  # newest step with a finished evaluation; evaluations up to it are obsolete
        self._known_version = 0
        self._trainers = Trainers()
        # in ascending order; bounded by the trainer's lead over an evaluation
        self._held_back: list[WeightsAnnounced] = []
        self._evaluated: dict[int, int] = {}  # running evaluations: step -> weight version

    def fold(self, event: TrainerStarted | WeightsAnnounced | EvalIssued | EvalEnded | WeightsLost) -> None:
        """Apply the next event. Announcements by a replaced trainer, and of known versions, are ignored.

        All rollout actors read that weights are lost, and move to the same ones.
        """
        match event:
            case TrainerStarted():
                self._trainers.begin(event)
            case WeightsAnnounced() if event.version > self._known_version and not self.is_replaced(event):
                self._known_version = event.version
                self._held_back.append(event)
            case EvalIssued():
                self._evaluated[event.step] = event.version
            case EvalEnded():
                self._evaluated.pop(event.step, None)
                self.evaluated_step = max(self.evaluated_step, event.step)
            case WeightsLost():
                self._move_on(event.version, event.newer)
            case _:
                pass
        self._let_go()

    def is_replaced(self, event: WeightsAnnounced | PhaseChanged) -> bool:
        """Whether the trainer that wrote an event has a successor."""
        return self._trainers.is_replaced(event)

    @property
    def newest_known(self) -> int:
        """The newest announced weight version, also if it is held back."""
        return self._known_version

    @property
    def holds_back(self) -> bool:
        """Whether newer weights are held back."""
        return bool(self._held_back)

    def give_up(self) -> None:
        """Move running evaluations to the newest weights: no process can supply their own version any more."""
        self._move_on(self._known_version, self._known_version)
        self._let_go()

    def _move_on(self, lost: int, newer: int) -> None:
        for step, version in self._evaluated.items():
            self._evaluated[step] = max(version, newer) if version <= lost else version

    def _let_go(self) -> None:
        limit = min(self._evaluated.values(), default=math.inf)
        while self._held_back and (self._held_back[0].again_of or self._held_back[0].version) <= limit:
            self.newest = self._held_back.pop(0)


class FleetTarget:
    """The target state of all engines of a fleet, and the router that they register at. Notifies waiters of changes."""

    def __init__(self) -> None:
        self.weights: WeightsAnnounced | None = None
        self.router: str | None = None  # URL; empty: requests go to engines directly. None: the router is not up
        self.allowed = MemoryLevel.EVERYTHING  # memory level allowed to engines that share memory with the trainer
        self.changed = anyio.Condition()
        self.num_holds = 0  # requests are blocked while this is above 0

    @property
    def version(self) -> int:
        """The target weight version; 0: none was announced yet."""
        return self.weights.version if self.weights is not None else 0

    @property
    def is_in_files(self) -> bool:
        """Whether engines read the weights from files, without a weight sync."""
        return self.weights is None or self.weights.transport == "disk"

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until a condition holds; it is checked on every `notify`."""
        async with self.changed:
            while not true():
                await self.changed.wait()

    async def announced(self) -> None:
        """Wait for the first announced weights."""
        await self.until(lambda: self.weights is not None)

    async def reached(self, version: int) -> None:
        """Wait until the target is this version or a newer one."""
        await self.until(lambda: self.version >= version)

    async def notify(self) -> None:
        """Make waiters check their conditions again."""
        async with self.changed:
            self.changed.notify_all()


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
