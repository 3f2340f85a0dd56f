"""The node agent: runs the processes of one node, follows the run's log, and ends everything together."""

import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec
import structlog

from messages import ActorExited, ActorStarted, GroupCompleted, RunFailed, RunFinished, SegmentsPublished
from runtime.agent.claims.node_claim import NodeClaim, NodeClaimed
from runtime.agent.claims.rundir import BUS_FILE, METRICS_FILE
from runtime.agent.stalls import StallWatch
from runtime.agent.supervision.changes import Change, Exited, GivenUp, Ready, Started
from runtime.agent.supervision.supervisor import Supervision
from runtime.bus.addresses import BUS_URL_VARIABLE, Address
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError, BusUnavailable
from runtime.bus.limits import BusLimits, StreamLimits
from runtime.bus.nats.server import ServerSettings, server_command, wait_ready, write_config
from runtime.exit_codes import EXIT_FENCED, EXIT_INPUT_ERROR
from runtime.failures import leaves
from runtime.files import write_atomically
from runtime.ledger.archive import begun, history
from runtime.report.metrics_file import MetricsFile
from runtime.report.report import Line, Report, RowDone, SampleShown
from runtime.settings.processes import Greets, PortRequest, ProcessSpec, Stage, WhenConfirmed

log = structlog.get_logger()

BUS_PROCESS = "nats-server"
BUS_READY_S = 30.0
BUS_STOP_S = 1.5
CHANGES_BOUND = 1000  # of processes, waiting to be told
STOP_DEADLINE_S = 9.5  # from the wish to stop to the kill of all
SAMPLE_TIMEOUT_S = 10.0
RELEASE_TIMEOUT_S = 1.0
BUS_LIMITS = BusLimits(drain_timeout_s=1.0)  # at the end the server may be gone before

Show = Callable[[str], None]


class NodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one agent has to run."""

    run: str
    node: str
    run_dir: Path
    incarnation: int  # of this agent, counted in the run directory
    num_steps: int
    started: float  # Unix time at which the command was given
    processes: tuple[ProcessSpec, ...]
    server: ServerSettings | None = None  # of the bus, if this node runs it
    bus_url: str | None = None  # of the bus otherwise
    limits: StreamLimits = StreamLimits()
    keeps_metrics: bool = True  # one node of a run does
    stall_after_s: float | None = None  # without any event, before it is said who waits; one node of a run says so
    bus_unresponsive_after_s: float = 60.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended."""

    finished: bool
    stopped_by: int | None = None  # signal
    failure: GivenUp | None = None
    error: str | None = None  # when no process failed but the bus did


