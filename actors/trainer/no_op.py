"""No-op trainer for rollout-only runs: announces the same weights for every step and completes every batch at once."""

import time
import uuid
from pathlib import Path
from typing import Final

import anyio
import structlog
from anyio import to_thread
from anyio.abc import TaskStatus

from actors.trainer.data.feed import is_trimmed
from actors.trainer.data.history import History
from actors.trainer.torch_thread import TorchThread
from messages import (
    BatchReady,
    BatchTrained,
    CheckpointRequested,
    CheckpointSaved,
    GroupCompleted,
    GroupRef,
    SampleSummary,
    SnapshotChunk,
    SnapshotTaken,
    TrainerStarted,
    WeightsAnnounced,
)
from runtime.bus.bus import Bus
from runtime.bus.errors import Fenced
from runtime.bus.events import Events
from runtime.ledger.snapshots import newest_snapshot
from runtime.ledger.steps import Batch
from runtime.models.checksums import checksums_of
from runtime.models.safetensors import safetensors_files
from runtime.process.actor import Actor
from runtime.settings.topology import Topology
from runtime.util.files import atomic_directory

log = structlog.get_logger()

DRAWN: Final = Path("weights", "drawn")  # in the run directory: random weights, for a model directory without weights

NoOpTrainerEvent = BatchReady | BatchTrained | CheckpointRequested | GroupCompleted | TrainerStarted | WeightsAnnounced
FOLLOWED: Final = (BatchReady, BatchTrained, CheckpointRequested, GroupCompleted, TrainerStarted, WeightsAnnounced)


