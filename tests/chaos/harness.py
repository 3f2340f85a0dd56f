"""Harness for chaos tests: starts the real command in a directory, follows the log and kills processes by name.

Nothing here sleeps for a fixed time. A test waits for events in the run's log. A random moment of a kill is a random
number of further events. The run waits for its test too, however slow that is (pace.py): it trains at most one step
more than the test has read of, until the test waits for its end.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec
import psutil

from messages import ActorStarted, BatchTrained, Message, RunFinished
from runtime.bus.bus import Bus
from runtime.bus.events import Events, Received
from runtime.bus.limits import BusLimits
from runtime.bus.nats.accounts import RUN_ACCOUNT, Accounts
from runtime.bus.nats.server import STORED, ServerSettings
from runtime.node.supervisor import guardian
from runtime.settings.load import load_topology
from runtime.util.secrets import Login, Secret
from tests.chaos.pace import Pace
from tests.fixtures.nats import eventually
from tests.support.running_server import running_server

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, str(ROOT / "bin" / "physarum.py"), "start-topology")
LAPTOP = ROOT / "topologies" / "laptop.toml"
SEED = os.environ.get("PHYSARUM_CHAOS_SEED", "1")  # another seed kills at other moments
LIMITS = BusLimits(connect_timeout_s=120.0, publish_timeout_s=120.0)  # for a busy machine, or a killed server
EVENT_S = 120.0  # timeout of an awaited event, long enough for a trainer's restart
END_S = 180.0  # timeout of the rest of a run
LOOK_S = 1.0  # between two checks that the command still runs
SHORT_LOOK_S = 0.01  # between two checks of what no event tells of

NAME = "r"  # run name of every run
BATCH_SIZE = 16  # groups of a train step
NUM_SAMPLES = 4  # of a group
EVENTS_PER_STEP = BATCH_SIZE + 4  # completions of groups; issued, batch ready and trained, weights
SMALL = (
    "run.check_timeout_s=300",  # also on a busy machine
    f"rollout.rollout_batch_size={BATCH_SIZE}",
    f"rollout.n_samples_per_prompt={NUM_SAMPLES}",
    "train.save_interval=5",
)


def moments_of(name: str) -> random.Random:
    """Seeded random generator for the kill moments of a test."""
    return random.Random(f"{SEED} {name}")


class Log:
    """The growing log of a run."""

    def __init__(self, events: Events[Message], process: anyio.abc.Process, pace: Pace) -> None:
        self.pids: dict[str, int] = {}  # newest process of each name
        self.seq = 0  # sequence of the newest event read
        self.trained = 0  # train steps, without replayed ones
        self.trained_seq = 0  # sequence of the event that says so
        self.event_s = EVENT_S
        self.finished = False
        self._events = events
        self._process = process
        self._pace = pace
        self._killed: dict[str, int] = {}  # processes that this killed, by name

    async def until(self, holds: Callable[[Message], bool]) -> Message:
        """Read until an event satisfies a condition; return the event."""
        with anyio.fail_after(self.event_s):
            while True:
                received = await self._next()
                if holds(received.message):
                    return received.message

    async def until_trained(self, steps: int) -> None:
        """Read until this number of train steps is done."""
        await self.until(lambda event: isinstance(event, BatchTrained) and event.step + 1 >= steps)

    async def until_restarted(self, name: str) -> None:
        """Read until the node daemon reports the restart of a process. If it was killed, no further step is allowed."""
        old = self.pids[name]
        with self.held() if name in self._away() else nullcontext():
            await self.until(lambda _: self.pids[name] != old)

    async def until_alive(self, name: str) -> None:
        """If a process was killed before, read until it is restarted: its next kill needs a process."""
        if name in self._away():
            await self.until_restarted(name)

    def held(self) -> AbstractContextManager[None]:
        """Allow no further steps in the block: the run trains one more than this has read of by now."""
        self._pace.allow(self.trained)
        return self._pace.held()

    async def until_back(self) -> None:
        """Read until every killed process is restarted, or the run ends."""
        with self.held():
            while self._away() and not self.finished and self._process.returncode is None:
                await self._look(LOOK_S)

    async def pass_over(self, number: int) -> None:
        """Read this number of further events."""
        with anyio.fail_after(self.event_s):
            for _ in range(number):
                await self._next()

    async def until_there(self, holds: Callable[[], bool]) -> None:
        """Read until a condition holds that no event tells of, such as that a file exists."""
        with anyio.fail_after(self.event_s):
            while not holds():
                await self._look(SHORT_LOOK_S)

    async def read_for(self, seconds: float) -> None:
        """Read for a time, or until the run has finished."""
        ends = anyio.current_time() + seconds
        while not self.finished and (left_s := ends - anyio.current_time()) > 0:
            await self._look(min(LOOK_S, left_s))

    def kill(self, name: str) -> None:
        """Kill the newest process of a name with SIGKILL."""
        assert not self.finished, f"the run finished before {name} was killed"
        os.kill(self.pids[name], signal.SIGKILL)
        self._killed[name] = self.pids[name]

    def _away(self) -> list[str]:
        return [name for name, pid in self._killed.items() if self.pids[name] == pid]

    async def _next(self) -> Received[Message]:
        received = None
        while received is None:
            assert not self.finished, f"the run finished before what is awaited; not restarted: {self._away()}"
            received = await self._look(LOOK_S)
        return received

    async def _look(self, timeout_s: float) -> Received[Message] | None:
        assert self._process.returncode is None, f"the command ended with {self._process.returncode}"
        self._pace.allow(self.trained)
        received = await self._events.next(timeout_s)
        if received is None:
            return None
        self.seq = received.seq
        match received.message:
            case ActorStarted() as started:
                self.pids[started.actor] = started.pid
            case BatchTrained() as trained:
                if trained.step >= self.trained:
                    self.trained, self.trained_seq = trained.step + 1, received.seq
            case RunFinished():
                self.finished = True
            case _:
                pass
        return received


class Command:
    """A running bin/start-topology and its processes."""

    def __init__(self, process: anyio.abc.Process, bus: Bus, log: Log, pace: Pace) -> None:
        self.bus = bus
        self.log = log
        self.end_s = END_S
        self._process = process
        self._pace = pace

    async def end(self) -> int:
        """Wait for killed processes to be restarted, and for the command to end; return its exit code."""
        with anyio.fail_after(self.end_s):
            await self.log.until_back()
            self._pace.free()
            return await self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command alone, like Ctrl-C in a terminal: its processes have their own sessions."""
        self._process.send_signal(number)

    def kill_everything(self) -> list[psutil.Process]:
        """Kill the whole process tree with SIGKILL, the node daemon last. Return the processes."""
        family = self.family()
        family[0].suspend()  # otherwise it would report the first deaths before its own
        for process in reversed(family):
            with suppress(psutil.NoSuchProcess):  # it has died with its parent
                process.kill()
        return family

    def family(self) -> list[psutil.Process]:
        """Return the command's process and all its descendants."""
        daemon = psutil.Process(self._process.pid)
        return [daemon, *daemon.children(recursive=True)]

    def process_of(self, module: str) -> psutil.Process:
        """Return the process of the command's own that runs a Python module."""
        for process in psutil.Process(self._process.pid).children():
            with suppress(psutil.Error):  # it ended meanwhile
                if module in process.cmdline():
                    return process
        raise AssertionError(f"no process runs {module}")

    def living(self) -> list[str]:
        """Return the names of live processes that the log has reported."""
        children = {child.pid for child in psutil.Process(self._process.pid).children() if _lives(child)}
        return [name for name, pid in self.log.pids.items() if pid in children]


