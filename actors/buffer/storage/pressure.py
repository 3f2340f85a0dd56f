"""How full the streams are: a checkpoint is asked for before they are full, and issuing waits for room."""

import time
from collections.abc import Callable, Mapping
from typing import Final

import anyio
import structlog

from messages import CheckpointRequested, Plane
from runtime.bus.bus import Bus
from runtime.ledger.fold import LedgerState, Stage

log = structlog.get_logger()

ASK_ABOVE: Final = 0.7  # of a stream's bytes
HOLD_ABOVE: Final = 0.9
EMPTIED_BY_CHECKPOINTS: Final = (Plane.EVENT, Plane.DATA)
WATCHED: Final = (*EMPTIED_BY_CHECKPOINTS, Plane.WORK)  # the last one empties as work is done
LOOK_EVERY_S: Final = 5.0
LOOK_AGAIN_S: Final = 0.25  # at most so often, and while issuing waits
CHECKPOINT_WAIT_S: Final = 60.0  # issuing waits no longer for a checkpoint alone


def fullest(used: Mapping[Plane, float]) -> tuple[Plane, float]:
    """The stream that a checkpoint empties with the largest share of its bytes taken, and that share."""
    plane = max(EMPTIED_BY_CHECKPOINTS, key=lambda plane: used.get(plane, 0.0))
    return plane, used.get(plane, 0.0)


def makes_room_later(state: LedgerState, *, checkpoint_asked: bool) -> bool:
    """Whether the streams will empty without another group: if not, to wait for room would be to wait for ever.

    Args:
        checkpoint_asked: the trainer was asked for one not long ago.
    """
    at_work = any(group.stage in (Stage.IN_FLIGHT, Stage.COMPLETED) for group in state.groups.values())
    again = min(state.taken_back, default=None)  # this batch is made of groups yet to be issued, and trained first
    to_train = any(not batch.trained and (again is None or step < again) for step, batch in state.batches.items())
    to_save = checkpoint_asked and state.checkpoint_step < state.trained_steps
    return at_work or to_train or to_save or state.evaluation is not None


class Pressure:
    """Looks at the streams in the background; asks for checkpoints, once per train step.

    Args:
        trims: whether the log is being trimmed, or about to be.
    """

    def __init__(self, bus: Bus, trims: Callable[[], bool]) -> None:
        self._bus = bus
        self._trims = trims
        self._used: dict[Plane, float] = {}
        self._data_bytes = -1  # the limit of the data stream; -1: none
        self._short = False  # what is to be issued does not fit into it
        self._stirred = anyio.Event()
        self._trained = 0  # steps
        self._saved = 0
        self._asked_step = 0
        self._asked_at = -CHECKPOINT_WAIT_S
        self._holding = ""  # why
        self._looked_at = -LOOK_AGAIN_S

    @property
    def holding(self) -> str:
        """Why issuing waits; empty if it does not."""
        return self._holding

    def folded(self, state: LedgerState) -> None:
        """The log has gone on: look again soon."""
        self._trained, self._saved = state.trained_steps, state.checkpoint_step
        self._stirred.set()

    async def holds(self, state: LedgerState, *, adding: int = 0) -> bool:
        """Whether issuing is to wait for room now.

        Args:
            adding: bytes that issuing puts into the data stream before anything else.
        """
        if not self._used or time.monotonic() - self._looked_at >= LOOK_AGAIN_S:
            await self._look()  # also beside one begun in the background: nothing is known before it has ended
        over = {plane: used for plane, used in self._used.items() if used > HOLD_ABOVE}
        if await self._is_short(adding):
            over[Plane.DATA] = self._used[Plane.DATA]
        asked = time.monotonic() - self._asked_at < CHECKPOINT_WAIT_S
        full = ", ".join(f"{plane} stream {used:.0%} full" for plane, used in over.items())
        waits = bool(over) and (self._trims() or makes_room_later(state, checkpoint_asked=asked))
        before, self._holding = self._holding, full if waits else ""
        if bool(before) != bool(self._holding):
            log.warning("issuing_waits" if self._holding else "issuing_goes_on", full=full)
        return bool(self._holding)

    async def _is_short(self, adding: int) -> bool:
        """Whether the data stream has no room for so much; then a checkpoint is asked for, however full it is."""
        before = self._short
        self._short = adding > (1 - self._used[Plane.DATA]) * self._data_bytes > 0
        if self._short and not before:
            await self._look()
        return self._short

    async def run(self) -> None:
        """Look after each event of the log, but not all the time, until cancelled."""
        while True:
            with anyio.move_on_after(LOOK_AGAIN_S if self._holding else LOOK_EVERY_S):
                await self._stirred.wait()
            self._stirred = anyio.Event()
            await self._look()
            await anyio.sleep(LOOK_AGAIN_S)

    async def _look(self) -> None:
        self._looked_at = time.monotonic()
        held = {plane: await self._bus.state(plane) for plane in WATCHED}
        self._used = {plane: stream.used for plane, stream in held.items()}
        self._data_bytes = held[Plane.DATA].max_bytes
        plane, used = (Plane.DATA, self._used[Plane.DATA]) if self._short else fullest(self._used)
        step = self._trained
        if (self._short or used > ASK_ABOVE) and step > max(self._asked_step, self._saved):
            self._asked_step, self._asked_at = step, time.monotonic()
            await self._bus.publish(CheckpointRequested(step=step, stream=plane, used=round(used, 3)))
            log.warning("checkpoint_requested", step=step, stream=plane, used=round(used, 3))
