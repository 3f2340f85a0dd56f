"""Checkpoints of a running trainer: when one is due, and its publication once it is complete on disk."""

import asyncio
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import anyio
import structlog
from anyio.abc import TaskGroup

from actors.trainer.checkpoint_copies import CheckpointCopies
from actors.trainer.checkpoints import name_of
from actors.trainer.data.feed import Feed
from actors.trainer.phases.colocation import Colocation
from actors.trainer.torch_thread import TorchThread
from messages import CheckpointSaved, CheckpointSetAside
from runtime.bus.bus import Bus
from runtime.settings.tables.training import TrainConfig

if TYPE_CHECKING:
    from actors.trainer.commands import TrainerRank

log = structlog.get_logger()


class CheckpointSaves:
    """Saves checkpoints, one at a time, and publishes each once it is complete.

    Args:
        train: settings with the number of steps and the interval of checkpoints.
        bus: bus to publish on.
        feed: feed whose log may request a checkpoint.
        torch_thread: thread that runs the rank's calls.
        rank: rank 0.
        colocation: colocation with engines in the same memory.
        step: train steps of the loaded checkpoint.
        incarnation: of this trainer.
        copies: has other nodes keep copies; None: all ranks share one directory.
    """

    def __init__(
        self,
        train: TrainConfig,
        bus: Bus,
        feed: Feed,
        torch_thread: TorchThread,
        rank: "TrainerRank",
        colocation: Colocation,
        *,
        step: int,
        incarnation: int,
        copies: CheckpointCopies | None = None,
    ) -> None:
        self._copies = copies
        self._train = train
        self._bus = bus
        self._feed = feed
        self._torch_thread = torch_thread
        self._rank = rank
        self._colocation = colocation
        self._incarnation = incarnation
        self._newest_step = step  # train steps of the newest checkpoint, started or loaded
        self._published = anyio.Event()  # set once the last checkpoint is published
        self._published.set()

    def are_due(self, step: int) -> bool:
        """Whether the settings want a checkpoint after this step; train_all saves the last one."""
        interval = self._train.save_interval
        return interval is not None and step % interval == 0 and step < self._train.num_steps

    def are_requested(self, step: int) -> bool:
        """Whether the log requests a checkpoint, because a stream is filling up.

        The request waits while lost steps are trained again: they add nothing new to store.
        """
        return self._newest_step < self._feed.history.requested_step <= step

    async def begin(self, step: int, frontier: int, writing: TaskGroup) -> float:
        """Start a checkpoint after the previous one is published.

        Args:
            step: train steps that it contains.
            frontier: train steps ever done.
            writing: task group in which it is completed.

        Returns:
            Seconds for which it held the torch thread.
        """
        await self._published.wait()
        async with self._colocation.taken(step):
            began = time.perf_counter()
            written = await self._torch_thread.run(
                self._rank.begin_save, step=step, incarnation=self._incarnation, frontier=frontier
            )
            pause_s = time.perf_counter() - began
        self._newest_step = max(self._newest_step, step)
        self._published = anyio.Event()
        writing.start_soon(self._finish, step, written, began, pause_s)
        return pause_s

    async def _finish(self, step: int, written: Future[None], began: float, pause_s: float) -> None:
        """Publish checkpoint.saved once the checkpoint is complete."""
        await asyncio.wrap_future(written)
        if self._copies is not None and (files := await self._torch_thread.run(self._rank.finish_files)):
            await self._copies.spread(name_of(step=step, incarnation=self._incarnation), files)
        path, kept = await self._torch_thread.run(self._rank.finish_save)
        if self._copies is not None:
            await self._copies.forget(tuple(name_of(step=each.step, incarnation=each.incarnation) for each in kept))
        took_s = time.perf_counter() - began
        saved = CheckpointSaved(
            step=step,
            incarnation=self._incarnation,
            start=self._feed.start,
            path=str(path),
            oldest_step=kept[0].step,
            took_s=took_s,
            pause_s=pause_s,
        )
        await self._bus.publish(saved)
        await self.tell_set_aside()
        self._published.set()
        log.info("checkpoint_saved", step=step, took_s=took_s, pause_s=pause_s)

    async def tell_set_aside(self) -> None:
        """Log and publish the checkpoints that were found damaged."""
        for each in self._rank.take_set_aside():
            about: dict[str, Any] = {"step": each.step, "path": str(each.path), "reason": each.reason}
            log.warning("checkpoint_set_aside", **about)
            await self._bus.publish(CheckpointSetAside(incarnation=self._incarnation, **about))
