"""Trainer actor: starts a rank, which then leads (rank 0) or follows."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import anyio
from anyio import to_thread
from anyio.abc import TaskStatus

from actors.trainer.checkpoint_copies import copies_of
from actors.trainer.data.feed import Feed
from actors.trainer.data.held_out import HeldOut
from actors.trainer.data.history import HISTORY
from actors.trainer.data.skipped import LengthLimit
from actors.trainer.data.staleness import Masking
from actors.trainer.leader import Leader
from actors.trainer.phases.colocation import Colocation
from actors.trainer.rendezvous import meet, own_rank
from actors.trainer.torch_thread import TorchThread
from actors.trainer.weights.calls import AskOf, ThreadCalls
from messages import (
    BatchTrained,
    BucketSent,
    CheckpointCopiesGiven,
    CheckpointCopiesRequested,
    CheckpointSaved,
    CheckpointSetAside,
    ColumnPublished,
    PairsEvaluated,
    PayloadsMissing,
    PhaseChanged,
    PhaseReached,
    PhaseRequested,
    Prompt,
    SegmentsPublished,
    SnapshotChunk,
    SnapshotTaken,
    TrainerStarted,
    WeightsAnnounced,
    WeightSyncAnswered,
    WeightSyncDecided,
    WeightSyncEnded,
    WeightSyncPrepared,
    WeightSyncRequested,
)
from runtime.bus.bus import Bus
from runtime.process.actor import Actor
from runtime.settings.derived import policy_model, reward_keys
from runtime.settings.placement import num_ranks
from runtime.settings.topology import TEACHER_LOG_PROBS, Topology, column_names, topk_of_column
from runtime.settings.torch_threads import num_torch_threads, usable_cores
from runtime.util.imports import collecting_nothing

if TYPE_CHECKING:
    from actors.trainer.commands import TrainerRank
    from actors.trainer.critic_rank import CriticRank


HeldOutPairs = Mapping[str, Sequence[Prompt]]  # by evaluation set


def no_pairs() -> HeldOutPairs:
    """Return no evaluation sets."""
    return {}


class TrainerActor(Actor):
    """Trains each batch once and publishes the weights. Rank 0 leads, other ranks follow.

    After a crash, the next incarnation trains the steps since the last checkpoint again from the log. It announces no
    weights until it reaches the frontier of the log.
    """

    reads = (
        *HISTORY,
        SnapshotTaken,
        SnapshotChunk,
        SegmentsPublished,
        ColumnPublished,
        PhaseReached,
        WeightSyncRequested,
        WeightSyncAnswered,
        CheckpointCopiesGiven,
    )
    writes = (
        TrainerStarted,
        BatchTrained,
        PairsEvaluated,
        PayloadsMissing,
        WeightsAnnounced,
        CheckpointSaved,
        CheckpointSetAside,
        CheckpointCopiesRequested,
        PhaseChanged,
        PhaseRequested,
        WeightSyncPrepared,
        BucketSent,
        WeightSyncDecided,
        WeightSyncAnswered,
        WeightSyncEnded,
    )

    def __init__(
        self, topology: Topology, bus: Bus, *, run_dir: Path, held_out: Callable[[], HeldOutPairs] = no_pairs
    ) -> None:
        """Set up one rank, without reading anything.

        Args:
            topology: the topology of the run.
            bus: the bus to publish on.
            run_dir: directory of the run.
            held_out: reads the evaluation sets of preference pairs, on rank 0.

        Raises:
            ValueError: WORLD_SIZE differs from the topology's number of trainer ranks.
        """
        self._read_held_out = held_out
        self._topology = topology
        self._bus = bus
        self._run_dir = run_dir
        self._rank, self._local_rank = own_rank(topology)
        self._leader: Leader | None = None
        self._colocation: Colocation | None = None

    @classmethod
    def preload(cls) -> None:
        with collecting_nothing():
            import_module("actors.trainer.critic_rank")  # torch and Megatron

    def stats(self) -> dict[str, float]:
        """Train step, weight version, and seconds of torch work."""
        leader = self._leader
        if leader is None:
            return {}
        return {"step": leader.step, "weight_version": leader.version, "busy_s": leader.busy_s}

    def waits_for(self) -> str:
        """Describe what the actor waits for: its model, a batch, or commands of rank 0."""
        if self._rank >= num_ranks(self._topology.trainer):
            return "commands of the first rank, to the critic"
        if self._rank:
            return "commands of the first rank"
        if self._colocation is not None and (words := self._colocation.waits_for()):
            return words
        return "its model and checkpoint to be loaded" if self._leader is None else self._leader.waits_for()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Train until the last planned step, then keep serving calls.

        Raises:
            Fenced: another trainer started after this one.
            ValueError, OSError: the model cannot be used.
        """
        shape = policy_model(self._topology).shape
        threads = num_torch_threads(shape, os.environ, usable_cores())
        with TorchThread(self._topology.trainer.device, num_threads=threads) as torch_thread:
            async with ThreadCalls.opened(self._bus) as calls:
                await self._run(torch_thread, calls.ask_of, task_status)

    async def _run(self, torch_thread: TorchThread, ask_of: AskOf, task_status: TaskStatus[None]) -> None:
        store = await meet(self._topology, self._bus, self._rank)
        build = partial(self._build_rank, store, ask_of)
        if self._rank == 0:
            await self._lead(torch_thread, build, task_status)
            return
        rank = await torch_thread.run(build)
        task_status.started()
        try:
            await torch_thread.run(rank.follow)
        finally:
            rank.stop_following()

    async def _lead(
        self, torch_thread: TorchThread, build: Callable[[], "TrainerRank | CriticRank"], task_status: TaskStatus[None]
    ) -> None:
        async with anyio.create_task_group() as group:
            shape = policy_model(self._topology).shape
            masking, limit = Masking.of(self._topology.rollout), LengthLimit.of(self._topology)
            feed = Feed(
                self._bus,
                masking,
                limit,
                shape.vocab_size,
                needs_kept=self._topology.rollout.return_sampling_mask,
                column_names=column_names(self._topology),
                topk=topk_of_column(self._topology, TEACHER_LOG_PROBS),
                reward_keys=reward_keys(self._topology.algorithm),
            )
            group.start_soon(feed.run)  # reads the log while the other thread imports torch and loads the model
            colocation = self._colocation = Colocation(self._topology, self._bus, feed)
            await colocation.take_over()  # before the model is built and needs memory
            rank = cast("TrainerRank", await torch_thread.run(build))
            held_out = HeldOut(self._topology, await to_thread.run_sync(self._read_held_out))
            colocation.lead(torch_thread, rank)
            try:
                if (copies := copies_of(self._topology, self._bus)) is not None:
                    await copies.forget(None)
                    await copies.bring()
                step = await torch_thread.run(rank.resume)
                await feed.caught_up.wait()
                self._leader = Leader(self._topology, self._bus, feed, torch_thread, rank, step, colocation, held_out)
                async with self._bus.serve({WeightSyncRequested: self._leader.sessions.requested}):
                    await self._leader.announce_start()
                    task_status.started()
                    await self._leader.train_all()
                    await self._leader.serve()
            finally:
                torch_thread.run_last(rank.close)

    def _build_rank(self, store: Any, ask_of: AskOf) -> "TrainerRank | CriticRank":
        """Build the rank. Runs on the torch thread: importing torch and Megatron takes seconds."""
        self.preload()
        from actors.trainer.critic_rank import build_rank

        return build_rank(self._topology, self._run_dir, store, self._rank, local_rank=self._local_rank, ask_of=ask_of)
