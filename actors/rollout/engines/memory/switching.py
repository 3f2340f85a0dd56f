"""Releases and resumes one engine's GPU memory, and updates its state accordingly."""

from collections.abc import Awaitable, Callable

from actors.rollout.engines.memory.levels import MemoryLevel
from actors.rollout.engines.memory.share import MemoryReclaimed, MemoryShare
from actors.rollout.engines.states import Trigger
from actors.rollout.engines.target import FleetTarget
from actors.rollout.sglang.errors import EngineError, EngineUnavailable
from messages import EngineState

LOST = (EngineState.GONE, EngineState.SUSPECT)


class MemorySwitch:
    """Brings an engine to the memory level that the fleet's target allows.

    Args:
        url: of the engine.
        memory_share: its memory.
        target: the allowed memory level; notifies waiters of changes.
        state: returns the engine's state.
        apply: called with each trigger and its reason.
        emptied: called when the engine's weights are gone.
    """

    def __init__(
        self,
        url: str,
        memory_share: MemoryShare,
        target: FleetTarget,
        *,
        state: Callable[[], EngineState],
        apply: Callable[[Trigger, str], None],
        emptied: Callable[[], None],
    ) -> None:
        self._url = url
        self._memory_share = memory_share
        self._target = target
        self._state = state
        self._apply = apply
        self._emptied = emptied

    @property
    def is_over(self) -> bool:
        """Whether the engine has to release its memory."""
        return self._target.allowed is MemoryLevel.NOTHING and self._memory_share.room is not MemoryLevel.NOTHING

    async def inherit(self) -> None:
        """Restore the memory state from before the engine was lost, or from an earlier rollout actor.

        Raises:
            EngineUnavailable: the state is unknown.
        """
        await self._memory_share.inherit()
        if not self._memory_share.is_sure:
            reason = "its memory level is unknown: a call to release or resume memory was not answered"
            self._apply(Trigger.STALLED, reason)
            raise EngineUnavailable(f"{self._url}: {reason}")
        if self._memory_share.room is MemoryLevel.NOTHING and self._state() is EngineState.STARTING:
            self._apply(Trigger.RELEASED, "its memory was released to the trainer")
        await self._target.notify()

    async def take(self) -> None:
        """Release memory while it belongs to the trainer; resume memory for weights as soon as that is allowed."""
        while self._target.allowed < MemoryLevel.LOADED or self._memory_share.room is MemoryLevel.NOTHING:
            allowed = self._target.allowed
            if self.is_over:
                await self.give_back()
            elif allowed is not MemoryLevel.NOTHING and self._memory_share.room is MemoryLevel.NOTHING:
                await self._moved(self._memory_share.take_weights)
                self._apply(Trigger.RESUMED, "it has memory for weights")
                await self._target.notify()
            else:
                await self._target.until(lambda seen=allowed: self._target.allowed is not seen)

    async def give_back(self) -> None:
        """Make the engine release all memory that it shares with the trainer.

        Raises:
            EngineError: the engine did not release it.
        """
        await self._moved(self._memory_share.give_back)
        self._emptied()
        self._apply(Trigger.RELEASED, "its memory was released to the trainer")
        await self._target.notify()

    async def take_rest(self) -> None:
        """Wait until the engine may have all memory, and resume it.

        Raises:
            MemoryReclaimed: the trainer reclaims the memory that it already holds.
        """
        await self._target.until(lambda: self._target.is_settled)
        if self._target.allowed is MemoryLevel.NOTHING:
            raise MemoryReclaimed
        await self._moved(self._memory_share.take_rest)

    async def _moved(self, move: Callable[[], Awaitable[None]]) -> None:
        """Release or resume memory. If the outcome is unknown, mark the engine for a kill.

        Raises:
            EngineError: the call failed, or the engine was lost meanwhile (noticed by its requests).
        """
        try:
            await move()
        except EngineError as error:
            if self._state() not in LOST:
                known = self._memory_share.is_sure
                self._apply(
                    Trigger.LOST if known else Trigger.STALLED, f"its memory was not released or resumed: {error}"
                )
            raise
        if self._state() in LOST:
            raise EngineUnavailable(f"{self._url}: lost while its memory was released or resumed")