class NoOpTrainer(Actor):
    """No-op trainer: announces the initial weights and reports each batch as trained.

    A crash loses nothing: the log says which batches are done.
    """

    reads = (*FOLLOWED, SnapshotTaken, SnapshotChunk)
    writes = (TrainerStarted, BatchTrained, WeightsAnnounced, CheckpointSaved)

    def __init__(self, topology: Topology, bus: Bus, *, run_dir: Path) -> None:
        self._topology = topology
        self._bus = bus
        self._run_dir = run_dir
        self._history = History()
        self._start = uuid.uuid4().hex  # ID of the trainer.started event, which may be stored twice
        self._started: TrainerStarted | None = None
        self._started_seq = 0
        self._incarnation = 0
        self._version = 0
        self._step = 0
        self._saved_step = 0

    def stats(self) -> dict[str, float]:
        """Train step and weight version."""
        return {"step": self._step, "weight_version": self._version}

    def waits_for(self) -> str:
        """Describe what the actor waits for."""
        done = self._step >= self._topology.train.num_steps
        return "nothing: all steps are trained" if done else f"the batch of step {self._step + 1}"

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Complete every batch of the run, then keep serving calls.

        Raises:
            Fenced: another trainer started after this one.
            ValueError, OSError: the model cannot be used.
        """
        path, checksum = await self._weights()
        while True:
            self._history = History(await newest_snapshot(self._bus))
            async with self._bus.read(*FOLLOWED, from_seq=self._history.from_seq) as events:
                async for received in events.so_far():
                    self._history.fold(received.message, received.seq)
                if not await is_trimmed(self._bus, self._history.covered):
                    await self._pass_all(events, path, checksum, task_status)

    async def _pass_all(
        self, events: Events[NoOpTrainerEvent], path: Path, checksum: str, task_status: TaskStatus[None]
    ) -> None:
        """Complete every remaining batch of the log, then stay until cancelled."""
        await self._announce_start(events)
        await self._announce(path, checksum)
        task_status.started()
        while self._step < self._topology.train.num_steps:
            began = time.perf_counter()
            await self._pass_batch(await self._next_batch(events, path), time.perf_counter() - began)
            await self._announce(path, checksum)
            if self._checkpoint_is_due():
                await self._save(path)
        await self._save(path)
        while True:  # only to notice a successor
            await self._fold_next(events)

    async def _announce_start(self, events: Events[NoOpTrainerEvent]) -> None:
        """Publish trainer.started, and fold the log up to it: later facts of a replaced trainer do not count."""
        incarnation, step = self._history.incarnation + 1, self._history.frontier
        started = TrainerStarted(incarnation=incarnation, step=step, start=self._start)
        self._started, self._started_seq = started, await self._bus.publish(started)
        self._incarnation = incarnation
        while self._history.last_seq < self._started_seq:
            await self._fold_next(events)
        self._step, self._version = self._history.frontier, self._history.version
        self._history.settle(self._step)
        log.info("no_op_trainer_started", incarnation=incarnation, step=self._step)

    async def _announce(self, path: Path, checksum: str) -> None:
        self._version += 1
        size_bytes = sum(file.stat().st_size for file in safetensors_files(path))
        announced = WeightsAnnounced(
            version=self._version,
            step=self._step,
            incarnation=self._incarnation,
            start=self._start,
            path=str(path),
            checksum=checksum,
            size_bytes=size_bytes,
            no_probe='run.only = "rollout": no trainer computes it',
        )
        await self._bus.publish(announced)

    async def _next_batch(self, events: Events[NoOpTrainerEvent], path: Path) -> Batch:
        while self._step not in self._history.batches:
            await self._fold_next(events)
            if self._saved_step < self._history.requested_step <= self._step:
                await self._save(path)
        return self._history.batches[self._step]

    async def _fold_next(self, events: Events[NoOpTrainerEvent]) -> None:
        received = await events.next()
        if received is None:
            return
        self._history.fold(received.message, received.seq)
        own = self._started
        if own is not None and self._history.last_seq >= self._started_seq and self._history.is_replaced(own):
            raise Fenced(f"trainer incarnation {self._history.incarnation} replaced incarnation {own.incarnation}")

    async def _pass_batch(self, batch: Batch, waited_s: float) -> None:
        samples = [sample for ref in batch.groups for sample in self._samples_of(ref)]
        await self._bus.publish(
            BatchTrained(
                step=self._step,
                incarnation=self._incarnation,
                start=self._start,
                num_groups=len(batch.groups),
                num_samples=len(samples),
                num_tokens=sum(sample.prompt_len + sample.response_len for sample in samples),
                metrics={"perf/train_wait_time": waited_s, "perf/step_time": waited_s},
            )
        )
        self._step += 1
        self._history.settle(self._step)

    def _samples_of(self, ref: GroupRef) -> tuple[SampleSummary, ...]:
        completed = self._history.completed.get(ref.event_seq)
        return () if completed is None else completed.samples

    def _checkpoint_is_due(self) -> bool:
        train = self._topology.train
        return (
            train.save_interval is not None and self._step % train.save_interval == 0 and self._step < train.num_steps
        )

    async def _save(self, path: Path) -> None:
        """Publish checkpoint.saved without writing a file, so that the ledger forgets the earlier batches."""
        step = self._saved_step = self._step
        saved = CheckpointSaved(
            step=step,
            incarnation=self._incarnation,
            start=self._start,
            path=str(path),
            oldest_step=step,
            took_s=0.0,
        )
        await self._bus.publish(saved)

    async def _weights(self) -> tuple[Path, str]:
        """Return the directory that engines load from, and the checksum of its weights."""
        model = self._topology.model
        path = Path(model.hf_checkpoint)
        if model.random_init:
            path = self._run_dir / DRAWN
            with TorchThread() as torch_thread:
                await torch_thread.run(_draw, self._topology, path)
        return await to_thread.run_sync(_with_checksum, path)


def _with_checksum(path: Path) -> tuple[Path, str]:
    return path.resolve(), checksums_of(path).total


def _draw(topology: Topology, directory: Path) -> None:
    """Write the random weights that a trainer would start from. The directory appears once it is complete."""
    if directory.exists():
        return
    from actors.trainer.megatron.config import DTYPES
    from actors.trainer.models.config import read_hf_config
    from actors.trainer.models.files import random_source, write_model
    from actors.trainer.models.shapes import hf_shapes

    model_directory, ignored = Path(topology.model.hf_checkpoint), topology.model.ignore_config_keys
    model = read_hf_config(model_directory, topology.trainer.megatron.mtp_num_layers, ignored)
    draw, dtype = random_source(model, topology.run.seed), DTYPES[topology.model.dtype]
    with atomic_directory(directory) as unfinished:
        weights = {name: draw(name).to(dtype).contiguous() for name in hf_shapes(model)}
        write_model(weights, unfinished, model_directory=model_directory, ignored=ignored)
