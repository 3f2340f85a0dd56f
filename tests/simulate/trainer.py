"""Rank 0 of the trainer with a scripted step: its leader, feed and checkpoints' order are the product's own."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from random import Random
from typing import Any, Final, Self

import numpy as np

from actors.trainer.checkpoints import Checkpoint
from actors.trainer.data.batch import TrainBatch
from messages import WeightProbe
from tests.simulate.loop import VirtualLoop

KEPT_CHECKPOINTS: Final = 2
WORK_S: Final = {"train": 0.5, "publish": 0.2, "resume": 0.3, "begin_save": 0.05}  # longest
WRITE_S: Final = 0.5  # longest write of a checkpoint, in the background
PROBE_IDS: Final = (3, 4, 5)

Line = tuple[tuple[int, tuple[int, ...]], ...]  # steps that weights were trained on, each with its groups


class Disk:
    """What trainers leave on the disk of their machine: checkpoints and weight versions."""

    def __init__(self) -> None:
        self.checkpoints: dict[tuple[int, int], Line] = {}  # by number of steps and incarnation
        self.versions: dict[str, Line] = {}  # by path

    def weights(self, path: str) -> tuple[str, float]:
        """Checksum of a version, and the log-prob of a probe's tokens under it."""
        return checksum_of(self.versions[path]), log_prob_of(self.versions[path])


def checksum_of(line: Line) -> str:
    return f"{hash_of(line):016x}"


def log_prob_of(line: Line) -> float:
    return -0.5 - (hash_of(line) % 1000) / 100


def hash_of(line: Line) -> int:
    """A number that differs for other weights, and is the same in each process."""
    value = len(line) + 1
    for step, groups in line:
        for group in (step, *groups, -1):
            value = (value * 1_000_003 + group + 2) % (1 << 61)
    return value


class _Published:
    """A written version, as the leader reads it."""

    def __init__(self, path: str, line: Line) -> None:
        self.path = Path(path)
        self.checksum = checksum_of(line)
        log_prob = log_prob_of(line)
        self.probe = WeightProbe(token_ids=PROBE_IDS, log_probs=(0.0, *[log_prob] * (len(PROBE_IDS) - 1)))
        self.size_bytes, self.took_s, self.base_version, self.delta_bytes = 1, 0.0, 0, 0
        self.files: dict[str, Any] = {}
        self.manifest, self.base, self.sums, self.no_sums = "", None, None, "scripted"


class _Trained:
    """The result of a scripted step."""

    metrics: dict[str, float]

    def __init__(self) -> None:
        self.metrics = {}
        self.without_gradient = np.zeros(0, np.int64)


class ScriptedRank:
    """Takes the place of all torch work. Its weights are the groups that they were trained on."""

    sending = None

    def __init__(self, disk: Disk, run_directory: Path, random: Random, loop: VirtualLoop) -> None:
        self._disk = disk
        self._random = random
        self._loop = loop
        self._line: Line = ()
        self._saved: Line = ()
        self._writing: tuple[int, int] | None = None
        self.run_directory = run_directory
        self.prompt_ids: Callable[[], tuple[int, ...]] = tuple

    def resume(self) -> int:
        """Load the newest checkpoint."""
        newest = max(self._disk.checkpoints, default=(0, 0))
        self._line = self._disk.checkpoints.get(newest, ())
        return newest[0]

    def take_set_aside(self) -> tuple[()]:
        return ()

    def train(self, batch: TrainBatch) -> _Trained:
        assert not self._line or batch.step > self._line[-1][0], "a step is trained again on its own weights"
        self._line = (*self._line, (batch.step, tuple(sorted(set(batch.groups_B.tolist())))))
        return _Trained()

    def publish(self, version: int, *, confirmed: int, whole: bool) -> _Published:
        path = f"{self.run_directory}/weights/{version}"
        self._disk.versions[path] = self._line
        return _Published(path, self._line)

    def begin_save(self, *, step: int, incarnation: int, frontier: int) -> Future[None]:
        assert not self._line or step > self._line[-1][0], "a checkpoint has other steps"
        written: Future[None] = Future()
        self._writing = step, incarnation
        line = self._line

        def end() -> None:
            self._saved = line
            written.set_result(None)

        self._loop.call_later(WRITE_S * self._random.random(), end)
        return written

    def finish_save(self) -> tuple[Path, list[Checkpoint]]:
        """Give the checkpoint its name, and delete old ones."""
        assert self._writing is not None
        step, incarnation = self._writing
        known = next((key for key in self._disk.checkpoints if key[0] == step), None)
        self._disk.checkpoints.setdefault(known or (step, incarnation), self._saved)
        kept = sorted(self._disk.checkpoints)[-KEPT_CHECKPOINTS:]
        self._disk.checkpoints = {key: self._disk.checkpoints[key] for key in kept}
        found = [Checkpoint(step=s, incarnation=i, path=self.run_directory / f"{s}-{i}") for s, i in kept]
        return found[-1].path, found

    def close(self) -> None:
        """There is nothing to close."""


class ScriptedThread:
    """Takes the place of the torch thread: work takes virtual time, and is not interrupted."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._lock = asyncio.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """There is no thread to end."""

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        async with self._lock:
            await asyncio.sleep(self._random.random() * WORK_S.get(getattr(function, "__name__", ""), 0.01))
            return function(*args, **kwargs)

    def run_last(self, function: Callable[[], Any]) -> None:
        function()
