"""The node daemon: runs the processes of one node, and stops everything together."""

import os
import signal
import sys
from contextlib import suppress
from functools import partial

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
import structlog

from messages import CheckpointCopiesRequested, KillAnswered, KillRequested, LocalCopyRequested, Message, Plane
from runtime.bus.addresses import engine_key, host_port
from runtime.bus.background import in_background
from runtime.bus.bus import Bus
from runtime.bus.calls import Handler
from runtime.bus.errors import BusError
from runtime.bus.limits import BusLimits, over_network
from runtime.bus.nats.server import ServerSettings
from runtime.node.acceptance import Acceptance, NodeStatement
from runtime.node.bus_server import BUS_PROCESS, bus_process, invite
from runtime.node.claims.home import HomeClaimed, HomeLease, HomeMoved, LeaseUnreadable
from runtime.node.claims.node_claim import NodeClaim, NodeClaimed
from runtime.node.claims.run_id import RunMismatch, check_run_id, settle_run_id
from runtime.node.claims.rundir import BUS_FILE
from runtime.node.claims.started import note_start
from runtime.node.copying import COPIES, LocalCopies
from runtime.node.display import Show
from runtime.node.environment import environment_of, with_secrets
from runtime.node.external_clients import ClientsUnreadable, ServerAccounts
from runtime.node.group_starts import group_starts
from runtime.node.join import JOIN_FILE
from runtime.node.node_plan import NodePlan, RunEnd, announcement
from runtime.node.node_room import NodeRoom
from runtime.node.other_nodes import OtherNodes
from runtime.node.outage import Outage, explains_silence, watch_bus
from runtime.node.page_url import show_page
from runtime.node.reopen import STORE
from runtime.node.reporting import Reporting
from runtime.node.run_log import Follower, Publisher, begin_of_home, forget_addresses, note_begin_of_home
from runtime.node.stalls import StallWatch
from runtime.node.supervisor.state_changes import STOPPED, Change, Exited, GivenUp, Ready, Silent
from runtime.node.supervisor.supervision import Supervision
from runtime.settings.placement import LOOPBACK
from runtime.settings.processes import Tier
from runtime.settings.tables.observe import PAGE, PAGE_FILE
from runtime.util.disk import free_bytes, is_full, no_space, no_space_of, stored_bytes
from runtime.util.errors import flatten
from runtime.util.exit_codes import EXIT_FENCED
from runtime.util.files import write_atomically
from runtime.util.secrets import Secret, split_login, with_login, without_logins
from runtime.util.threads import BoundedThreads

log = structlog.get_logger()

CHANGES_BOUND = 1000  # process changes waiting to be published
LOOK_AT_DISK_S = 1.0
DISK_TIMEOUT_S = 5.0
STOP_DEADLINE_S = 9.5  # from the stop signal until everything is killed
PUBLISH_TIMEOUT_S = 1.0  # for publishing the last process changes
RELEASE_TIMEOUT_S = 1.0
SHOW_WAIT_AFTER_S = 2.0  # of the end of trackers
BUS_LIMITS = BusLimits(drain_timeout_s=1.0)  # at the end the server may already be gone