class Run:
    """One run in its own directory. The default is a small run of the laptop topology."""

    def __init__(
        self,
        directory: Path,
        *,
        num_steps: int,
        eval_interval: int | None = 10,
        overrides: Sequence[str] = (),
        settings: Sequence[str] = SMALL,
        topology: Path = LAPTOP,
        paced: bool = True,
    ) -> None:
        """Plan a run.

        Args:
            directory: The run is in runs/NAME of it.
            num_steps: Number of train steps.
            eval_interval: Train steps between two evaluations.
            overrides: Further settings.
            settings: The settings instead of those of a small run.
            topology: The topology's file.
            paced: Whether the run waits for a test that reads its log.
        """
        own = [f"run.name={NAME}"]
        own += [] if eval_interval is None else [f"eval.0.interval={eval_interval}"]
        self.directory = directory / "runs" / NAME
        self.output = directory / "output.txt"
        self._file = topology
        self._settings = (*settings, *own, *overrides)
        self._cwd = directory
        self._paced = paced
        self.plan_steps(num_steps)

    def plan_steps(self, num_steps: int) -> None:
        """Set the number of train steps for the next start."""
        settings = (*self._settings, f"train.num_steps={num_steps}")
        self.num_steps = num_steps
        self.topology = load_topology(self._file, settings).topology
        self.command = [*COMMAND, str(self._file), *(word for setting in settings for word in ("--set", setting))]

    def rows(self) -> list[dict[str, Any]]:
        """Read the metrics, one row per step."""
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    @asynccontextmanager
    async def started(self, *, from_seq: int = 1) -> AsyncGenerator[Command]:
        """Start or resume the run for the duration of the block. Processes left at its end are killed.

        Args:
            from_seq: Log sequence at which to start reading.
        """
        file = self.directory / "bus.url"
        before_ns = file.stat().st_mtime_ns if file.exists() else 0
        pace = Pace(self._cwd / "pace" if self._paced else None)
        pace.free()
        with self.output.open("ab") as output, self._told_on_failure():
            process = await anyio.open_process(
                self.command,
                cwd=self._cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **pace.environment()},
            )
            try:
                await eventually(
                    lambda: process.returncode is not None or (file.exists() and file.stat().st_mtime_ns > before_ns),
                    timeout_s=EVENT_S,
                )
                assert process.returncode is None, f"the command ended with {process.returncode}"
                async with AsyncExitStack() as stack:
                    bus = await stack.enter_async_context(
                        Bus.connect(file.read_text().strip(), NAME, name="test", limits=LIMITS)
                    )
                    events = await stack.enter_async_context(bus.read(from_seq=from_seq))
                    yield Command(process, bus, Log(events, process, pace), pace)
            finally:
                if process.returncode is None:
                    process.kill()
                with anyio.CancelScope(shield=True):
                    await process.aclose()

    async def gone(self, family: Sequence[psutil.Process] = ()) -> None:
        """Wait until no process of the run is left, and none of the given processes."""
        mark = f"@{self.directory.resolve()}"
        await eventually(
            lambda: not guardian.find(mark) and not any(_lives(process) for process in family), timeout_s=EVENT_S
        )

    @asynccontextmanager
    async def reopened(self) -> AsyncGenerator[Bus]:
        """Open the bus of an ended run: a server on its store."""
        settings = ServerSettings(store_dir=self.directory / "nats")
        if (settings.store_dir / STORED / RUN_ACCOUNT).exists():  # of a run that other machines reached
            login = Login(user="test", password=Secret("test"))
            settings = msgspec.structs.replace(settings, login=login, accounts=Accounts(run=NAME))
        async with (
            running_server(self._cwd / "reopened", settings) as server,
            Bus.connect(server.url, NAME, name="test", limits=LIMITS) as bus,
        ):
            yield bus

    @contextmanager
    def _told_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            sys.stdout.write(self.output.read_text())  # pytest shows it with the failure
            raise


def _lives(process: psutil.Process) -> bool:
    """Whether a process runs. An orphan that is not reaped yet does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
