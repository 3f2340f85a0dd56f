"""The real command in a directory of its own: started, followed through its log, its processes killed by name.

Nothing here waits for a time to pass. A test waits for events of the run's log; the random moment of a kill is a random
number of further events.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import psutil

from messages import ActorStarted, BatchTrained, Message, RunFinished
from runtime.agent.supervision import guardian
from runtime.bus.bus import Bus
from runtime.bus.events import Events, Received
from runtime.bus.limits import BusLimits
from runtime.bus.nats.server import ServerSettings, running_server
from runtime.settings.load import load_topology
from tests.fixtures.nats import eventually

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, str(ROOT / "bin" / "start_topology.py"))
LAPTOP = ROOT / "topologies" / "laptop.toml"
SEED = os.environ.get("PHYSARUM_CHAOS_SEED", "1")  # another one kills at other moments
LIMITS = BusLimits(connect_timeout_s=120.0, publish_timeout_s=120.0)  # the machine may be busy, the server be killed
EVENT_S = 120.0  # for the next awaited event; a whole restart of a trainer lies in it
END_S = 180.0  # for the rest of a run
LOOK_S = 1.0  # between two looks whether the command still runs

NAME = "r"  # of every run
BATCH_SIZE = 16  # groups of a train step
NUM_SAMPLES = 4  # of a group
EVENTS_PER_STEP = 2 * BATCH_SIZE + 4  # completed and judged groups; issued, batch ready and trained, weights
SMALL = (
    f"rollout.rollout_batch_size={BATCH_SIZE}",
    f"rollout.n_samples_per_prompt={NUM_SAMPLES}",
    "train.save_interval=5",
)


def moments_of(name: str) -> random.Random:
    """Random moments for a test, the same ones each time for a seed."""
    return random.Random(f"{SEED} {name}")


class Log:
    """The run's log while it grows."""

    def __init__(self, events: Events[Message], process: anyio.abc.Process) -> None:
        self.pids: dict[str, int] = {}  # newest process of each name
        self.seq = 0  # of the newest event read
        self.trained = 0  # train steps, replayed ones not counted again
        self.event_s = EVENT_S
        self.finished = False
        self._events = events
        self._process = process

    async def until(self, holds: Callable[[Message], bool]) -> Message:
        """Read to the first event of which something holds."""
        with anyio.fail_after(self.event_s):
            while True:
                received = await self._next()
                if holds(received.message):
                    return received.message

    async def until_trained(self, steps: int) -> None:
        """Read until so many train steps are done."""
        await self.until(lambda event: isinstance(event, BatchTrained) and event.step + 1 >= steps)

    async def until_restarted(self, name: str) -> None:
        """Read until the agent says that it has started a process again."""
        old = self.pids[name]
        await self.until(lambda _: self.pids[name] != old)

    async def pass_over(self, number: int) -> None:
        """Read so many further events."""
        with anyio.fail_after(self.event_s):
            for _ in range(number):
                await self._next()

    async def read_for(self, seconds: float) -> None:
        """Read for so long, or until the run has finished."""
        ends = anyio.current_time() + seconds
        while not self.finished and (left_s := ends - anyio.current_time()) > 0:
            await self._look(min(LOOK_S, left_s))

    def kill(self, name: str) -> None:
        """kill -9 of the newest process of a name."""
        os.kill(self.pids[name], signal.SIGKILL)

    async def _next(self) -> Received[Message]:
        received = None
        while received is None:
            received = await self._look(LOOK_S)
        return received

    async def _look(self, timeout_s: float) -> Received[Message] | None:
        assert self._process.returncode is None, f"the command ended with {self._process.returncode}"
        received = await self._events.next(timeout_s)
        if received is None:
            return None
        self.seq = received.seq
        match received.message:
            case ActorStarted() as started:
                self.pids[started.actor] = started.pid
            case BatchTrained() as trained:
                self.trained = max(self.trained, trained.step + 1)
            case RunFinished():
                self.finished = True
            case _:
                pass
        return received


