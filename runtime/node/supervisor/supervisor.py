"""Supervises one process: starts it, watches it, and starts it again."""

import os
import signal
from collections.abc import Mapping
from functools import partial

import anyio

from runtime.node.supervisor import guardian
from runtime.node.supervisor.heartbeats import Block, Heartbeats, wait_until_still
from runtime.node.supervisor.output import OutputLog, is_interrupt
from runtime.node.supervisor.ports import PortInUse, ReadyServers, choose_port
from runtime.node.supervisor.readiness import wait_until_ready, wait_until_silent
from runtime.node.supervisor.restarts import RestartBudget, RestartGroup
from runtime.node.supervisor.spawn import Child
from runtime.node.supervisor.state_changes import (
    LASTING,
    STOPPED,
    Blocked,
    Exited,
    GivenUp,
    Listener,
    Ready,
    Silent,
    Started,
    describe_exit,
)
from runtime.node.supervisor.template import Template
from runtime.process.heartbeat import PULSE_VARIABLE
from runtime.settings.devices import with_own_gpus
from runtime.settings.placement import LOOPBACK
from runtime.settings.processes import NotReady, ProcessSpec, SendsHeartbeats, with_address
from runtime.util.exit_codes import EXIT_INPUT_ERROR, EXIT_NOT_STARTED
from runtime.util.formatting import count_of
from runtime.util.stacks import Culprit, culprit

DRAIN_S = 1.0  # for the last output of a process that ended

ENDED_FROM_OUTSIDE = (
    *(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)),
    *(128 + number for number in (signal.SIGTERM, signal.SIGINT)),
)