class NodeAgent:
    """Runs a node until the run is finished, a process is given up, or a signal asks to stop.

    Args:
        show: prints a line for people.
    """

    def __init__(self, plan: NodePlan, *, show: Show) -> None:
        self._plan = plan
        self._show = show
        self.report = Report(plan.run, plan.num_steps, plan.started)
        self._metrics = MetricsFile(plan.run_dir / METRICS_FILE) if plan.keeps_metrics else None
        self._supervision = Supervision(plan.run_dir, environment=self._environment(), listener=self._on_change)
        send, receive = anyio.create_memory_object_stream[Change](CHANGES_BOUND)
        self._changes, self._changes_to_tell = send, receive
        self._ending = anyio.Event()
        self._outcome: Outcome | None = None
        self._bus_url = plan.bus_url
        self._bus_ready = anyio.Event()

    async def run(self) -> Outcome:
        """Run the node; returns after everything has ended."""
        with self._changes, self._changes_to_tell:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._obey_signals, tasks.cancel_scope)
                await tasks.start(self._supervision.run)
                try:
                    await self._work()
                except* BusError as errors:
                    self._end(Outcome(finished=False, error=f"the bus failed: {leaves(errors)[0]}"))
                except* OSError as errors:  # a full disk, for one
                    self._end(Outcome(finished=False, error=f"the agent failed: {leaves(errors)[0]}"))
                await self._supervision.stop()
                tasks.cancel_scope.cancel()
        for notice in self.report.close():
            self._take(notice)
        return self._outcome or Outcome(finished=False, error="ended without a reason")

    async def _work(self) -> None:
        """Bring the bus and all processes up; return when the end has come and the processes are stopped."""
        if self._plan.server is not None:
            self._supervision.start(self._bus_spec(self._plan.server))
        else:
            self._bus_ready.set()
        await _first_of(self._bus_ready, self._ending)
        if self._ending.is_set() or self._bus_url is None:
            return
        name = f"agent-{self._plan.node}"
        async with Bus.connect(self._bus_url, self._plan.run, name=name, limits=BUS_LIMITS) as bus:
            await bus.ensure_streams(self._plan.limits)
            try:
                claim = await NodeClaim.take(
                    bus, self._plan.node, self._plan.run_dir, incarnation=self._plan.incarnation
                )
            except NodeClaimed as error:
                self._end(Outcome(finished=False, error=str(error)))
                return
            try:
                await self._run_processes(bus, claim)
            finally:
                with anyio.move_on_after(RELEASE_TIMEOUT_S, shield=True), suppress(BusError):
                    await claim.release()

    async def _run_processes(self, bus: Bus, claim: NodeClaim) -> None:
        incarnation = claim.holder.incarnation
        await self._forget_addresses(bus, incarnation)
        for spec in self._plan.processes:
            self._supervision.start(self._told_the_bus(spec, incarnation))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_claim, claim)
            tasks.start_soon(self._tell, bus)
            tasks.start_soon(self._follow, bus, tasks)
            await self._ending.wait()
            await self._supervision.stop(Stage.ACTOR, Stage.SERVICE)
            tasks.cancel_scope.cancel()

    async def _keep_claim(self, claim: NodeClaim) -> None:
        try:
            await claim.keep()
        except NodeClaimed as error:
            self._end(Outcome(finished=False, error=str(error)))

    async def _obey_signals(self, everything: anyio.CancelScope) -> None:
        """The first signal asks for an orderly end, a second one or a passed deadline cancels everything."""
        wanted = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup keeps running
            wanted.append(signal.SIGHUP)
        with anyio.open_signal_receiver(*wanted) as received:
            async for number in received:
                if self._ending.is_set() and self._outcome is not None and self._outcome.stopped_by is not None:
                    everything.cancel()
                    return
                self._show(f"{number.name}: stopping; once more to stop at once")
                self._end(Outcome(finished=False, stopped_by=number))
                everything.deadline = anyio.current_time() + STOP_DEADLINE_S

    def _end(self, outcome: Outcome) -> None:
        """The first reason to end counts, except that a person's wish outdoes what it interrupts."""
        if self._outcome is None or (outcome.stopped_by is not None and not self._outcome.finished):
            self._outcome = outcome
        self._ending.set()

    def _on_change(self, change: Change) -> None:
        self._log_change(change)
        match change:
            case GivenUp():
                if change.exit_code == EXIT_FENCED:
                    self._show(f"{change.spec.name} is not started again: another process does its work")
                elif change.spec.critical and not self._ending.is_set():
                    self._end(Outcome(finished=False, failure=change))
                return
            case Ready() if change.spec.name == BUS_PROCESS and not self._bus_ready.is_set():
                self._bus_url = f"nats://{change.host}:{change.port}"
                write_atomically(self._plan.run_dir / BUS_FILE, f"{self._bus_url}\n".encode())
                self._bus_ready.set()
            case _:
                pass
        try:
            self._changes.send_nowait(change)
        except (anyio.WouldBlock, anyio.ClosedResourceError, anyio.BrokenResourceError):
            log.warning("change_not_told", process=change.spec.name)

    def _log_change(self, change: Change) -> None:
        fields = {key: value for key, value in msgspec.structs.asdict(change).items() if key not in ("spec", "tail")}
        log.info("process_changed", process=change.spec.name, change=type(change).__name__.lower(), **fields)

    async def _tell(self, bus: Bus) -> None:
        """Publish what happens to processes, and where those that serve are found."""
        async for change in self._changes_to_tell:
            name, node = change.spec.name, self._plan.node
            match change:
                case Started():
                    await _insist(
                        bus.publish, ActorStarted(actor=name, node=node, pid=change.pid, restarts=change.restarts)
                    )
                case Exited():
                    event = ActorExited(
                        actor=name,
                        node=node,
                        pid=change.pid,
                        exit_code=change.exit_code,
                        reason=change.reason,
                        restart_in_s=change.restart_in_s,
                    )
                    await _insist(bus.publish, event)
                case Ready() if change.spec.address_key is not None:
                    address = Address(url=f"http://{change.host}:{change.port}")
                    await _insist(bus.kv.put, change.spec.address_key, address)
                case _:
                    pass

    async def _forget_addresses(self, bus: Bus, incarnation: int) -> None:
        """An earlier agent's servers are gone."""
        if incarnation == 1:
            return
        for spec in self._plan.processes:
            if spec.address_key is not None:
                await bus.kv.delete(spec.address_key)

    async def _follow(self, bus: Bus, tasks: anyio.abc.TaskGroup) -> None:
        """Fold the run's history; show what happened since the start."""
        watch = self._watch(bus, tasks)
        begins = await begun(bus, self._plan.run_dir)
        if begins is not None:
            self.report.begin(begins)
        async with history(bus, self._plan.run_dir, buries=True) as events:
            async for received in events.follow():
                if watch is not None:
                    watch.happened(received.message)
                message, moment, steps = received.message, received.time.timestamp(), self.report.steps
                live = moment >= self._plan.started
                for notice in self.report.apply(message, received.seq, moment):
                    if isinstance(notice, SampleShown):
                        tasks.start_soon(self._show_sample, bus, notice)
                    elif live or isinstance(notice, RowDone):
                        self._take(notice)
                if self.report.steps > steps:
                    self._supervision.progress()
                if isinstance(message, RunFinished) and (live or message.steps >= self._plan.num_steps):
                    self._end(Outcome(finished=True))  # an earlier start may have finished with fewer steps to do
                elif isinstance(message, RunFailed) and live:
                    self._end(Outcome(finished=False, error=message.reason))

    def _watch(self, bus: Bus, tasks: anyio.abc.TaskGroup) -> StallWatch | None:
        plan = self._plan
        if plan.stall_after_s is None:
            return None
        actors = [name for spec in plan.processes if spec.stage is Stage.ACTOR for name in spec.name.split("+")]
        watch = StallWatch(bus, plan.stall_after_s, actors)
        tasks.start_soon(watch.run)
        return watch

    def _take(self, notice: Any) -> None:
        match notice:
            case Line(text):
                self._show(text)
            case RowDone(row) if self._metrics is not None:
                self._metrics.put(row)
            case _:
                pass

    async def _show_sample(self, bus: Bus, shown: SampleShown) -> None:
        with anyio.move_on_after(SAMPLE_TIMEOUT_S):
            async with bus.read(GroupCompleted, from_seq=shown.seq) as events:
                received = await events.next()
            if received is None or received.seq != shown.seq:
                return  # trimmed meanwhile
            group, sample = received.message, received.message.samples[0]
            try:
                published = [await bus.fetch(SegmentsPublished, ref.seq) for ref in sample.segments]
                first = published[0]
                cited = zip(published, sample.segments, strict=True)
                response = "".join(message.segments[ref.position].text for message, ref in cited)
            except (BusError, IndexError) as error:
                self._show(f"the {shown.which} sample cannot be shown: {error}")
                return
            reward = "none" if sample.reward is None else f"{sample.reward:g}"
            tokens = f"{sample.prompt_len} + {sample.response_len} tokens"
            told = f"group {group.group_id}, {sample.status}, reward {reward}, weights v{sample.last_version}, {tokens}"
            self._show(f"{shown.which} sample: {told}")
            self._show(f"  prompt    {first.prompt!r}")
            self._show(f"  response  {response!r}")
            self._show(f"  label     {first.label!r}")

    def _bus_spec(self, server: ServerSettings) -> ProcessSpec:
        directory = self._plan.run_dir / "bus"
        config = write_config(directory / "nats.conf", server)
        for leftover in directory.glob("*.ports"):  # of servers that were killed; a new one may get an old process id
            leftover.unlink()

        async def is_ready(pid: int) -> None:
            with suppress(BusUnavailable):
                await wait_ready(directory, pid, timeout_s=BUS_READY_S)
                return
            await anyio.sleep_forever()  # it has ended, or the deadline of its start will end it

        fixed = server.port if server.port > 0 else None
        return ProcessSpec(
            name=BUS_PROCESS,
            command=(*server_command(config, directory), "--port", "{port}"),
            port=PortRequest(host=server.host, fixed=fixed, preferred=self._last_bus_port(), kept=True),
            ready=WhenConfirmed(is_ready),
            ready_timeout_s=BUS_READY_S,
            probe=Greets(),
            unresponsive_after_s=self._plan.bus_unresponsive_after_s,
            stage=Stage.BUS,
            stop_timeout_s=BUS_STOP_S,
        )

    def _last_bus_port(self) -> int | None:
        path = self._plan.run_dir / BUS_FILE
        port = path.read_text().strip().rpartition(":")[2] if path.exists() else ""
        return int(port) if port.isdigit() else None

    def _environment(self) -> dict[str, str]:
        plan = self._plan
        return {
            "PHYSARUM_RUN": plan.run,
            "PHYSARUM_RUN_DIR": str(plan.run_dir),
            "PHYSARUM_NODE": plan.node,
        }

    def _told_the_bus(self, spec: ProcessSpec, incarnation: int) -> ProcessSpec:
        env = {BUS_URL_VARIABLE: self._bus_url or "", "PHYSARUM_PROCESS": spec.name, **spec.env}
        env["PHYSARUM_INCARNATION"] = str(incarnation)
        return msgspec.structs.replace(spec, env=env)


async def _first_of(*events: anyio.Event) -> None:
    async with anyio.create_task_group() as tasks:

        async def wait(event: anyio.Event) -> None:
            await event.wait()
            tasks.cancel_scope.cancel()

        for event in events:
            tasks.start_soon(wait, event)


async def _insist(action: Callable[..., Awaitable[object]], *arguments: Any) -> None:
    """Do it, however long the bus is away; each attempt waits out its own deadline."""
    while True:
        try:
            await action(*arguments)
        except BusError as error:
            log.warning("telling_failed", error=str(error))
        else:
            return


def command_started() -> float:
    """Unix time at which this process began, also if the command was another program that became this one by exec."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def exit_code_of(outcome: Outcome) -> int:
    """0 finished, 1 failed, 2 wrong input, 128 + signal when stopped."""
    if outcome.finished:
        return 0
    if outcome.stopped_by is not None:
        return 128 + outcome.stopped_by
    if outcome.failure is not None and outcome.failure.exit_code == EXIT_INPUT_ERROR:
        return EXIT_INPUT_ERROR
    return 1
