"""Rank 0 at work: batches from the log in, weights for the engines out.

What happens after a train step, in this order, and why: the weights are written to disk, batch.trained is published,
weights.announced is published, and then, if it is due, a checkpoint is saved and checkpoint.saved published.

- Before batch.trained is stored, nothing of the step is known outside. A crash up to there leaves files that nobody was
  told of; the step is trained again as if for the first time.
- Between batch.trained and weights.announced a crash leaves a log whose frontier (train steps ever done) lies past the
  last announcement. The next incarnation trains the lost steps again with replay = true, reaches the frontier and
  announces there. It does so even if that step was announced before: on GPUs replayed weights need not be bit-equal to
  those that engines hold, and a version costs little.
- Were the announcement first, a crash in between would leave engines that sample with weights of a step which the log
  does not know, and a buffer that counts their staleness wrongly until the step is trained again. The order costs one
  publish on the way to the engines, about 0.5 ms; all that takes long (export, checksum) is done before both.
- The checkpoint comes last, since rollout goes on meanwhile. So a checkpoint contains only steps that the log knows,
  which trainer.started relies on when it says that every batch up to its step is settled.
- A version is the highest of the log plus one. One that was written but not announced was seen by nobody, and its files
  are written over.
"""

import time
from typing import TYPE_CHECKING, Final

import structlog

from actors.trainer.batching import TrainBatch
from actors.trainer.feed import Feed
from actors.trainer.torch_thread import TorchThread
from messages import BatchReady, BatchTrained, CheckpointSaved, TrainerStarted, WeightsAnnounced
from runtime.bus import Bus
from runtime.topology import Topology

if TYPE_CHECKING:
    from actors.trainer.engine import TrainerEngine
    from actors.trainer.publish import Published

log = structlog.get_logger()

HF_DIRECTORY: Final = "hf"  # under the run directory, with train.save_hf


class Leader:
    """One incarnation of the trainer, from its loaded checkpoint to the last planned step."""

    def __init__(
        self, topology: Topology, bus: Bus, feed: Feed, torch_thread: TorchThread, engine: "TrainerEngine", step: int
    ) -> None:
        """Take over from the log as the feed has read it.

        Args:
            topology: of the run.
            bus: to publish on.
            feed: has caught up with the log.
            torch_thread: where the engine's calls run.
            engine: has loaded its checkpoint.
            step: train steps that its weights contain.
        """
        self._train = topology.train
        self._run_directory = engine.run_directory
        self._bus = bus
        self._feed = feed
        self._torch_thread = torch_thread
        self._engine = engine
        self._frontier = feed.history.frontier
        self._incarnation = feed.history.incarnation + 1
        self.step = step
        self.version = feed.history.version
        self.busy_s = 0.0  # of torch work

    async def announce_start(self) -> None:
        """Publish trainer.started; with no step to replay, also the weights."""
        self._feed.settle(self.step)
        seq = await self._bus.publish(TrainerStarted(incarnation=self._incarnation, step=self.step))
        self._feed.started(seq)
        log.info("trainer_started", incarnation=self._incarnation, step=self.step, frontier=self._frontier)
        if self.step >= self._frontier:
            await self._announce(await self._publish())

    async def train_all(self) -> None:
        """Train every planned step.

        The last checkpoint is saved and told by every incarnation that gets here: an earlier one may have died before
        it told of its own, and the run ends with that event, so after the export.
        """
        while self.step < self._train.num_steps:
            await self._train_step()
        if self._train.save_hf:
            await self._torch_thread.run(self._engine.export, self._run_directory / HF_DIRECTORY)
        await self._save()

    async def _train_step(self) -> None:
        begin = time.perf_counter()
        batch = await self._feed.batch(self.step)
        waited_s = time.perf_counter() - begin
        replay = self.step < self._frontier
        async with self._feed.prefetching(self.step + 1):
            metrics = await self._train_batch(batch)
        self.step += 1
        published = await self._publish() if self.step >= self._frontier else None
        metrics["perf/train_wait_time"] = waited_s
        metrics["perf/update_weights_time"] = published.took_s if published else 0.0
        metrics["perf/step_time"] = time.perf_counter() - begin
        ready = self._feed.history.batches[self.step - 1]
        await self._bus.publish(self._trained(ready, batch, metrics, replay=replay))
        if published is not None:
            await self._announce(published)
        self._feed.settle(self.step)
        if self._checkpoint_is_due():
            await self._save()

    async def _train_batch(self, batch: TrainBatch | None) -> dict[str, float]:
        if batch is None:
            log.warning("batch_has_no_trainable_sample", step=self.step)
            return {}
        begin = time.perf_counter()
        metrics = await self._torch_thread.run(self._engine.train, batch)
        self.busy_s += time.perf_counter() - begin
        return metrics

    def _trained(
        self, ready: BatchReady, batch: TrainBatch | None, metrics: dict[str, float], *, replay: bool
    ) -> BatchTrained:
        return BatchTrained(
            step=ready.step,
            incarnation=self._incarnation,
            replay=replay,
            num_groups=len(ready.groups),
            num_samples=0 if batch is None else len(batch.lengths_B),
            num_tokens=0 if batch is None else len(batch.tokens_N),
            metrics=metrics,
        )

    async def _publish(self) -> "Published":
        """Write the weights to disk under the next version."""
        confirmed = self._feed.history.confirmed
        self.version += 1
        published = await self._torch_thread.run(self._engine.publish, self.version, confirmed=confirmed)
        self.busy_s += published.took_s
        return published

    async def _announce(self, published: "Published") -> None:
        announced = WeightsAnnounced(
            version=self.version,
            step=self.step,
            incarnation=self._incarnation,
            path=str(published.path or ""),
            checksum=published.checksum,
            size_bytes=published.size_bytes,
            took_s=published.took_s,
        )
        await self._bus.publish(announced)
        log.info("weights_announced", weight_version=self.version, step=self.step, took_s=published.took_s)

    def _checkpoint_is_due(self) -> bool:
        interval = self._train.save_interval
        return interval is not None and self.step % interval == 0 and self.step < self._train.num_steps

    async def _save(self) -> None:
        begin = time.perf_counter()
        path, kept = await self._torch_thread.run(self._engine.save, step=self.step, incarnation=self._incarnation)
        took_s = time.perf_counter() - begin
        self.busy_s += took_s
        saved = CheckpointSaved(
            step=self.step,
            incarnation=self._incarnation,
            path=str(path),
            oldest_step=kept[0].step,
            took_s=took_s,
        )
        await self._bus.publish(saved)
        log.info("checkpoint_saved", step=self.step, took_s=took_s)
