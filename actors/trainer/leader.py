"""Trainer leader (rank 0): trains batches from the log and publishes weights for the engines.

After a train step the leader acts in this order. It writes the weights to disk. It publishes batch.trained, then
pairs.evaluated if held-out preference pairs are due, then weights.announced. If a checkpoint is due, it saves one and
publishes checkpoint.saved. The reasons:

- Before batch.trained is stored, no other process knows of the step. A crash before that leaves files that were never
  announced. The step is then trained again as if for the first time.
- A crash between batch.trained and weights.announced leaves a log whose frontier (train steps ever done) is past the
  last announcement. The next incarnation trains the lost steps again with replay = true and announces at the frontier.
  It announces even if that step was announced before: on GPUs, replayed weights need not be bit-equal to those of the
  engines. An extra version costs little.
- With the reverse order, a crash in between would leave engines that sample with weights of a step unknown to the log.
  The buffer would count their staleness wrongly until the step is trained again. The chosen order delays the engines by
  one publish, about 0.5 ms. The slow work (export, checksum) is done before both.
- With async export (trainer.weight_export = "async"), the leader copies the weights and training continues. The copy is
  written and announced while later steps train. The next version waits for that. A crash in between has the same effect
  as above.
- With a `weight_transport` other than files, the announcement carries only the version's probe. A weight sync then
  sends the weights (weights/syncs.py), and training waits for it. After a crash in between, the next incarnation
  announces a newer version at the frontier. Until then engines take no weights.
- With both, the copy is gathered while later steps train, then announced and sent in a weight sync. On the CPU the
  weight sync also runs concurrently with training (weights/rank.py). The next version waits for its end. The copy is
  kept for engines that join late.
- The checkpoint comes last because rollout continues meanwhile. A checkpoint therefore contains only steps that the log
  knows. trainer.started relies on this: it settles every batch up to its step. The checkpoint is written while training
  continues (megatron/saving.py). checkpoint.saved is published once it is complete on disk, possibly some steps later.
  Only then does the ledger forget the batches that it contains. The next checkpoint waits for that.
- Payloads of a batch may be lost. If the step was never trained, the trainer reports them (payloads.missing) and the
  ledger makes that batch again. If the step was trained before a crash, the trainer trains the remaining groups and
  reports the number of missing ones. The ledger has settled those groups and does not generate them again.
- A new version is the log's highest version plus one. Files of a version that was never announced are overwritten.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING

import anyio
import structlog

from actors.trainer.checkpoint_copies import copies_of
from actors.trainer.checkpoint_saves import CheckpointSaves
from actors.trainer.data.feed import FedBatch, Feed
from actors.trainer.data.held_out import HeldOut, held_out_metrics
from actors.trainer.data.skipped import NO_GRADIENTS, gradients_of
from actors.trainer.log_prob_precomputer import LogProbPrecomputer
from actors.trainer.phases.colocation import Colocation
from actors.trainer.republishing import MAX_TIMES, Republishing, WeightsUnusable
from actors.trainer.torch_thread import TorchThread
from actors.trainer.weights.syncs import WeightSessions
from messages import (
    BatchTrained,
    PairsEvaluated,
    PayloadsMissing,
    TrainerStarted,
    WeightsAnnounced,
)
from runtime.bus.background import in_background
from runtime.bus.bus import Bus
from runtime.process.actor import InputError
from runtime.settings.topology import EXPORT_DIRECTORY, Topology, answers_are_recorded, serves_adapters

if TYPE_CHECKING:
    from actors.trainer.commands import TrainerRank, Unpublished
    from actors.trainer.step.train_step import Trained
    from actors.trainer.weights.publish import Published

log = structlog.get_logger()

NO_PROBE = "the rollout actor reads samples from files: no engine loads the weights"


class Leader:
    """One incarnation of the trainer, from its loaded checkpoint to the last planned step."""

    def __init__(
        self,
        topology: Topology,
        bus: Bus,
        feed: Feed,
        torch_thread: TorchThread,
        rank: "TrainerRank",
        step: int,
        colocation: Colocation,
        held_out: HeldOut,
    ) -> None:
        """Continue from the state of the log.

        Args:
            topology: topology of the run.
            bus: bus to publish on.
            feed: feed that has caught up with the log.
            torch_thread: thread that runs the rank's calls.
            rank: rank 0, with its checkpoint loaded.
            step: train steps in the loaded weights.
            colocation: colocation with engines in the same memory; does nothing if they have separate memory.
            held_out: evaluation sets of preference pairs.

        Raises:
            InputError: the log no longer holds a batch that has to be trained again.
        """
        self._train = topology.train
        copies = topology.trainer.weight_export == "async" and not answers_are_recorded(topology)
        self._copies = copies and not serves_adapters(topology)  # an adapter is written in a moment
        self._run_directory = rank.run_directory
        self._bus = bus
        self._feed = feed
        self._torch_thread = torch_thread
        self._rank = rank
        rank.prompt_ids = lambda: feed.history.for_probe
        self._colocation = colocation
        self._held_out = held_out
        self._precomputer = LogProbPrecomputer(topology, feed, torch_thread, rank)
        incarnation = feed.history.incarnation + 1
        self.sessions = WeightSessions(topology, bus, torch_thread, rank, incarnation=incarnation, wake=feed.tell)
        colocation.load_by(self.sessions.bring, self.serve)
        self._frontier = feed.history.frontier
        self._incarnation = incarnation
        self._saves = CheckpointSaves(
            topology.train,
            bus,
            feed,
            torch_thread,
            rank,
            colocation,
            step=step,
            incarnation=incarnation,
            copies=copies_of(topology, bus),
        )
        self._announced = anyio.Event()  # set once the last version is announced
        self._announced.set()
        self._republishing = Republishing()
        self._waiting: tuple[str, float] | None = None  # what for, and since which monotonic time
        self.step = step
        self.version = feed.history.version
        self.busy_s = 0.0  # seconds of torch work
        self._fetch_s = 0.0  # seconds to fetch the last batch's payloads and lay them out
        self._check_batches()

    def _gone(self) -> list[int]:
        """Steps to be trained again whose batches the log has forgotten. Waiting for them would never end."""
        return [step for step in range(self.step, self._frontier) if step not in self._feed.history.batches]

    def _check_batches(self) -> None:
        """Raise InputError if the log has forgotten a batch that must be trained again."""
        if gone := self._gone():
            aside = "".join(f"; {each.path} is damaged: {each.reason}" for each in self._rank.take_set_aside())
            raise InputError(
                f"the newest checkpoint in {self._run_directory} contains {self.step} train steps, but the log no "
                f"longer has the batch of step {gone[0] + 1}, which a later checkpoint contained: restore that "
                f"checkpoint, or start over with --fresh{aside}"
            )

    def waits_for(self) -> str:
        """Describe what the leader waits for; empty while it trains."""
        if engines := self.sessions.waits_for():
            return f"engines to take weights: {engines}"
        if self._waiting is None:
            return ""
        what, since = self._waiting
        return f"{what}, for {time.monotonic() - since:.0f} s"

    async def announce_start(self) -> None:
        """Publish trainer.started. If there is no step to replay, also publish the weights.

        Raises:
            Fenced: another trainer replaced this one.
            RuntimeError: the replaced trainer saved a checkpoint meanwhile; the next start loads it.
        """
        self._feed.settle(self.step)
        started = TrainerStarted(incarnation=self._incarnation, step=self.step, start=self._feed.start)
        await self._feed.started(started, await self._bus.publish(started))
        self._frontier, self.version = self._feed.history.frontier, self._feed.history.version
        if gone := self._gone():
            raise RuntimeError(f"the replaced trainer saved a checkpoint with step {gone[0]} while this one started")
        log.info("trainer_started", incarnation=self._incarnation, step=self.step, frontier=self._frontier)
        await self._saves.tell_set_aside()
        if self.step >= self._frontier:
            await self._announce(await self._publish())

    async def train_all(self) -> None:
        """Train every planned step.

        Every incarnation that gets here saves the last checkpoint and publishes checkpoint.saved. An earlier
        incarnation may have died before it published its own. This event ends the run, so the export comes before it.
        """
        serving = in_background(self.serve) if self.sessions.sends_in_background else nullcontext()
        async with anyio.create_task_group() as self._writing, serving:
            if self.step == 0:
                await self._evaluate()
            while self.step < self._train.num_steps:
                await self._train_step()
            await self._announced.wait()
            async with self._colocation.taken(self.step):  # the export reads the critic's weights
                if self._train.save_hf:
                    await self._torch_thread.run(self._rank.export, self._run_directory / EXPORT_DIRECTORY)
                await self._save()
        self._waiting = "nothing: all steps are trained", time.monotonic()

    async def serve(self) -> None:
        """Sync the newest weights to late engines, and republish weights whose files they cannot use. Never returns."""
        while True:
            await self._feed.until(lambda: self.sessions.is_requested or self._is_out_of_reach)
            if self._is_out_of_reach:
                await self._publish_again()
            else:
                await self.sessions.bring()

    async def _train_step(self) -> None:
        begin = time.perf_counter()
        fed, precompute_metrics = self._precomputer.put_into(await self._next_batch())
        self._feed.release(fed.refs)
        waited_s = time.perf_counter() - begin - self._fetch_s
        replay = self.step < self._frontier
        await self._colocation.take(self.step)
        async with self._feed.prefetching(self.step + 1):
            trained = await self._train_batch(fed)
        self.step += 1
        published, finish, trained_at = None, None, time.perf_counter()
        if self.step >= self._frontier:
            if self.sessions.keeps:
                finish = partial(self._hand_over, await self._copy(), self.step)
            elif self._copies:
                finish = partial(self._finish_publish, await self._begin_publish(), self.step)
            else:
                published = await self._publish()
        metrics = (trained.metrics if trained else {}) | precompute_metrics
        metrics["perf/train_wait_time"], metrics["perf/fetch_time"] = waited_s, self._fetch_s
        now = time.perf_counter()
        metrics["perf/update_weights_time"], metrics["perf/step_time"] = now - trained_at, now - begin
        await self._bus.publish(self._trained_event(fed, trained, metrics, replay=replay))
        await self._evaluate()
        saves = self._saves.are_due(self.step)
        if saves and self._colocation.is_on:  # before the trainer's state is offloaded
            await self._save()
        if published is not None:
            await self._announce(published)
        if finish is not None:
            self._writing.start_soon(finish)
        self._feed.settle(self.step)
        self._precomputer.weights_moved()
        if saves and not self._colocation.is_on:
            await self._save()

    async def _evaluate(self) -> None:
        """Evaluate held-out pairs that are due. Does nothing while lost steps are trained again.

        The evaluation of a step is published before a checkpoint of it begins and before the next step is trained.
        So that of a step before the frontier, or of a loaded checkpoint, is in the log.
        """
        due = self._held_out.due(self.step) if self.step >= self._frontier else []
        if not due:
            return
        begin, metrics = time.perf_counter(), dict[str, float]()
        for name in due:
            batches = self._held_out.batches(name, self.step)
            found = [await self._torch_thread.run(self._rank.evaluate, batch) for batch in batches]
            metrics |= held_out_metrics(name, found)
        took_s = time.perf_counter() - begin
        self.busy_s += took_s
        evaluated = PairsEvaluated(step=self.step, incarnation=self._incarnation, metrics=metrics, took_s=took_s)
        await self._bus.publish(evaluated)

    async def _next_batch(self) -> FedBatch:
        """Wait for the batch of this step.

        Meanwhile save requested checkpoints, sync or republish weights, and precompute log-probs. A batch with lost
        payloads is returned only if the ledger has settled it; otherwise they are reported and the new batch is
        awaited.
        """
        history, again = self._feed.history, ""
        while True:
            self._waiting = f"batch {self.step}{again}", time.monotonic()
            await self._feed.until(
                lambda: self.step in history.batches or self._due() is not None or self._precomputer.has_work()
            )
            self._waiting = None
            if (due := self._due()) is not None:
                await due()
                continue
            if self.step not in history.batches:
                self.busy_s += await self._precomputer.compute_one(self.step)
                continue
            begin = time.perf_counter()
            fed = await self._feed.batch(self.step)
            self._fetch_s = time.perf_counter() - begin
            if not fed.lost:
                return fed
            log.warning("payloads_missing", step=self.step, num_groups=len(fed.lost), reason=fed.reason)
            if self.step < self._frontier or self.step in history.trained:  # by a trainer of an older version meanwhile
                return fed
            seq = await self._bus.publish(
                PayloadsMissing(
                    step=self.step,
                    incarnation=self._incarnation,
                    start=self._feed.start,
                    groups=fed.lost,
                    reason=fed.reason,
                )
            )
            await self._feed.until(lambda seq=seq: history.last_seq >= seq)
            again = ", which is assembled again because some of its payloads are lost"

    def _due(self) -> Callable[[], Awaitable[None]] | None:
        """What has to be done before the next train step, whether its batch is there or not."""
        if self._is_out_of_reach:
            return self._publish_again
        if self.sessions.is_requested and not self.sessions.sends_in_background:
            return self.sessions.bring
        return self._save if self._saves.are_requested(self.step) else None

    async def _train_batch(self, fed: FedBatch) -> "Trained | None":
        if fed.batch is None:
            log.warning("batch_has_no_trainable_sample", step=self.step)
            return None
        begin = time.perf_counter()
        if not self.sessions.keeps:
            self.sessions.weights_are(0)
        trained = await self._torch_thread.run(self._rank.train, fed.batch)
        self.busy_s += time.perf_counter() - begin
        return trained

    def _trained_event(
        self, fed: FedBatch, trained: "Trained | None", metrics: dict[str, float], *, replay: bool
    ) -> BatchTrained:
        gradients = gradients_of(fed.batch, trained.without_gradient) if fed.batch and trained else NO_GRADIENTS
        metrics["train/num_lost_groups"] = len(fed.lost)
        metrics["train/num_untrained_samples"] = sum(len(item.samples) for item in gradients.skipped_samples)
        return BatchTrained(
            step=fed.step,
            incarnation=self._incarnation,
            start=self._feed.start,
            replay=replay,
            num_groups=len(fed.refs) - len(fed.lost) - len(gradients.skipped_groups),
            num_samples=gradients.num_samples,
            num_tokens=gradients.num_tokens,
            metrics=metrics,
            untrained=gradients.skipped_samples,
            skipped_groups=gradients.skipped_groups,
        )

    @property
    def _is_out_of_reach(self) -> bool:
        """Whether engines cannot use the newest version's files, so that generation would stop."""
        return self._announced.is_set() and self._republishing.is_wanted(self._feed.history)

    async def _publish_again(self) -> None:
        """Publish the newest weights again, in full and under the next version.

        Raises:
            WeightsUnusable: the same weights were already republished MAX_TIMES times.
        """
        republishing, reason = self._republishing, self._feed.history.refusal
        if republishing.times >= MAX_TIMES:
            raise WeightsUnusable(
                f"the weights of step {self.step} were published {1 + republishing.times} times in "
                f"{self._run_directory}, but engines could not use any of these versions: {reason}"
            )
        log.warning("weights_published_again", weight_version=self.version, reason=reason)
        with anyio.CancelScope(shield=True):  # the colocation phase may end meanwhile
            await self._announce(await self._publish(whole=True), again=True)

    @property
    def _must_be_whole(self) -> bool:
        return self._republishing.must_be_whole(self._feed.history)

    async def _publish(self, *, whole: bool = False) -> "Published":
        """Create the next version: write it to disk if engines read files, otherwise only probe it."""
        confirmed, whole = self._feed.history.confirmed, whole or self._must_be_whole
        self.version += 1
        if self.sessions.keeps:
            published = await self._torch_thread.run(self._rank.copy_unwritten, self.version)
            await self.sessions.keep()
        elif self.sessions.are_needed:
            published = await self._torch_thread.run(self._rank.unwritten)
        else:
            published = await self._torch_thread.run(self._rank.publish, self.version, confirmed=confirmed, whole=whole)
        self.busy_s += published.took_s
        return published

    async def _begin_version(self) -> None:
        """Begin the next version, after the previous version is announced and synced."""
        await self._announced.wait()
        self._announced = anyio.Event()
        self.version += 1

    async def _begin_publish(self) -> "Unpublished":
        """Copy the weights for the next version."""
        await self._begin_version()
        begun = await self._torch_thread.run(self._rank.begin_publish, self.version, whole=self._must_be_whole)
        self.busy_s += begun.pause_s
        return begun

    async def _finish_publish(self, begun: "Unpublished", step: int) -> None:
        """Write a copy as a version, then announce it. Buckets and train steps alternate on the torch thread."""
        has_more = True
        while has_more:
            has_more, writing = await self._torch_thread.run(self._rank.advance_publish)
            if writing is not None:
                with suppress(OSError):  # finish_publish reports it
                    await asyncio.wrap_future(writing)
        confirmed = self._feed.history.confirmed
        await self._announce(await self._torch_thread.run(self._rank.finish_publish, begun, confirmed=confirmed), step)
        self._announced.set()
        await self._feed.tell()  # engines may have refused it already

    async def _copy(self) -> "Published":
        """Copy the weights for the next version, to gather them later."""
        await self._begin_version()
        copied = await self._torch_thread.run(self._rank.copy_unwritten, self.version)
        self.busy_s += copied.took_s
        return copied

    async def _hand_over(self, copied: "Published", step: int) -> None:
        """Gather a copy, then announce it and sync it to engines. Gathering and train steps alternate."""
        while await self._torch_thread.run(self._rank.sending.advance_copy):
            pass
        await self.sessions.keep()
        await self._announce(copied, step)
        self._announced.set()

    async def _announce(self, published: "Published", step: int | None = None, *, again: bool = False) -> None:
        step = self.step if step is None else step
        if published.path is not None:
            self._republishing.announced(self.version, again=again, is_whole=not published.base_version)
        announced = WeightsAnnounced(
            version=self.version,
            step=step,
            incarnation=self._incarnation,
            start=self._feed.start,
            path=str(published.path or ""),
            checksum=published.checksum,
            size_bytes=published.size_bytes,
            took_s=published.took_s,
            probe=published.probe,
            no_probe="" if published.probe else NO_PROBE,
            transport=self.sessions.transport,
            sender=self._bus.name,
            kind="lora" if published.base is not None else "delta" if published.base_version else "full",
            base_version=published.base_version,
            delta_bytes=published.delta_bytes,
            files=dict(published.files),
            manifest=published.manifest,
            base=published.base,
            engine_sums=published.sums,
            no_sums=published.no_sums,
            again_of=self._republishing.first if again else 0,
        )
        await self._colocation.give(step, lambda: self._tell(announced), announced.size_bytes)

    async def _tell(self, announced: WeightsAnnounced) -> None:
        """Publish an announcement, and sync the weights to engines that do not read files."""
        await self._bus.publish(announced)
        log.info("weights_announced", weight_version=announced.version, step=announced.step, took_s=announced.took_s)
        self.sessions.weights_are(announced.version)
        if self.sessions.keeps and not self.sessions.sends_in_background:
            await self.sessions.ask()
        elif not self._colocation.is_on:  # with colocation, the update phase syncs them
            await self.sessions.bring()

    async def _save(self) -> None:
        """Start a checkpoint after the previous one is published."""
        self.busy_s += await self._saves.begin(self.step, self._frontier, self._writing)
