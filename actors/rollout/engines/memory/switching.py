"""Releases and resumes one engine's GPU memory, and updates its state accordingly."""

from collections.abc import Awaitable, Callable

from actors.rollout.engines.memory.levels import Stage
from actors.rollout.engines.memory.share import Tenure, TurnLost
from actors.rollout.engines.states import Happening
from actors.rollout.engines.target import FleetTarget
from actors.rollout.sglang.errors import EngineError, EngineUnavailable
from messages import EngineState

LOST = (EngineState.GONE, EngineState.SUSPECT)


class Turn:
    """Brings an engine to the memory level that the fleet's target allows.

    Args:
        url: of the engine.
        tenure: its memory.
        target: the allowed memory level; notifies waiters of changes.
        state: returns the engine's state.
        happened: called with each trigger and its reason.
        emptied: called when the engine's weights are gone.
    """

    def __init__(
        self,
        url: str,
        tenure: Tenure,
        target: FleetTarget,
        *,
        state: Callable[[], EngineState],
        happened: Callable[[Happening, str], None],
        emptied: Callable[[], None],
    ) -> None:
        self._url = url
        self._tenure = tenure
        self._target = target
        self._state = state
        self._happened = happened
        self._emptied = emptied

    @property
    def is_over(self) -> bool:
        """Whether the engine has to release its memory."""
        return self._target.allowed is Stage.NOTHING and self._tenure.room is not Stage.NOTHING

    async def inherit(self) -> None:
        """Restore the memory state from before the engine was lost, or from an earlier rollout actor.

        Raises:
            EngineUnavailable: the state is unknown.
        """
        await self._tenure.inherit()
        if not self._tenure.is_sure:
            reason = "nobody knows what memory it has: who told it had no answer"
            self._happened(Happening.STALLED, reason)
            raise EngineUnavailable(f"{self._url}: {reason}")
        if self._tenure.room is Stage.NOTHING and self._state() is EngineState.STARTING:
            self._happened(Happening.RELEASED, "its memory is the trainer's")
        await self._target.notify()

    async def take(self) -> None:
        """Release memory while it belongs to the trainer; resume memory for weights as soon as that is allowed."""
        while self._target.allowed < Stage.LOADED or self._tenure.room is Stage.NOTHING:
            allowed = self._target.allowed
            if self.is_over:
                await self.give_back()
            elif allowed is not Stage.NOTHING and self._tenure.room is Stage.NOTHING:
                await self._moved(self._tenure.take_weights)
                self._happened(Happening.RESUMED, "it has room for weights")
                await self._target.notify()
            else:
                await self._target.until(lambda seen=allowed: self._target.allowed is not seen)

    async def give_back(self) -> None:
        """Make the engine release all memory that it shares with the trainer.

        Raises:
            EngineError: it did not.
        """
        await self._moved(self._tenure.give_back)
        self._emptied()
        self._happened(Happening.RELEASED, "its memory is the trainer's")
        await self._target.notify()

    async def take_rest(self) -> None:
        """Wait until the engine may have all memory, and resume it.

        Raises:
            TurnLost: the trainer reclaims the memory that it already holds.
        """
        await self._target.until(lambda: self._target.is_settled)
        if self._target.allowed is Stage.NOTHING:
            raise TurnLost
        await self._moved(self._tenure.take_rest)

    async def _moved(self, move: Callable[[], Awaitable[None]]) -> None:
        """Release or resume memory. If the outcome is unknown, mark the engine for a kill.

        Raises:
            EngineError: the call failed, or the engine was lost meanwhile (noticed by its requests).
        """
        try:
            await move()
        except EngineError as error:
            if self._state() not in LOST:
                known = self._tenure.is_sure
                self._happened(Happening.LOST if known else Happening.STALLED, f"its memory was not moved: {error}")
            raise
        if self._state() in LOST:
            raise EngineUnavailable(f"{self._url}: lost while its memory was moved")