class Command:
    """A started bin/start-topology and what it started."""

    def __init__(self, process: anyio.abc.Process, bus: Bus, log: Log) -> None:
        self.bus = bus
        self.log = log
        self.end_s = END_S
        self._process = process

    async def end(self) -> int:
        """Wait for its end; return its exit code."""
        with anyio.fail_after(self.end_s):
            return await self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command alone, as a terminal's Ctrl-C reaches it: its processes have their sessions."""
        self._process.send_signal(number)

    def kill_everything(self) -> list[psutil.Process]:
        """kill -9 of the whole tree, the agent last, and the processes that it was."""
        family = self.family()
        family[0].suspend()  # or it tells of the first deaths before its own
        for process in reversed(family):
            with suppress(psutil.NoSuchProcess):  # it has died with its parent
                process.kill()
        return family

    def family(self) -> list[psutil.Process]:
        """The command's process and all below it."""
        agent = psutil.Process(self._process.pid)
        return [agent, *agent.children(recursive=True)]

    def living(self) -> list[str]:
        """Names of the processes that run now, of those that the log has told of."""
        children = {child.pid for child in psutil.Process(self._process.pid).children() if _lives(child)}
        return [name for name, pid in self.log.pids.items() if pid in children]


class Run:
    """One run in a directory of its own: of the laptop topology, small, unless told otherwise."""

    def __init__(
        self,
        directory: Path,
        *,
        num_steps: int,
        eval_interval: int | None = 10,
        overrides: Sequence[str] = (),
        settings: Sequence[str] = SMALL,
        topology: Path = LAPTOP,
    ) -> None:
        own = [f"run.name={NAME}"]
        own += [] if eval_interval is None else [f"eval.0.interval={eval_interval}"]
        self.directory = directory / "runs" / NAME
        self.output = directory / "output.txt"
        self._file = topology
        self._settings = (*settings, *own, *overrides)
        self._cwd = directory
        self.plan_steps(num_steps)

    def plan_steps(self, num_steps: int) -> None:
        """Choose how many train steps the next start has to reach."""
        settings = (*self._settings, f"train.num_steps={num_steps}")
        self.num_steps = num_steps
        self.topology = load_topology(self._file, settings).topology
        self.command = [*COMMAND, str(self._file), *(word for setting in settings for word in ("--set", setting))]

    def rows(self) -> list[dict[str, Any]]:
        """Its metrics, a row a step."""
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    @asynccontextmanager
    async def started(self, *, from_seq: int = 1) -> AsyncGenerator[Command]:
        """Start or resume it, for the duration of a block; what still runs at its end is killed.

        Args:
            from_seq: where in its log to begin to read.
        """
        file = self.directory / "bus.url"
        before_ns = file.stat().st_mtime_ns if file.exists() else 0
        with self.output.open("ab") as output, self._told_on_failure():
            process = await anyio.open_process(
                self.command, cwd=self._cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output
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
                    yield Command(process, bus, Log(events, process))
            finally:
                if process.returncode is None:
                    process.kill()
                with anyio.CancelScope(shield=True):
                    await process.aclose()

    async def gone(self, family: Sequence[psutil.Process] = ()) -> None:
        """Wait until nothing of the run is left, nor of some processes that once belonged to it."""
        mark = f"@{self.directory.resolve()}"
        await eventually(
            lambda: not guardian.find(mark) and not any(_lives(process) for process in family), timeout_s=EVENT_S
        )

    @asynccontextmanager
    async def reopened(self) -> AsyncGenerator[Bus]:
        """The bus of a run that has ended: a server on its store."""
        settings = ServerSettings(store_dir=self.directory / "nats")
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
            sys.stdout.write(self.output.read_text())  # pytest shows it beside the failure
            raise


def _lives(process: psutil.Process) -> bool:
    """Whether it runs: what was orphaned and not yet reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