class NodeDaemon:
    """Runs a node until the run is finished, a process is given up, or a signal stops it.

    Args:
        show: prints a line for the user.
        rewrite: replaces the last printed line, on a terminal.
        comparison: of the nodes: at home, accepts and refuses the others; elsewhere, states this node's facts.
        disk_timeout_s: seconds after which the free bytes of a disk that does not answer count as unknown.
    """

    def __init__(
        self,
        plan: NodePlan,
        *,
        show: Show,
        rewrite: Show | None = None,
        comparison: Acceptance | NodeStatement | None = None,
        disk_timeout_s: float = DISK_TIMEOUT_S,
    ) -> None:
        self._plan = plan
        self._disk_timeout_s = disk_timeout_s
        self._disk_threads = BoundedThreads(1)
        self._is_terminal = rewrite is not None
        self.reporting = Reporting(plan, show=show, rewrite=rewrite)
        self._show = self.reporting.display.show
        self._supervision = Supervision(
            plan.run_dir,
            environment=environment_of(plan, os.environ),
            listener=self._on_change,
            node=plan.node,
            log_dir=plan.log_dir,
            address=LOOPBACK if plan.address is None else plan.address.ip,
        )
        self._others = OtherNodes(
            plan, comparison, show=self._show, end=self._end, has_trained=lambda: self._follower.has_trained
        )
        self._follower = Follower(
            plan,
            self.reporting,
            progress=self._supervision.progress,
            end=self._end,
            started=self._others.started,
            lost=self._others.lost,
        )
        self._room = NodeRoom(plan, self._show)
        send, receive = anyio.create_memory_object_stream[Change](CHANGES_BOUND)
        self._changes, self._unpublished_changes = send, receive
        self._all_published = anyio.Event()
        self._ending = anyio.Event()
        self._failed_observers: set[str] = set()
        self._outcome: RunEnd | None = None
        self._bus_url = None if plan.bus_url is None else Secret(with_login(plan.bus_url, plan.bus_login))
        self._bus_ready = anyio.Event()
        self._accounts: ServerAccounts | None = None
        own = None if plan.server is None else plan.server.certificate
        self._certificate = plan.bus_certificate if own is None else own.pem()

    async def run(self) -> RunEnd:
        """Run the node until everything has ended."""
        async with anyio.create_task_group() as showing:
            showing.start_soon(self.reporting.display.run)
            await self._run()
            self.reporting.close()
            await self.reporting.display.close()
            showing.cancel_scope.cancel()
        return self._outcome or RunEnd(finished=False, error="ended without a reason")

    async def _run(self) -> None:
        with self._changes, self._unpublished_changes:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._obey_signals, tasks.cancel_scope)
                tasks.start_soon(self._watch_disk)
                await tasks.start(self._supervision.run)
                self._supervision.template.prepare(self._plan.processes)
                try:
                    await self._work()
                except* BusError as errors:
                    self._end(RunEnd(finished=False, error=f"the bus failed: {flatten(errors)[0]}"))
                except* OSError as errors:  # such as a full disk
                    self._end(RunEnd(finished=False, error=self._failure_of(flatten(errors)[0])))
                await self._supervision.stop()
                await self._stop_observers()
                tasks.cancel_scope.cancel()

    async def _stop_observers(self) -> None:
        """Write the last row of metrics and let the trackers log it. A signal's deadline ends the wait too."""
        if not (names := self._supervision.observers()):
            return
        self.reporting.close()
        waiting = f"waiting for {', '.join(names)} to send the rest"
        async with in_background(partial(self._show_after, SHOW_WAIT_AFTER_S, waiting)):
            await self._supervision.stop_observers()

    async def _show_after(self, seconds: float, line: str) -> None:
        await anyio.sleep(seconds)
        self._show(line)
        await anyio.sleep_forever()

    def _failure_of(self, error: BaseException) -> str:
        return str(no_space_of(error, self._plan.run_dir)) if is_full(error) else f"the node daemon failed: {error}"

    async def _watch_disk(self) -> None:
        """End the run when disk space is low, while processes and the bus can still store pending data."""
        plan = self._plan
        while (free := await self._free_bytes()) >= plan.min_free_bytes:
            with anyio.move_on_after(LOOK_AT_DISK_S):
                await self._ending.wait()
                return
        stored = stored_bytes(plan.run_dir / STORE)
        needed = plan.min_free_bytes + max(0, plan.stream_bytes - stored)
        log.error("no_space", free_bytes=free, needed_bytes=needed)
        self._end(RunEnd(finished=False, error=str(no_space(plan.run_dir, needed))))

    async def _free_bytes(self) -> int:
        """Return the free bytes of the run directory's disk; sys.maxsize while the disk does not answer."""
        try:
            with anyio.fail_after(self._disk_timeout_s):  # a network disk may hang, the event loop must not
                return await self._disk_threads.run(partial(free_bytes, self._plan.run_dir))
        except OSError as error:  # a TimeoutError is one
            log.warning("disk_unknown", path=str(self._plan.run_dir), reason=str(error) or "no answer")
            return sys.maxsize

    async def _work(self) -> None:
        """Start the bus and all processes; return after the run ended and the processes are stopped."""
        if not self._plan.leases_home:
            await self._run_on_bus()
            return
        try:
            lease = await HomeLease.take(self._plan.run_dir, self._plan.node, take_over=self._plan.takes_over)
        except (HomeClaimed, LeaseUnreadable) as error:
            self._end(RunEnd(finished=False, refused=str(error)))
            return
        async with in_background(lambda: self._keep_home(lease)):
            try:
                await self._run_on_bus()
            finally:
                await self._supervision.stop()  # the bus too, before another home may start one on its store
        with anyio.move_on_after(RELEASE_TIMEOUT_S):  # otherwise it expires
            await lease.release()

    async def _keep_home(self, lease: HomeLease) -> None:
        try:
            await lease.keep()
        except HomeMoved as error:
            log.error("home_moved", error=str(error))
            self._end(RunEnd(finished=False, error=str(error), is_announced=True))
            self._supervision.kill()  # two servers would write one store

    async def _run_on_bus(self) -> None:
        if self._plan.server is not None:
            (self._plan.run_dir / JOIN_FILE).unlink(missing_ok=True)  # of an earlier start
            await self._start_server(self._plan.server)
        elif self._bus_url is not None:
            self._found_bus(self._bus_url)
        await _first_of(self._bus_ready, self._ending)
        if self._ending.is_set() or self._bus_url is None:
            return
        name, limits = f"daemon-{self._plan.node}", over_network(BUS_LIMITS, self._plan.outage_s)
        async with Bus.connect(
            self._bus_url.reveal(), self._plan.run, name=name, limits=limits, certificate=self._certificate
        ) as bus:
            try:
                claim = await self._claimed(bus)
            except NodeClaimed as error:
                self._end(RunEnd(finished=False, error=str(error)))
                return
            except RunMismatch as error:
                self._end(RunEnd(finished=False, refused=str(error)))
                return
            try:
                await self._run_processes(bus, claim)
            finally:
                with anyio.move_on_after(RELEASE_TIMEOUT_S, shield=True), suppress(BusError):
                    await claim.release()

    async def _start_server(self, server: ServerSettings) -> None:
        """Start the NATS server with the accounts of external clients. No other server has its store."""
        self._accounts = ServerAccounts(
            self._plan.run, self._plan.run_dir / "bus", server, self._plan.graders, self._show
        )
        try:
            settings = await anyio.to_thread.run_sync(self._accounts.settings)
        except ClientsUnreadable as error:
            self._end(RunEnd(finished=False, refused=str(error)))
            return
        self._supervision.start(bus_process(self._plan, settings))

    async def _claimed(self, bus: Bus) -> NodeClaim:
        """Claim this node, after checking that run directory and streams belong together."""
        plan = self._plan
        await check_run_id(bus, plan.run_dir, owns=plan.owns_streams)
        await bus.ensure_streams(plan.limits)
        claim = await NodeClaim.take(bus, plan.node, plan.run_dir, incarnation=plan.incarnation)
        try:
            run_id = await settle_run_id(bus, plan.run_dir, owns=plan.owns_streams)
            await note_start(plan.run_dir, run_id)
            if plan.owns_streams:
                await bus.ensure_score_queues(plan.graders)
            if self._bus_url is not None:
                incarnation = claim.holder.incarnation
                invite(plan, self._bus_url, self._certificate, run_id=run_id, incarnation=incarnation)
        except (RunMismatch, OSError):
            await claim.release()
            raise
        return claim

    async def _run_processes(self, bus: Bus, claim: NodeClaim) -> None:
        incarnation = claim.holder.incarnation
        if incarnation > 1:
            await forget_addresses(bus, self._plan.processes)
        await self._begin(bus, incarnation)
        await self._others.open(bus)  # now later events are of this start
        if self._others.are_refused:
            refusing = partial(self._room.run, bus, refuses=True)
            async with in_background(partial(self._others.refuse_all, bus)), in_background(refusing):
                await self._ending.wait()
            return
        key = await engine_key(bus.kv)
        agreements = group_starts(bus, self._plan.node, self._plan.processes, self._show)
        if has_page := any(spec.name == PAGE for spec in self._plan.processes):
            (self._plan.run_dir / PAGE_FILE).unlink(missing_ok=True)  # of a start that was killed
        for spec in self._plan.processes:
            agreement = spec.restart_group and agreements.get(spec.restart_group.name)
            started = with_secrets(spec, incarnation, key, self._bus_url, self._certificate)
            self._supervision.start(started, agreement)
        handlers: dict[type[Message], Handler] = {
            KillRequested: partial(self._kill, bus),
            LocalCopyRequested: LocalCopies(self._plan.run_dir / COPIES / self._plan.node, self._room).answer,
            CheckpointCopiesRequested: self._room.copies.answer,
        }
        async with bus.serve(handlers), anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_claim, claim)
            tasks.start_soon(self._publish_changes, bus)
            tasks.start_soon(self._room.run, bus)
            if has_page:
                show_page_lines = partial(show_page, shows_secret=self._is_terminal)
                tasks.start_soon(show_page_lines, self._plan.run_dir, self._plan.run, self._show)
            if self._accounts is not None and self._bus_url is not None:
                url, _ = split_login(self._bus_url.reveal())
                reload = partial(self._supervision.reload, BUS_PROCESS)
                tasks.start_soon(self._accounts.run, url, self._certificate, reload)
            for each in agreements.values():
                tasks.start_soon(each.run)
            tasks.start_soon(self.reporting.run, bus)
            tasks.start_soon(self._follower.follow, bus, self._watch(bus, tasks))
            if not self._plan.owns_streams:
                tasks.start_soon(self._follower.watch_end, bus)
            tasks.start_soon(self._others.run, bus)
            if self._plan.outage_s:
                outage = Outage(without_logins(self._plan.bus_url or ""), self._plan.outage_s)
                tasks.start_soon(watch_bus, bus, outage, self._show, self._end_without_bus)
            await self._ending.wait()
            async with anyio.create_task_group() as ending:
                ending.start_soon(self._announce_end, bus)
                await self._supervision.stop(Tier.ACTOR, Tier.SERVICE)
            await self._others.wait_until_left(bus)
            self._changes.close()
            with anyio.move_on_after(PUBLISH_TIMEOUT_S):
                await self._all_published.wait()
            await self.reporting.finish()
            tasks.cancel_scope.cancel()

    async def _begin(self, bus: Bus, incarnation: int) -> None:
        """Note where this start begins in the log, before any of its processes writes."""
        first_seq = (await bus.state(Plane.EVENT)).last_seq + 1
        if self._plan.owns_streams:
            await note_begin_of_home(bus, incarnation, first_seq)
            self._follower.begin_at(first_seq)
        else:
            self._follower.begin_at(min(first_seq, await begin_of_home(bus, self._plan.home) or first_seq))
        self.reporting.begin_at(first_seq)

    async def _announce_end(self, bus: Bus) -> None:
        """Inform the other nodes, before the bus ends with the home node."""
        assert self._outcome is not None
        event = announcement(self._outcome, self._plan.node, is_home=self._plan.owns_streams)
        if event is None:
            return
        with anyio.move_on_after(PUBLISH_TIMEOUT_S):
            try:
                await bus.publish(event)
            except BusError as error:
                log.warning("end_not_published", error=str(error))

    async def _publish_changes(self, bus: Bus) -> None:
        await Publisher(bus, self._plan.node).run(self._unpublished_changes)
        self._all_published.set()

    async def _kill(self, bus: Bus, request: KillRequested) -> KillAnswered:
        """Kill a server on request: a rollout actor detects what no probe shows, such as that it generates nothing.

        Not just after an outage of the network: that is what the actor may have seen.
        """
        if self._plan.outage_s and explains_silence(bus.back_s):
            log.warning("kill_refused", process=request.process, reason=request.reason, bus_back_s=bus.back_s)
            return KillAnswered(killed=False)
        reason = f"node {self._plan.node}: {request.reason}" if request.gives_up else request.reason
        killed = self._supervision.kill_process(request.process, request.pid, reason, gives_up=request.gives_up)
        log.warning("kill_requested", process=request.process, pid=request.pid, reason=request.reason, killed=killed)
        return KillAnswered(killed=killed)

    async def _keep_claim(self, claim: NodeClaim) -> None:
        try:
            await claim.keep()
        except NodeClaimed as error:  # its new daemon carries on
            self._end(RunEnd(finished=False, error=str(error), is_announced=True))

    def _end_without_bus(self, reason: str) -> None:
        self._end(RunEnd(finished=False, error=f"the bus failed: {reason}", is_announced=True))

    async def _obey_signals(self, everything: anyio.CancelScope) -> None:
        """Stop in order at the first signal; cancel everything at the second one or after a deadline."""
        wanted = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup keeps running
            wanted.append(signal.SIGHUP)
        is_stopping = False
        with anyio.open_signal_receiver(*wanted) as received:
            async for number in received:
                if is_stopping:
                    everything.cancel()
                    return
                is_stopping = True
                self._show(f"{number.name}: stopping; send it again to stop at once")
                self._end(RunEnd(finished=False, stopped_by=number))
                everything.deadline = anyio.current_time() + STOP_DEADLINE_S

    def _end(self, outcome: RunEnd) -> None:
        """End the run. The first reason counts, except that a stop by the user overrides a failure."""
        if self._outcome is None or (outcome.stopped_by is not None and not self._outcome.finished):
            self._outcome = outcome
        self._ending.set()

    def _on_change(self, change: Change) -> None:
        self._log_change(change)
        if change.spec.tier is Tier.OBSERVER:
            self._show_observer(change)
            return
        match change:
            case GivenUp():
                if change.exit_code == EXIT_FENCED:
                    self._show(f"{change.spec.name} is not started again: another process does its work")
                elif not self._ending.is_set() and not self._others.goes_on_without(change):
                    self._end(RunEnd(finished=False, failure=change))
                return
            case Silent():
                self._show(_silence_line(change))
                return
            case Ready() if change.spec.name == BUS_PROCESS and not self._bus_ready.is_set():
                login = None if self._plan.server is None else self._plan.server.login
                scheme = "nats" if self._certificate is None else "tls"
                url = f"{scheme}://{host_port(change.host or LOOPBACK, change.port or 0)}"
                self._found_bus(Secret(with_login(url, login)))
            case _:
                pass
        try:
            self._changes.send_nowait(change)
        except anyio.ClosedResourceError:  # the bus itself ends, so nothing can be published
            return
        except (anyio.WouldBlock, anyio.BrokenResourceError):
            log.warning("change_not_published", process=change.spec.name)

    def _show_observer(self, change: Change) -> None:
        """Show a tracker's first failure and its end. The run's log has neither: the run goes on without it."""
        name = change.spec.name
        match change:
            case Exited(reason=reason, exit_code=code) if reason == STOPPED and code == -signal.SIGKILL:
                limit_s = change.spec.stop_timeout_s
                self._show(
                    f"{name} was killed after {limit_s:g} s (observe.stop_timeout_s); the next start sends the rest"
                )
            case Exited(restart_in_s=float()) if name not in self._failed_observers:
                self._failed_observers.add(name)
                self._show(f"{name} ended and is started again: {change.reason}; the run goes on")
            case GivenUp():
                self._show(f"{name} is off until the next start: {change.reason}; the run goes on ({change.log})")
            case _:
                pass

    def _found_bus(self, url: Secret) -> None:
        """Store the URL of the bus, which is up, in the run directory, readable by its owner only."""
        self._bus_url = url
        if not self._plan.owns_streams:  # the directory may be shared, and the file is of the node with the bus
            self._bus_ready.set()
            return
        try:
            write_atomically(self._plan.run_dir / BUS_FILE, f"{url.reveal()}\n".encode())
        except OSError as error:
            self._end(RunEnd(finished=False, error=self._failure_of(error)))
            return
        self._bus_ready.set()

    def _log_change(self, change: Change) -> None:
        fields = {key: value for key, value in msgspec.structs.asdict(change).items() if key not in ("spec", "tail")}
        log.info("process_changed", process=change.spec.name, change=type(change).__name__.lower(), **fields)

    def _watch(self, bus: Bus, tasks: anyio.abc.TaskGroup) -> StallWatch | None:
        plan = self._plan
        if plan.stall_after_s is None:
            return None
        actors = [name for spec in plan.processes if spec.tier is Tier.ACTOR for name in spec.name.split("+")]
        watch = StallWatch(bus, plan.stall_after_s, actors)
        tasks.start_soon(watch.run)
        return watch


async def _first_of(*events: anyio.Event) -> None:
    async with anyio.create_task_group() as tasks:

        async def wait(event: anyio.Event) -> None:
            await event.wait()
            tasks.cancel_scope.cancel()

        for event in events:
            tasks.start_soon(wait, event)


def _silence_line(change: Silent) -> str:
    name, limit_s = change.spec.name, change.spec.unresponsive_after_s
    if change.answers:
        return f"{name} answers again, after about {change.silent_s:.0f} s"
    return (
        f"{name} has shown no sign of life for {change.silent_s:.0f} s; after {limit_s:g} s it is killed and restarted"
    )