class Supervisor:
    """Runs one process, with restarts, until it is stopped or given up."""

    def __init__(
        self,
        spec: ProcessSpec,
        *,
        log: OutputLog,
        environment: Mapping[str, str],
        listener: Listener,
        restart_group: RestartGroup | None = None,
        template: Template,
        servers: ReadyServers | None = None,
        address: str = LOOPBACK,
    ) -> None:
        self.spec = spec
        self._template = template
        self._address = address
        self._servers = servers or ReadyServers()
        self._came_up = True  # the last process became ready, if there was one
        self._restart_group = restart_group
        self._ended_with = ""  # the other process of the restart group that ended first
        if restart_group is not None:
            restart_group.join(spec.name, self._end_with)
        self.restarts = 0
        self._log = log
        self._base_environment = environment
        self._guard = template.guard
        self._announce = listener
        self._budget = RestartBudget(spec.max_restarts)
        self._stop_requested = anyio.Event()
        self._ended = anyio.Event()
        self._child: Child | None = None
        self._heartbeats = Heartbeats() if isinstance(spec.probe, SendsHeartbeats) else None
        self._port: int | None = None
        self._late = ""  # why the wait for readiness ended, if it failed
        self._silent = False  # it stopped answering probes
        self._blocked_by = Culprit()  # what blocked its event loop last, if it still does
        self._silent_s = 0.0  # without a sign of life, if it was named for that
        self._killed_for = ""  # reason of a kill request
        self._gives_up = False  # the process of that request is not restarted
        self._began = 0.0  # start of the process, on the event loop's clock

    async def run(self) -> None:
        """Start the process and restart it until it is stopped or given up."""
        try:
            delay_s: float | None = 0.0
            while delay_s is not None and not self._stop_requested.is_set():
                delay_s = await self._run_once()
                if delay_s is not None:
                    self.restarts += 1
                    with anyio.move_on_after(delay_s):
                        await self._stop_requested.wait()
        finally:
            if self._heartbeats is not None:
                self._heartbeats.close()
            self._log.close()
            self._ended.set()

    @property
    def runs(self) -> bool:
        """Whether the process runs, or is started again."""
        return not self._ended.is_set()

    def progress(self) -> None:
        """Refill the restart budget, because the run made progress."""
        self._budget.refill()

    async def stop(self, within_s: float) -> None:
        """Send SIGTERM, kill the process if it is late, and wait for its end."""
        self._stop_requested.set()
        if self._child is not None:
            self._child.ask_to_stop()
        with anyio.move_on_after(min(within_s, self.spec.stop_timeout_s)):
            await self._ended.wait()
        self.kill()
        with anyio.move_on_after(DRAIN_S + 1):
            await self._ended.wait()

    def kill(self) -> None:
        """Kill the process at once, without a restart."""
        self._stop_requested.set()
        if self._child is not None:
            self._child.kill()

    def kill_process(self, pid: int, reason: str, *, gives_up: bool = False) -> bool:
        """Kill the process, and restart it unless `gives_up`. Return False if its process id is no longer `pid`."""
        if self._child is None or self._child.pid != pid:
            return False
        self._killed_for, self._gives_up = reason, gives_up
        self._child.kill()
        return True

    def reload(self) -> bool:
        """Make the process read its configuration again (SIGHUP). Return False if it is not ready to."""
        if self._child is None or not self._came_up:  # before it has started, the signal would end it
            return False
        self._child.reload()
        return True

    async def _run_once(self) -> float | None:
        """Run the process once, with its restart group; return the delay before the next start, None for no restart."""
        if self._restart_group is None:
            return await self._run_alone()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._leave_when_stopped, tasks.cancel_scope)
            await self._restart_group.meet()
            tasks.cancel_scope.cancel()
        if self._stop_requested.is_set():
            return None
        try:
            return await self._run_alone()
        finally:
            self._restart_group.ended(self.spec.name, stopped=self._stop_requested.is_set())

    async def _leave_when_stopped(self, scope: anyio.CancelScope) -> None:
        await self._stop_requested.wait()
        scope.cancel()

    def _end_with(self, other: str) -> None:
        """Kill the process because another one of its restart group ended."""
        if self._child is not None:
            self._ended_with = other
            self._child.kill()

    async def _run_alone(self) -> float | None:
        self._began = anyio.current_time()
        try:
            self._port = self._choose_port()
            kept_open: tuple[int, ...] = ()
            if self._heartbeats is not None:
                self._heartbeats.forget()
                kept_open = (self._heartbeats.given,)
            child = await self._template.start(self.spec, self._command(), self._environment(), kept_open=kept_open)
        except PortInUse as error:
            if self.restarts == 0:
                return self._give_up(EXIT_INPUT_ERROR, str(error))
            return self._after_failure(0, EXIT_NOT_STARTED, str(error))
        except OSError as error:
            return self._give_up(EXIT_NOT_STARTED, f"cannot be started: {error}")
        code = await self._attend(child)
        if self._port_was_taken() and self.spec.port is not None and not self.spec.port.kept:
            self._port = None
        return self._after_end(child.pid, code)

    async def _attend(self, child: Child) -> int:
        self._child, self._late, self._silent, self._ended_with, self._killed_for = child, "", False, "", ""
        self._came_up, self._blocked_by, self._silent_s = False, Culprit(), 0.0
        self._guard.watch(child.pid)
        self._log.forget()
        self._announce(Started(spec=self.spec, pid=child.pid, restarts=self.restarts))
        if self._stop_requested.is_set():
            child.ask_to_stop()
        elif self._restart_group is not None and (first := self._restart_group.ended_first):
            self._end_with(first)  # it ended while this process was being started
        code = 0
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._collect, child.output)
                async with anyio.create_task_group() as beside:
                    beside.start_soon(self._watch_readiness, child)
                    code = await child.wait()
                    beside.cancel_scope.cancel()
                child.kill()  # its remaining process group
                guardian.kill_session(child.pid)
                tasks.cancel_scope.deadline = anyio.current_time() + DRAIN_S
            return code
        finally:
            if child.running:
                child.kill()
                with anyio.CancelScope(shield=True):
                    await child.wait()
            guardian.kill_session(child.pid)
            self._guard.forget(child.pid)
            self._servers.remove(self.spec)
            self._child = None

    async def _collect(self, output: int) -> None:
        try:
            while True:
                await anyio.wait_readable(output)
                data = os.read(output, 1 << 16)
                if not data:
                    return
                self._log.feed(data)
        finally:
            self._log.end()
            os.close(output)

    async def _watch_readiness(self, child: Child) -> None:
        host = self._address if self.spec.port else None
        try:
            with anyio.fail_after(self.spec.ready_timeout_s):
                await wait_until_ready(self.spec.ready, child.pid, host or "", self._port or 0)
        except (TimeoutError, NotReady) as error:
            self._late = str(error) or f"not ready within {self.spec.ready_timeout_s:g} s"
            child.kill()
            return
        self._came_up = True
        self._servers.add(self.spec, host or "", self._port or 0)
        self._announce(Ready(spec=self.spec, host=host, port=self._port, pid=child.pid, restarts=self.restarts))
        match self.spec.probe:
            case None:
                return
            case SendsHeartbeats():
                assert self._heartbeats is not None
                blocked = partial(self._note_block, child.pid)
                await wait_until_still(
                    self._heartbeats, self.spec.unresponsive_after_s, child.pid, blocked, self._note_silence
                )
            case probe:
                limit_s = self.spec.unresponsive_after_s
                await wait_until_silent(probe, host or "", self._port or 0, limit_s, self._note_silence)
        self._silent = not self._stop_requested.is_set()
        child.kill()  # SIGTERM does not end a stopped or blocked process

    def _note_block(self, pid: int, block: Block) -> None:
        """Report a call that blocks the event loop, and write the stacks to the log of the process."""
        found = culprit(block.stacks, block.loop_thread, self.spec.functions)
        known, is_over = self._blocked_by, block.ended and not block.ended_process
        self._blocked_by = Culprit() if is_over else found
        if self._stop_requested.is_set():
            return
        if block.stacks and not (block.ended and found == known):
            seconds = round(block.blocked_s, 1)
            self._log.add("event_loop_blocked", blocked_s=seconds, **found._asdict(), stacks=block.stacks)
        blocked = Blocked(spec=self.spec, pid=pid, blocked_s=block.blocked_s, ended=block.ended, culprit=found)
        self._announce(blocked)

    def _note_silence(self, silent_s: float) -> None:
        """Name a process that shows no sign of life, and once more when it shows one again."""
        child, before_s = self._child, self._silent_s
        if child is None or (silent_s < self.spec.silent_after_s and not before_s):
            return
        self._silent_s = silent_s
        if not silent_s or not before_s:
            shown_s = silent_s or before_s
            self._announce(Silent(spec=self.spec, pid=child.pid, silent_s=shown_s, answers=not silent_s))

    def _after_end(self, pid: int, code: int) -> float | None:
        if self._stop_requested.is_set():
            self._announce(Exited(spec=self.spec, pid=pid, exit_code=code, reason=STOPPED, restart_in_s=None))
            return None
        reason = self._reason(code)
        if code in LASTING or (self._killed_for and self._gives_up):
            self._announce(Exited(spec=self.spec, pid=pid, exit_code=code, reason=reason, restart_in_s=None))
            return self._give_up(code, reason)
        return self._after_failure(pid, code, reason)

    def _after_failure(self, pid: int, code: int, reason: str) -> float | None:
        delay_s = self._budget.spend(anyio.current_time() - self._began)
        self._announce(Exited(spec=self.spec, pid=pid, exit_code=code, reason=reason, restart_in_s=delay_s))
        if delay_s is None:
            restarted = f"restarted {count_of(self.spec.max_restarts, 'time')} without progress"
            return self._give_up(code, f"{reason}; {restarted}")
        return delay_s

    def _give_up(self, code: int, reason: str) -> None:
        tail = tuple(self._log.tail())
        path = str(self._log.path)
        self._announce(GivenUp(spec=self.spec, exit_code=code, reason=reason, log=path, tail=tail))

    def _reason(self, code: int) -> str:
        if self._killed_for:
            return self._killed_for
        if self._late:
            return self._late
        if self._silent:
            what = "event loop was blocked" if self._heartbeats is not None else "did not answer"
            by = " by ".join(filter(None, ["", self._blocked_by.function]))
            where = f": {self._blocked_by.place}" if self._blocked_by.place else ""
            return f"{what} for {self.spec.unresponsive_after_s:g} s{by}{where}"
        if self._ended_with and self.spec.restart_group is not None:
            return f"{self._ended_with}, another process of restart group {self.spec.restart_group.name}, had ended"
        how, words = describe_exit(code), None
        if code in ENDED_FROM_OUTSIDE:  # its last error is a cause only if a crash
            cause = self._log.crash()
        else:
            cause, words = self._log.error(), self._log.last_words()
            if code in LASTING:  # a program says on its standard error what is wrong with its input
                cause = cause or words
        if cause:
            return f"{cause} ({how})"
        return f"{how}; its last output: {words}" if words and not is_interrupt(words) else how

    def _choose_port(self) -> int | None:
        request = self.spec.port
        if request is None:
            return None
        fixed = request.fixed if not request.kept or self._port is None else self._port
        return choose_port(self._address, fixed=fixed, previous=self._port or request.preferred, key=request.key)

    def _port_was_taken(self) -> bool:
        return any("address already in use" in line.lower() for line in self._log.tail(50))

    def _command(self) -> list[str]:
        return [self._filled_in(item) for item in self.spec.command]

    def _environment(self) -> dict[str, str]:
        own = {key: self._filled_in(value) for key, value in self.spec.env.items()}
        if self._heartbeats is not None:
            own[PULSE_VARIABLE] = str(self._heartbeats.given)
        return {**self._base_environment, **with_own_gpus(own, self._base_environment)}

    def _filled_in(self, text: str) -> str:
        if self._restart_group is not None:
            text = text.replace("{peers}", self._restart_group.address)
        text = text.replace("{others}", self._servers.others(self.spec) if self._came_up else "")
        return text if self._port is None else with_address(text, self._address, self._port)
