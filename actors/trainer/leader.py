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
- With trainer.handover = "copy" the weights are copied instead, and training goes on: they are written, and announced,
  while later steps train. The next version waits for that. A crash in between is the one above.
- Where engines do not read files (`weight_transport`), the version is announced with nothing but its probe, and then
  goes to them in a weight session (sending/leading.py), for which training waits. A crash in between is the one above:
  the next incarnation announces a newer version once it is at the frontier, and until then engines take nothing.
- Both: the copy is gathered while later steps train, then announced and sent in a session, which on the CPU is beside
  training too (sending/rank.py). The next version waits for its end. It is kept for engines that come late.
- The checkpoint comes last, since rollout goes on meanwhile. So a checkpoint contains only steps that the log knows,
  which trainer.started relies on when it says that every batch up to its step is settled. Training goes on while it is
  written: its state is a copy. checkpoint.saved is published when it is complete on the disk under its name, some steps
  later perhaps; the ledger forgets what it contains only then. Another one waits for it.
- Payloads of a batch may be gone. Of a step that nobody trained yet the trainer says which (payloads.missing), and the
  ledger makes that batch again. Of a step that was trained before a crash it trains what is left, and says how many
  groups that leaves out: the ledger has settled them, nobody would make them again.
- A version is the highest of the log plus one. One that was written but not announced was seen by nobody, and its files
  are written over.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio
import structlog

from actors.trainer.batches.feed import FedBatch, Feed
from actors.trainer.batches.untrained import NO_GRADIENTS, gradients_of
from actors.trainer.groups_ahead import GroupsAhead
from actors.trainer.phases.turns import Turns
from actors.trainer.republishing import MAX_TIMES, Republishing, WeightsUnusable
from actors.trainer.sending.leading import WeightSessions
from actors.trainer.torch_thread import TorchThread
from messages import (
    BatchTrained,
    CheckpointSaved,
    CheckpointSetAside,
    PayloadsMissing,
    TrainerStarted,
    WeightsAnnounced,
)
from runtime.bus.background import beside
from runtime.bus.bus import Bus
from runtime.host.actor import InputError
from runtime.settings.topology import EXPORT_DIRECTORY, Topology, answers_are_recorded

if TYPE_CHECKING:
    from actors.trainer.commands import TrainerRank, Unpublished
    from actors.trainer.models.publish import Published
    from actors.trainer.step.train_step import Trained

