"""What an engine does in a session, step by step; how it gets a bucket is in collective.py and ipc.py.

An engine's scheduler waits inside a broadcast, for half an hour at most, which cannot be set. One that the trainer
leaves before any byte fails at once; one that it leaves in the middle waits on. So an engine that is still in one when
its session is over, or the deadline is, counts as silent, and is killed.
"""

from typing import Final

import anyio
import structlog

from actors.rollout.engines.weights.collective import UpdateGroups
from actors.rollout.engines.weights.ipc import read_segments
from actors.rollout.engines.weights.session import Part
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineError, EngineFailed, EngineSilent, RequestRefused
from actors.rollout.sglang.updates import WeightUpdates
from messages import BucketSent, GroupsOffered, SessionFinished, SessionPrepared
from runtime.bus.background import beside

log = structlog.get_logger()

CLOSE_S: Final = 5.0
GRACE_S: Final = 5.0  # for an engine to notice that the trainer is gone


class Receiver:
    """Has engines take what a session brings them."""

    def __init__(self, client: SglangClient, timeout_s: float) -> None:
        """Begin nothing; an engine gets so long for each step."""
        self._client = client
        self._updates = WeightUpdates(client)
        self._timeout_s = timeout_s
        self._groups = UpdateGroups(self._updates, timeout_s)

    async def receive(self, url: str, part: Part, label: str) -> SessionFinished:
        """Take all tensors of a session. The engine stands still.

        It is given the label first: what it holds from the first bucket on is neither the old weights nor the new.

        Args:
            url: of the engine.
            part: has taken the step SessionPrepared.
            label: what the engine is to call its weights.

        Raises:
            EngineError: it did not take them, or the session is over.
        """
        await self._client.update_version(url, label)
        await self._open(url)
        try:
            came: dict[int, int] = {}  # buckets of each stage
            while not isinstance(step := await part.next(), SessionFinished):
                await self._take(url, part, step)
                if isinstance(step, BucketSent):  # once it has it: the trainer is in the same broadcast
                    _note(part, came, step)
            if sum(came.values()) != step.num_buckets:
                raise EngineFailed(
                    f"{part.engine}: got {sum(came.values())} of {step.num_buckets} buckets of session {part.session}"
                )
        except EngineError as error:
            part.fail(str(error))  # before what ends it here: the trainer may be waiting in a broadcast
            await self._close(url)
            raise
        await self._updates.end_update(url, timeout_s=self._timeout_s)
        return step

    async def _close(self, url: str) -> None:
        """End what cannot be finished; an engine that does not answer is looked at afterwards."""
        try:
            await self._updates.end_update(url, timeout_s=CLOSE_S)
        except EngineError as error:
            log.warning("weight_session_left_open", url=url, error=str(error))

    async def _open(self, url: str) -> None:
        """Begin; a session that a death has left open is closed before."""
        try:
            await self._updates.begin_update(url, timeout_s=self._timeout_s)
        except RequestRefused as error:
            log.warning("weight_session_found_open", url=url, error=str(error))
            await self._updates.end_update(url, timeout_s=self._timeout_s)
            await self._updates.begin_update(url, timeout_s=self._timeout_s)

    async def _take(self, url: str, part: Part, step: GroupsOffered | BucketSent | SessionPrepared) -> None:
        """Do a step, which may wait for the trainer.

        Raises:
            EngineSilent: the session is over, and it still waits.
        """
        with anyio.CancelScope() as scope:
            async with beside(lambda: _cut_when_over(part, scope)):
                await self._do(url, part, step)
        if scope.cancelled_caught:
            raise EngineSilent(f"{url}: still takes part in session {part.session}, which is over")

    async def _do(self, url: str, part: Part, step: GroupsOffered | BucketSent | SessionPrepared) -> None:
        match step:
            case GroupsOffered():
                await self._groups.join(url, step, step.offsets[part.engine])
            case BucketSent() if step.payloads:
                await read_segments(self._updates, url, step, step.payloads[part.engine], self._timeout_s)
            case BucketSent():
                await self._groups.take(url, step)
            case SessionPrepared():
                raise EngineFailed(f"{url}: session {part.session} was prepared twice")


def _note(part: Part, came: dict[int, int], step: BucketSent) -> None:
    """Note what came in a bucket.

    Raises:
        EngineFailed: it is not the one that was due.
    """
    due = came.get(step.stage, 0)
    if step.index != due:
        raise EngineFailed(f"{part.engine}: bucket {step.index} of stage {step.stage} came, bucket {due} was due")
    came[step.stage] = due + 1
    part.came |= dict.fromkeys(step.names, f"bucket {step.index} of stage {step.stage}")


async def _cut_when_over(part: Part, scope: anyio.CancelScope) -> None:
    await part.over.wait()
    await anyio.sleep(GRACE_S)
    scope.cancel()
