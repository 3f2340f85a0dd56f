"""Follows the log and dumps the samples of train steps to files: all of them (run.dump_details), or the newest ones
(observe.samples).

The two files of a step are written when its batch is made: the batch's groups, and the groups closed since the
previous batch. The content follows from the log alone, so a restart writes exactly the missing files.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import anyio
import msgspec
import structlog
from anyio import to_thread

from actors.buffer.storage.records import GroupRecord, Records, StepDump, payloads_of
from messages import ColumnPublished, Plane, SegmentsPublished
from runtime.bus.bus import Bus
from runtime.bus.errors import PayloadLost, PayloadUnreadable
from runtime.data.dump_files import (
    NEWEST,
    RUN_FILE,
    TOKENIZER,
    TOPOLOGY_FILE,
    DumpedRun,
    keep_newest,
    known_steps,
    told_by_of,
    write_pair,
)
from runtime.data.dumps import DumpedGroup, group_of
from runtime.data.stored_prompts import fetch_prompt
from runtime.ledger.fold import LEDGER_EVENTS
from runtime.models.directory import CONFIG, TOKENIZER_FILES, ModelError, copy_files
from runtime.process.actor import InputError
from runtime.settings.topology import Topology, encode_topology
from runtime.util.files import write_atomically
from runtime.util.secrets import make_private

log = structlog.get_logger()

NOWHERE: Final = 2**63  # a sequence that no stream reaches
FETCHED_AT_ONCE: Final = 8  # groups fetched concurrently


class Recorder:
    """Writes the run's dumps, if enabled. A crash loses nothing: the restart writes the missing files.

    Those of `observe.samples` are for people who look on: what cannot be written there does not end the run.
    """

    def __init__(self, topology: Topology, bus: Bus, run_dir: Path) -> None:
        self._topology = topology
        self._bus = bus
        self._key, self._directory, self._kept_steps = _place_of(topology, run_dir)
        self._records = Records()
        self._done = 0  # log sequence up to which everything is written
        self._advanced = anyio.Condition()

    async def prepare(self) -> None:
        """Claim the directory for this run.

        Raises:
            InputError: it cannot be written, or holds the dumps of another run; or the tokenizer cannot be copied.
        """
        if self._directory is None:
            return
        run = DumpedRun(run=self._bus.run, began=(await self._bus.state(Plane.EVENT)).created)
        try:
            await to_thread.run_sync(_prepare, self._directory, run, self._topology)
        except OSError as error:
            raise InputError(f"{self._key}: {self._directory} cannot be written: {error}") from error
        except ModelError as error:
            raise InputError(f"model.hf_checkpoint: {error}") from error

    async def run(self) -> None:
        """Write the dump files of each step until cancelled.

        Raises:
            OSError: a file cannot be written.
        """
        if self._directory is None:
            return
        async with self._bus.read(*LEDGER_EVENTS, buries=False) as events:
            async for received in events:
                pair = self._records.fold(received.message, received.seq)
                if pair is not None:
                    told_by = (received.seq, round(received.time.timestamp() * 1e6))
                    await self._write(self._directory, pair, told_by)
                async with self._advanced:
                    self._done = received.seq
                    self._advanced.notify_all()

    async def write_rest(self, seq: int) -> None:
        """Wait until all files up to a log sequence are written, then write the groups that no batch took."""
        if self._directory is None:
            return
        async with self._advanced:
            while self._done < seq:
                await self._advanced.wait()
        rest = self._records.rest()
        if rest.records:
            await self._write(self._directory, rest, (self._records.position, 0))

    def low_water(self) -> int:
        """The oldest data message that dumps still need."""
        return NOWHERE if self._directory is None else self._records.low_water()

    def needed_seq(self) -> int:
        """The oldest event that dumps need after a restart."""
        return NOWHERE if self._directory is None else self._records.needed_seq()

    async def _write(self, directory: Path, pair: StepDump, told_by: tuple[int, int]) -> None:
        try:
            if await to_thread.run_sync(self._is_written, directory, pair.step, told_by):
                return
            groups = await self._fetch(pair.records)
            if groups:
                await to_thread.run_sync(self._write_groups, directory, pair.step, groups, told_by)
                log.debug("samples_dumped", step=pair.step, num_groups=len(groups))
        except OSError as error:
            if self._kept_steps is None:
                raise
            log.warning("samples_not_kept", step=pair.step, reason=str(error))

    def _is_written(self, directory: Path, step: int, told_by: tuple[int, int]) -> bool:
        """Whether an earlier start wrote a pair, or removed it as too old."""
        newest = [] if self._kept_steps is None else known_steps(directory)[-self._kept_steps :]
        return (len(newest) == self._kept_steps and step < newest[0]) or told_by_of(directory, step) == told_by

    def _write_groups(
        self, directory: Path, step: int, groups: Sequence[DumpedGroup], told_by: tuple[int, int]
    ) -> None:
        write_pair(directory, step, groups, told_by)
        if self._kept_steps is not None:
            keep_newest(directory, self._kept_steps)

    async def _fetch(self, records: Sequence[GroupRecord]) -> list[DumpedGroup]:
        found: dict[int, DumpedGroup] = {}
        limiter = anyio.Semaphore(FETCHED_AT_ONCE)

        async def fetch(place: int, record: GroupRecord) -> None:
            async with limiter:
                group = await self._group(record)
            if group is not None:
                found[place] = group

        async with anyio.create_task_group() as tasks:
            for place, record in enumerate(records):
                tasks.start_soon(fetch, place, record)
        return [found[place] for place in sorted(found)]

    async def _group(self, record: GroupRecord) -> DumpedGroup | None:
        completed, fate = record.completed, record.fate
        if completed is None or not completed.samples:
            return None
        try:
            payloads = {seq: await self._bus.fetch(SegmentsPublished, seq) for seq in payloads_of(completed.samples)}
            prompt = await fetch_prompt(self._bus, completed.prompt_parts) if completed.prompt_parts else None
            seqs = {seq for sample in completed.samples for seq in sample.columns.values()}
            columns = {seq: await self._bus.fetch(ColumnPublished, seq) for seq in sorted(seqs)}
            return group_of(completed, payloads, fate, prompt, columns)
        except (PayloadLost, PayloadUnreadable, ValueError) as error:
            log.warning("group_not_dumped", group_id=completed.group_id, reason=str(error))
            return None


def _place_of(topology: Topology, run_dir: Path) -> tuple[str, Path | None, int | None]:
    """Return the setting that turns dumps on, their directory, and how many of the newest steps are kept; None: all."""
    run, observe = topology.run, topology.observe
    if run.dump_details is None and observe.samples:
        return "observe.samples", run_dir / NEWEST, observe.sample_steps
    return "run.dump_details", None if run.dump_details is None else Path(run.dump_details), None


def _prepare(directory: Path, run: DumpedRun, topology: Topology) -> None:
    make_private(directory)
    before = _owner(directory)
    if before is not None and before != run:
        owner = f"{before.run}{' before it was started over' if before.run == run.run else ''}"
        raise InputError(
            f"run.dump_details: {directory} holds the dumps of another run, {owner}: "
            "move them away, or name another directory"
        )
    for leftover in directory.glob(".rollout_*.*.*"):  # left by killed writers
        leftover.unlink()
    write_atomically(directory / TOPOLOGY_FILE, encode_topology(topology))
    _copy_tokenizer(Path(topology.model.hf_checkpoint), directory / TOKENIZER)
    write_atomically(directory / RUN_FILE, msgspec.json.encode(run) + b"\n")


def _owner(directory: Path) -> DumpedRun | None:
    path = directory / RUN_FILE
    if not path.exists():
        if any(directory.glob("rollout_*.jsonl")):
            raise InputError(f"run.dump_details: {directory} holds dumps and no {RUN_FILE}: name another directory")
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=DumpedRun)
    except msgspec.DecodeError as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def _copy_tokenizer(model: Path, directory: Path) -> None:
    if not model.is_dir():
        log.warning("tokenizer_not_dumped", reason=f"{model} is not a directory")
        return
    make_private(directory)
    copy_files(model, directory, (CONFIG, *TOKENIZER_FILES))
