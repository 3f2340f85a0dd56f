"""The weights that engines are to hold: the newest that were announced, unless an evaluation holds on to its own.

A fold of the log: whoever reads it from the start, at once or over time, has the same target at its end.
"""

import math

from messages import EvalEnded, EvalIssued, WeightsAnnounced


class TargetWeights:
    """Between an evaluation's issue and its end, in log order, announcements newer than its weights are held back."""

    def __init__(self) -> None:
        self.newest: WeightsAnnounced | None = None  # of those that engines may take
        self.evaluated_step = -1  # the newest step whose evaluation has ended: of none up to it anything is wanted
        self._known_version = 0
        self._held_back: list[WeightsAnnounced] = []  # rising; as many as trainers get ahead of an evaluation
        self._evaluated: dict[int, int] = {}  # step of an evaluation that runs -> its weight version

    def fold(self, event: WeightsAnnounced | EvalIssued | EvalEnded) -> None:
        """Take the next event. A replaced trainer's last word, of older weights than are known, is ignored."""
        match event:
            case WeightsAnnounced(version=version) if version > self._known_version:
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

    def _let_go(self) -> None:
        limit = min(self._evaluated.values(), default=math.inf)
        while self._held_back and self._held_back[0].version <= limit:
            self.newest = self._held_back.pop(0)
