"""Supervises the processes of a node, and stops them together."""

import os
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

import anyio
import anyio.abc

from runtime.bus.addresses import BUS_URL_VARIABLE, ENGINE_KEY_VARIABLE
from runtime.node.supervisor import guardian
from runtime.node.supervisor.output import OutputLog
from runtime.node.supervisor.ports import ReadyServers
from runtime.node.supervisor.restarts import Agreement, RestartGroup
from runtime.node.supervisor.spawn import Guard
from runtime.node.supervisor.state_changes import (
    Listener,
)
from runtime.node.supervisor.supervisor import Supervisor
from runtime.node.supervisor.template import Template
from runtime.settings.placement import LOOPBACK
from runtime.settings.processes import ProcessSpec, Tier
from runtime.util.secrets import Secret, split_login

STOP_WITHIN_S = 8.0
TIER_RESERVE_S = 1.5  # reserved for each tier that is still to be stopped
TIERS_OF_RUN = (Tier.BUS, Tier.SERVICE, Tier.ACTOR)


class Supervision:
    """Supervises all processes of one node.

    Leaving its context kills everything that still runs, also when the node daemon fails. The guardian covers the
    daemon's own death.

    Args:
        run_dir: of the run.
        node: its name. Daemons of several nodes may share the run directory and the machine.
        environment: added to the environment of every process.
        listener: called with each change.
        log_dir: directory of the processes' logs; by default `logs` in the run directory.
        address: address of this node, at which servers listen.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        environment: Mapping[str, str],
        listener: Listener,
        node: str = "local",
        log_dir: Path | None = None,
        address: str = LOOPBACK,
    ) -> None:
        self._log_dir = log_dir or run_dir / "logs"
        self._address = address
        self._mark = guardian.mark_of(uuid.uuid4().hex, node, run_dir)
        self._environment = {**os.environ, **environment, guardian.MARK_VARIABLE: self._mark, "PYTHONUNBUFFERED": "1"}
        self._listener = listener
        self._guard = Guard(self._mark, sys.executable)
        self.template = Template(self._environment, self._guard)
        self._supervisors: dict[str, Supervisor] = {}
        self._restart_groups: dict[str, RestartGroup] = {}  # restart groups by name
        self._servers = ReadyServers()
        guardian.kill(guardian.mark_of("", node, run_dir))  # left by an earlier daemon whose guardian died too

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Supervise until cancelled."""
        async with anyio.create_task_group() as guard_tasks:
            guard_tasks.start_soon(self._guard.run)
            guard_tasks.start_soon(self.template.run)
            try:
                async with anyio.create_task_group() as self._tasks:
                    task_status.started()
                    await anyio.sleep_forever()
            finally:
                guard_tasks.cancel_scope.cancel()

    def start(self, spec: ProcessSpec, agreement: Agreement | None = None) -> None:
        """Start a process and keep it running.

        Args:
            agreement: with the other nodes of its restart group, the same for all of its processes.

        Raises:
            ValueError: there is a process of that name.
        """
        if spec.name in self._supervisors:
            raise ValueError(f"there is already a process {spec.name}")
        wanted, group = spec.restart_group, None
        if wanted is not None:
            group = self._restart_groups.get(wanted.name)
            if group is None:
                group = RestartGroup(wanted.num_processes, self._address, agreement)
                self._restart_groups[wanted.name] = group
        path = self._log_dir / f"{spec.name}.jsonl"
        log = OutputLog(path, spec.name, hidden=_secrets_of(spec), crash_words=spec.crash_words)
        supervisor = Supervisor(
            spec,
            log=log,
            environment=self._environment,
            listener=self._listener,
            restart_group=group,
            template=self.template,
            servers=self._servers,
            address=self._address,
        )
        self._supervisors[spec.name] = supervisor
        self._tasks.start_soon(supervisor.run)

    def progress(self) -> None:
        """Refill the restart budgets of all processes but observers, because the run made progress."""
        for supervisor in self._supervisors.values():
            if supervisor.spec.tier is not Tier.OBSERVER:
                supervisor.progress()

    def kill_process(self, name: str, pid: int, reason: str, *, gives_up: bool = False) -> bool:
        """Kill a server, and restart it unless `gives_up`. Return False if its process id is no longer `pid`.

        Raises:
            ValueError: there is no server of that name.
        """
        supervisor = self._supervisors.get(name)
        if supervisor is None or supervisor.spec.tier is not Tier.SERVICE:
            servers = [each for each, one in self._supervisors.items() if one.spec.tier is Tier.SERVICE]
            raise ValueError(f"{name!r} is not a server of this node; allowed: {', '.join(servers)}")
        return supervisor.kill_process(pid, reason, gives_up=gives_up)

    def reload(self, name: str) -> bool:
        """Make a process read its configuration again (SIGHUP). Return False if it is not ready to."""
        supervisor = self._supervisors.get(name)
        return supervisor is not None and supervisor.reload()

    async def stop(self, *tiers: Tier) -> None:
        """Stop tiers, by default all but observers, within STOP_WITHIN_S. Later tiers stop first."""
        ends = anyio.current_time() + STOP_WITHIN_S
        for tier in sorted(tiers or TIERS_OF_RUN, reverse=True):
            within_s = ends - anyio.current_time() - TIER_RESERVE_S * tier
            async with anyio.create_task_group() as tasks:
                for supervisor in self._supervisors.values():
                    if supervisor.spec.tier == tier:
                        tasks.start_soon(supervisor.stop, max(0.1, within_s))

    def observers(self) -> list[str]:
        """Return the names of the observers that run."""
        return [name for name, one in self._supervisors.items() if one.spec.tier is Tier.OBSERVER and one.runs]

    async def stop_observers(self) -> None:
        """Stop the observers, each within its own limit: they may still have to send what the run wrote."""
        async with anyio.create_task_group() as tasks:
            for name in self.observers():
                supervisor = self._supervisors[name]
                tasks.start_soon(supervisor.stop, supervisor.spec.stop_timeout_s)

    def kill(self) -> None:
        """Kill all processes at once."""
        for supervisor in self._supervisors.values():
            supervisor.kill()


def _secrets_of(spec: ProcessSpec) -> list[Secret]:
    """Return the secrets of a process, to hide them in its output: SGLang logs all its arguments."""
    _, login = split_login(spec.env.get(BUS_URL_VARIABLE, ""))
    key = spec.env.get(ENGINE_KEY_VARIABLE, "")
    return [*([login.password] if login else []), *([Secret(key)] if key else [])]