log = structlog.get_logger()


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
        turns: Turns,
    ) -> None:
        """Take over from the log as the feed has read it.

        Args:
            topology: of the run.
            bus: to publish on.
            feed: has caught up with the log.
            torch_thread: where the rank's calls run.
            rank: has loaded its checkpoint.
            step: train steps that its weights contain.
            turns: that it takes with engines in the same memory, if it does.

        Raises:
            InputError: steps after it were trained, and the log does not hold their batches any more.
        """
        self._train = topology.train
        self._copies = topology.trainer.handover == "copy" and not answers_are_recorded(topology)
        self._run_directory = rank.run_directory
        self._bus = bus
        self._feed = feed
        self._torch_thread = torch_thread
        self._rank = rank
        self._turns = turns
        self._ahead = GroupsAhead(topology, feed, torch_thread, rank)
        incarnation = feed.history.incarnation + 1
        self.sessions = WeightSessions(topology, bus, torch_thread, rank, incarnation=incarnation, wake=feed.tell)
        turns.load_by(self.sessions.bring, self.serve)
        self._frontier = feed.history.frontier
        self._incarnation = incarnation
        self._saved_step = step  # of the newest that was begun, or that is not damaged
        self._saved = anyio.Event()  # the checkpoint that was begun last is told of
        self._saved.set()
        self._announced = anyio.Event()  # the version that was begun last
        self._announced.set()
        self._republishing = Republishing()
        self._waiting: tuple[str, float] | None = None  # for what, since when
        self.step = step
        self.version = feed.history.version
        self.busy_s = 0.0  # of torch work
        self._fetch_s = 0.0  # that the last batch took once it was there: payloads from the bus, and laying them out
        self._check_batches()

    def _check_batches(self) -> None:
        """Waiting for a batch that was trained and forgotten would be for ever."""
        gone = [step for step in range(self.step, self._frontier) if step not in self._feed.history.batches]
        if gone:
            aside = "".join(f"; {each.path} is damaged: {each.reason}" for each in self._rank.take_set_aside())
            raise InputError(
                f"the newest checkpoint in {self._run_directory} contains {self.step} train steps, and the log has no "
                f"batch of step {gone[0]} any more, as a later checkpoint had it: bring that one back, or start anew"
                f"{aside}"
            )

    def waits_for(self) -> str:
        """What it waits for now; empty while it trains."""
        if self._waiting is None:
            return ""
        what, since = self._waiting
        return f"{what}, since {time.monotonic() - since:.0f} s"

    async def announce_start(self) -> None:
        """Publish trainer.started; with no step to replay, also the weights."""
        self._feed.settle(self.step)
        started = TrainerStarted(incarnation=self._incarnation, step=self.step, start=uuid.uuid4().hex)
        self._feed.started(started, await self._bus.publish(started))
        log.info("trainer_started", incarnation=self._incarnation, step=self.step, frontier=self._frontier)
        await self._tell_set_aside()
        if self.step >= self._frontier:
            await self._announce(await self._publish())

    async def train_all(self) -> None:
        """Train every planned step.

        The last checkpoint is saved and told by every incarnation that gets here: an earlier one may have died before
        it told of its own, and the run ends with that event, so after the export.
        """
        async with anyio.create_task_group() as self._writing, self._serving():
            while self.step < self._train.num_steps:
                await self._train_step()
            await self._announced.wait()
            if self._train.save_hf:
                await self._torch_thread.run(self._rank.export, self._run_directory / EXPORT_DIRECTORY)
            await self._save()
        self._waiting = "nothing: every planned step is trained", time.monotonic()

    @asynccontextmanager
    async def _serving(self) -> AsyncGenerator[None]:
        """In the block, bring the weights to engines that come late, where that can be done beside training."""
        if not self.sessions.sends_beside:
            yield
            return
        async with beside(self.serve):
            yield

    async def serve(self) -> None:
        """Bring the last weights to engines that come late, or that cannot use their files. For ever."""
        while True:
            await self._feed.until(lambda: self.sessions.is_requested or self._is_out_of_reach)
            if self._is_out_of_reach:
                await self._publish_again()
            else:
                await self.sessions.bring()

    async def _train_step(self) -> None:
        begin = time.perf_counter()
        fed, of_ahead = self._ahead.put_into(await self._next_batch())
        waited_s = time.perf_counter() - begin - self._fetch_s
        replay = self.step < self._frontier
        await self._turns.take(self.step)
        async with self._feed.prefetching(self.step + 1):
            trained = await self._train_batch(fed)
        self.step += 1
        published, begun, copied = None, None, None
        if self.step >= self._frontier:
            if self.sessions.keeps:
                copied = await self._copy()
            elif self._copies:
                begun = await self._begin_publish()
            else:
                published = await self._publish()
        metrics = (trained.metrics if trained else {}) | of_ahead
        metrics["perf/train_wait_time"], metrics["perf/fetch_time"] = waited_s, self._fetch_s
        pauses_s = (published and published.took_s, begun and begun.pause_s, copied and copied.took_s)
        metrics["perf/update_weights_time"] = next(filter(None, pauses_s), 0.0)
        metrics["perf/step_time"] = time.perf_counter() - begin
        await self._bus.publish(self._told(fed, trained, metrics, replay=replay))
        saves = self._checkpoint_is_due()
        if saves and self._turns.is_on:  # while it has what a checkpoint is made of
            await self._save()
        if published is not None:
            await self._announce(published)
        if begun is not None:
            self._writing.start_soon(self._finish_publish, begun, self.step)
        if copied is not None:
            self._writing.start_soon(self._hand_over, copied, self.step)
        self._feed.settle(self.step)
        self._ahead.weights_moved()
        if saves and not self._turns.is_on:
            await self._save()

    async def _next_batch(self) -> FedBatch:
        """Wait for the batch of this step, whole or at least settled; meanwhile save if asked to, and compute ahead."""
        history, again = self._feed.history, ""
        while True:
            self._waiting = f"batch {self.step}{again}", time.monotonic()
            await self._feed.until(
                lambda: (
                    self.step in history.batches
                    or self._checkpoint_is_asked_for()
                    or self._ahead.has_work()
                    or self._is_to_bring()
                    or self._is_out_of_reach
                )
            )
            self._waiting = None
            if self._is_out_of_reach:
                await self._publish_again()
                continue
            if self._is_to_bring():
                await self.sessions.bring()
                continue
            if self._checkpoint_is_asked_for():
                await self._save()
                continue
            if self.step not in history.batches:
                self.busy_s += await self._ahead.compute_one()
                continue
            begin = time.perf_counter()
            fed = await self._feed.batch(self.step)
            self._fetch_s = time.perf_counter() - begin
            if not fed.lost:
                return fed
            log.warning("payloads_missing", step=self.step, num_groups=len(fed.lost), reason=fed.reason)
            if self.step < self._frontier or self.step in history.trained:  # by a zombie since this trainer started
                return fed
            seq = await self._bus.publish(
                PayloadsMissing(step=self.step, incarnation=self._incarnation, groups=fed.lost, reason=fed.reason)
            )
            await self._feed.until(lambda seq=seq: history.last_seq >= seq)
            again = ", which is made again as payloads of it are missing"

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

    def _told(
        self, fed: FedBatch, trained: "Trained | None", metrics: dict[str, float], *, replay: bool
    ) -> BatchTrained:
        gradients = gradients_of(fed.batch, trained.without_gradient) if fed.batch and trained else NO_GRADIENTS
        metrics["train/num_lost_groups"] = len(fed.lost)
        metrics["train/num_untrained_samples"] = sum(len(item.samples) for item in gradients.untrained)
        return BatchTrained(
            step=fed.step,
            incarnation=self._incarnation,
            replay=replay,
            num_groups=len(fed.refs) - len(fed.lost) - len(gradients.skipped_groups),
            num_samples=gradients.num_samples,
            num_tokens=gradients.num_tokens,
            metrics=metrics,
            untrained=gradients.untrained,
            skipped_groups=gradients.skipped_groups,
        )

    @property
    def _is_out_of_reach(self) -> bool:
        """Whether engines cannot take the newest version from its files: nothing would come from them."""
        return self._announced.is_set() and self._republishing.is_wanted(self._feed.history)

    async def _publish_again(self) -> None:
        """Publish the newest weights once more, whole, under the next version.

        Raises:
            WeightsUnusable: that was done repeatedly.
        """
        republishing, reason = self._republishing, self._feed.history.refusal
        if republishing.times >= MAX_TIMES:
            raise WeightsUnusable(
                f"the weights of step {self.step} were published {1 + republishing.times} times in "
                f"{self._run_directory}, and engines could use none of these versions: {reason}"
            )
        log.warning("weights_published_again", weight_version=self.version, reason=reason)
        with anyio.CancelScope(shield=True):  # a phase may end meanwhile
            await self._announce(await self._publish(whole=True), again=True)

    @property
    def _must_be_whole(self) -> bool:
        return self._republishing.must_be_whole(self._feed.history)

    async def _publish(self, *, whole: bool = False) -> "Published":
        """Write the weights to disk under the next version, if engines read them there; else only probe them."""
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

    async def _begin_publish(self) -> "Unpublished":
        """Copy the weights for the next version, once the one before is announced."""
        await self._announced.wait()
        self._announced = anyio.Event()
        self.version += 1
        begun = await self._torch_thread.run(self._rank.begin_publish, self.version, whole=self._must_be_whole)
        self.busy_s += begun.pause_s
        return begun

    async def _finish_publish(self, begun: "Unpublished", step: int) -> None:
        """Make a version of a copy, and announce it. On the torch thread buckets and train steps take turns."""
        has_more = True
        while has_more:
            has_more, writing = await self._torch_thread.run(self._rank.advance_publish)
            if writing is not None:
                with suppress(OSError):  # which is told of at the end
                    await asyncio.wrap_future(writing)
        confirmed = self._feed.history.confirmed
        await self._announce(await self._torch_thread.run(self._rank.finish_publish, begun, confirmed=confirmed), step)
        self._announced.set()
        await self._feed.tell()  # it may be refused already

    async def _copy(self) -> "Published":
        """Copy the weights for the next version, once engines have had their turn for the one before."""
        await self._announced.wait()
        self._announced = anyio.Event()
        self.version += 1
        copied = await self._torch_thread.run(self._rank.copy_unwritten, self.version)
        self.busy_s += copied.took_s
        return copied

    async def _hand_over(self, copied: "Published", step: int) -> None:
        """Gather a copy, then announce it and bring it to engines. Gathering and train steps take turns."""
        while await self._torch_thread.run(self._rank.sending.advance_copy):
            pass
        await self.sessions.keep()
        await self._announce(copied, step)
        self._announced.set()

    def _is_to_bring(self) -> bool:
        """Whether engines are to be brought the weights by who trains."""
        return self.sessions.is_requested and not self.sessions.sends_beside

    async def _announce(self, published: "Published", step: int | None = None, *, again: bool = False) -> None:
        step = self.step if step is None else step
        if published.path is not None:
            self._republishing.announced(self.version, again=again, is_whole=not published.base_version)
        announced = WeightsAnnounced(
            version=self.version,
            step=step,
            incarnation=self._incarnation,
            path=str(published.path or ""),
            checksum=published.checksum,
            size_bytes=published.size_bytes,
            took_s=published.took_s,
            probe=published.probe,
            no_probe="" if published.probe else "samples are recorded: no engine takes the weights",
            transport=self.sessions.transport,
            sender=self._bus.name,
            kind="delta" if published.base_version else "full",
            base_version=published.base_version,
            delta_bytes=published.delta_bytes,
            files=dict(published.files),
            again_of=self._republishing.first if again else 0,
        )
        await self._turns.give(step, lambda: self._tell(announced))

    async def _tell(self, announced: WeightsAnnounced) -> None:
        """Say that weights are there, and bring them to engines that do not read them by themselves."""
        await self._bus.publish(announced)
        log.info("weights_announced", weight_version=announced.version, step=announced.step, took_s=announced.took_s)
        self.sessions.weights_are(announced.version)
        if self.sessions.keeps and not self.sessions.sends_beside:
            await self.sessions.ask()
        elif not self._turns.is_on:  # else in the phase for it
            await self.sessions.bring()

    def _checkpoint_is_due(self) -> bool:
        interval = self._train.save_interval
        return interval is not None and self.step % interval == 0 and self.step < self._train.num_steps

    def _checkpoint_is_asked_for(self) -> bool:
        """Since a stream fills up. While lost steps are trained again it can wait: that brings nothing new to store."""
        return self._saved_step < self._feed.history.requested_step <= self.step

    async def _save(self) -> None:
        """Begin a checkpoint, once the one before is told of."""
        await self._saved.wait()
        async with self._turns.taken(self.step):
            begin = time.perf_counter()
            written = await self._torch_thread.run(
                self._rank.begin_save, step=self.step, incarnation=self._incarnation, frontier=self._frontier
            )
            pause_s = time.perf_counter() - begin
        self.busy_s += pause_s
        self._saved_step = max(self._saved_step, self.step)
        self._saved = anyio.Event()
        self._writing.start_soon(self._finish_save, self.step, written, begin, pause_s)

    async def _finish_save(self, step: int, written: Future[None], begin: float, pause_s: float) -> None:
        """Tell of a checkpoint when it is complete."""
        await asyncio.wrap_future(written)
        path, kept = await self._torch_thread.run(self._rank.finish_save)
        took_s = time.perf_counter() - begin
        saved = CheckpointSaved(
            step=step,
            incarnation=self._incarnation,
            path=str(path),
            oldest_step=kept[0].step,
            took_s=took_s,
            pause_s=pause_s,
        )
        await self._bus.publish(saved)
        await self._tell_set_aside()
        self._saved.set()
        log.info("checkpoint_saved", step=step, took_s=took_s, pause_s=pause_s)

    async def _tell_set_aside(self) -> None:
        """Tell of checkpoints that were found damaged."""
        for each in self._rank.take_set_aside():
            log.warning("checkpoint_set_aside", step=each.step, path=str(each.path), reason=each.reason)
            await self._bus.publish(
                CheckpointSetAside(
                    step=each.step, incarnation=self._incarnation, path=str(each.path), reason=each.reason
                )
            )
