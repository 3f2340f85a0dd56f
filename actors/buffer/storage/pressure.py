"""Watches how full the streams are: requests checkpoints early, and pauses issuing until there is room."""

import time
from collections.abc import Callable, Mapping
from typing import Final

import anyio
import structlog

from messages import BatchReady, BatchTrained, CheckpointRequested, Message, Plane, WeightsAnnounced, WeightsApplied
from runtime.bus.administration import StreamState
from runtime.bus.bus import Bus
from runtime.ledger.fold import LedgerState, Stage

log = structlog.get_logger()

REQUEST_ABOVE: Final = 0.7  # share of a stream's bytes at which a checkpoint is requested
HOLD_ABOVE: Final = 0.9  # share at which issuing waits
EMPTIED_BY_CHECKPOINTS: Final = (Plane.EVENT, Plane.DATA)
WATCHED: Final = (*EMPTIED_BY_CHECKPOINTS, Plane.WORK)  # the work stream empties as tasks finish
ONCE_A_STEP: Final = (BatchReady, BatchTrained, WeightsAnnounced, WeightsApplied)  # no measurement is needed after them
CHECK_INTERVAL_S: Final = 5.0
RECHECK_S: Final = 0.25  # shortest interval between two measurements; also the interval while issuing waits
CHECKPOINT_WAIT_S: Final = 60.0  # longest time that issuing waits only for a checkpoint


def fullest(used: Mapping[Plane, float]) -> tuple[Plane, float]:
    """The fullest of the streams that a checkpoint allows to trim, and the used share of its bytes."""
    plane = max(EMPTIED_BY_CHECKPOINTS, key=lambda plane: used.get(plane, 0.0))
    return plane, used.get(plane, 0.0)


def makes_room_later(state: LedgerState, *, checkpoint_requested: bool) -> bool:
    """Whether the streams will empty without further groups. If not, waiting for room would never end.

    Args:
        state: the ledger.
        checkpoint_requested: whether a checkpoint was requested within CHECKPOINT_WAIT_S.
    """
    at_work = bool(state.in_stage(Stage.IN_FLIGHT) or state.in_stage(Stage.COMPLETED))
    again = min(state.taken_back, default=None)  # a rebuilt batch needs new groups, and trains first
    to_train = any(not batch.trained and (again is None or step < again) for step, batch in state.batches.items())
    to_save = checkpoint_requested and state.checkpoint_step < state.trained_steps
    return at_work or to_train or to_save or state.evaluation is not None


class Pressure:
    """Polls the streams in the background; requests at most one checkpoint per train step.

    Args:
        bus: the bus.
        trims: returns whether the log is being trimmed, or about to be.
        recheck_s: minimum seconds between two measurements; also the interval while issuing waits.
    """

    def __init__(self, bus: Bus, trims: Callable[[], bool], *, recheck_s: float = RECHECK_S) -> None:
        self._bus = bus
        self._trims = trims
        self._recheck_s = recheck_s
        self._used: dict[Plane, float] = {}
        self._data_bytes = -1  # limit of the data stream; -1: no limit
        self._short = False  # the next groups' prompts do not fit into the data stream
        self._changed = anyio.Event()
        self._soon = anyio.Event()  # ends the interval before the next measurement
        self._grown_at = 0.0  # time of the newest event that may have come with payloads
        self._trained = 0  # train steps
        self._saved = 0
        self._requested_step = 0
        self._requested_at = -CHECKPOINT_WAIT_S
        self._holding = ""  # why issuing waits
        self._measured_at = -recheck_s  # start of the newest measurement with a result

    @property
    def holding(self) -> str:
        """Why issuing waits; empty if it does not."""
        return self._holding

    def is_high(self, plane: Plane) -> bool:
        """Whether a stream was so full at the newest measurement that a checkpoint is requested."""
        return self._used.get(plane, 0.0) > REQUEST_ABOVE

    def folded(self, event: Message, state: LedgerState) -> None:
        """Note the ledger's progress, and measure the streams soon.

        With a batch that is at once: the groups of the next round are issued after its train step, and should not wait
        for a measurement.
        """
        self._trained, self._saved = state.trained_steps, state.checkpoint_step
        if not isinstance(event, ONCE_A_STEP):
            self._grown_at = time.monotonic()
        self._changed.set()
        if isinstance(event, BatchReady):
            self._soon.set()

    async def holds(self, state: LedgerState, *, adding: int = 0) -> bool:
        """Whether issuing must wait for room.

        Args:
            state: the ledger.
            adding: bytes of prompts that issuing stores in the data stream first.
        """
        if not self._used or self._is_outdated():
            await self._measure()  # even if a background measurement runs: its result is not available yet
        over = {plane: used for plane, used in self._used.items() if used > HOLD_ABOVE}
        if await self._is_short(adding):
            over[Plane.DATA] = self._used[Plane.DATA]
        requested = time.monotonic() - self._requested_at < CHECKPOINT_WAIT_S
        full = ", ".join(f"{plane} stream {used:.0%} full" for plane, used in over.items())
        waits = bool(over) and (self._trims() or makes_room_later(state, checkpoint_requested=requested))
        before, self._holding = self._holding, full if waits else ""
        if bool(before) != bool(self._holding):
            log.warning("issuing_waits" if self._holding else "issuing_goes_on", full=full)
        return bool(self._holding)

    def _is_outdated(self) -> bool:
        age_s = time.monotonic() - self._measured_at
        has_grown = self._grown_at >= self._measured_at or age_s >= CHECK_INTERVAL_S
        return age_s >= self._recheck_s and (has_grown or bool(self._holding))

    async def _is_short(self, adding: int) -> bool:
        """Whether the data stream lacks room for these bytes; if so, request a checkpoint at any fill level."""
        before = self._short
        self._short = adding > (1 - self._used[Plane.DATA]) * self._data_bytes > 0
        if self._short and not before:
            await self._measure()
        return self._short

    async def run(self) -> None:
        """Measure the streams after events of the log, with a minimum interval, until cancelled."""
        while True:
            with anyio.move_on_after(self._recheck_s if self._holding else CHECK_INTERVAL_S):
                await self._changed.wait()
            self._changed, self._soon = anyio.Event(), anyio.Event()
            await self._measure()
            with anyio.move_on_after(self._recheck_s):
                await self._soon.wait()

    async def _measure(self) -> None:
        begun_at, held = time.monotonic(), dict[Plane, StreamState]()

        async def look(plane: Plane) -> None:
            held[plane] = await self._bus.state(plane)

        try:
            async with anyio.create_task_group() as group:
                for plane in WATCHED:
                    group.start_soon(look, plane)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # one cause fails all of them
        if begun_at < self._measured_at:
            return  # a later measurement ended first
        self._measured_at = begun_at
        self._used = {plane: stream.used for plane, stream in held.items()}
        self._data_bytes = held[Plane.DATA].max_bytes
        plane, used = (Plane.DATA, self._used[Plane.DATA]) if self._short else fullest(self._used)
        step = self._trained
        if (self._short or used > REQUEST_ABOVE) and step > max(self._requested_step, self._saved):
            self._requested_step, self._requested_at = step, time.monotonic()
            await self._bus.publish(CheckpointRequested(step=step, stream=plane, used=round(used, 3)))
            log.warning("checkpoint_requested", step=step, stream=plane, used=round(used, 3))
