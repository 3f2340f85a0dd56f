"""The weights that engines are to hold: the newest that were announced, unless an evaluation holds on to its own."""

import math
from collections.abc import Callable

import anyio

from actors.rollout.engines.turns.stages import Stage
from messages import EvalEnded, EvalIssued, TrainerStarted, WeightsAnnounced


class TargetWeights:
    """Between an evaluation's issue and its end, in log order, announcements newer than its weights are held back.

    The same weights, published again since engines could not use their files, are not newer.

    A fold of the log: whoever reads it from the start, at once or over time, has the same target at its end, but for
    weights that were given up meanwhile.
    """

    def __init__(self) -> None:
        self.newest: WeightsAnnounced | None = None  # of those that engines may take
        self.evaluated_step = -1  # the newest step whose evaluation has ended: of none up to it anything is wanted
        self._known_version = 0
        self._incarnation = 0  # of the trainer that started last
        self._held_back: list[WeightsAnnounced] = []  # rising; as many as trainers get ahead of an evaluation
        self._evaluated: dict[int, int] = {}  # step of an evaluation that runs -> its weight version

    def fold(self, event: TrainerStarted | WeightsAnnounced | EvalIssued | EvalEnded) -> None:
        """Take the next event. What a replaced trainer announces, and versions that are known, are ignored."""
        match event:
            case TrainerStarted():
                self._incarnation = max(self._incarnation, event.incarnation)
            case WeightsAnnounced(version=version, incarnation=incarnation) if (
                version > self._known_version and incarnation >= self._incarnation
            ):
                self._known_version = version
                self._held_back.append(event)
            case EvalIssued():
                self._evaluated[event.step] = event.version
            case EvalEnded():
                self._evaluated.pop(event.step, None)
                self.evaluated_step = max(self.evaluated_step, event.step)
            case _:
                pass
        self._let_go()

    @property
    def holds_back(self) -> bool:
        """Whether there are newer weights than engines may take."""
        return bool(self._held_back)

    def give_up(self) -> None:
        """Have evaluations that run hold on to the newest weights of now: nobody can bring their own any more."""
        for step, version in self._evaluated.items():
            self._evaluated[step] = max(version, self._known_version)
        self._let_go()

    def _let_go(self) -> None:
        limit = min(self._evaluated.values(), default=math.inf)
        while self._held_back and (self._held_back[0].again_of or self._held_back[0].version) <= limit:
            self.newest = self._held_back.pop(0)


class FleetTarget:
    """What all engines of a fleet are to hold, and the router that is to know them; who waits is told of changes."""

    def __init__(self) -> None:
        self.weights: WeightsAnnounced | None = None
        self.router: str | None = None  # its URL; None: it is not up
        self.allowed = Stage.EVERYTHING  # what an engine may have, where engines and trainer share memory
        self.changed = anyio.Condition()
        self.num_holds = 0  # while there are any no request is sent

    @property
    def version(self) -> int:
        """The version that the engines are to hold; 0: none was announced yet."""
        return self.weights.version if self.weights is not None else 0

    @property
    def is_in_files(self) -> bool:
        """Whether engines read the weights by themselves."""
        return self.weights is None or self.weights.transport == "disk"

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until something holds; it is looked at on every `notify`."""
        async with self.changed:
            while not true():
                await self.changed.wait()

    @property
    def is_settled(self) -> bool:
        """Whether engines may have all memory or none, not something in between."""
        return self.allowed in (Stage.NOTHING, Stage.EVERYTHING)

    async def announced(self) -> None:
        """Wait until weights were announced."""
        await self.until(lambda: self.weights is not None)

    async def reached(self, version: int) -> None:
        """Wait until that version, or a newer one, is the target."""
        await self.until(lambda: self.version >= version)

    async def notify(self) -> None:
        """Let the waiting look again."""
        async with self.changed:
            self.changed.notify_all()
