"""Debian's Slurm on machines: slurmctld on the first, slurmd on each. No GPUs."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.support.machines.lan import ROOT, Lan
from tests.support.machines.machine import Machine, Process, polled

TREE: Final = ROOT / ".slurm"  # unpacked by install_slurm.sh
PLACE: Final = Path("/tmp/slurm")  # on each machine's own disk
KILL_WAIT_S: Final = 30  # Slurm's default
UP_S: Final = 60.0
ANSWER_S: Final = 30.0
CONFIG: Final = """
ClusterName=test
SlurmctldHost={first}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool
SlurmctldPidFile={place}/ctld.pid
SlurmdPidFile={place}/d.pid
KillWait={kill_wait}
MailProg=/bin/true
"""


def why_no_slurm() -> str | None:
    """Why Slurm cannot be started here; None if it can."""
    return (
        None if (TREE / "usr/bin/srun").exists() else "Slurm is not unpacked: tests/support/machines/install_slurm.sh"
    )


class Slurm:
    """A cluster of machines.

    Args:
        names: of the machines; the first one has slurmctld, and commands run there.
        shared: directory that all machines have; jobs are submitted from it.
    """

    def __init__(self, lan: Lan, names: Sequence[str], shared: Path) -> None:
        self._first, self._shared = lan[names[0]], shared
        (libraries,) = (TREE / "usr/lib").glob("*-linux-gnu")
        plugins = libraries / "slurm-wlm"
        self._env: Mapping[str, str] = {
            "SLURM_CONF": str(shared / "slurm.conf"),
            "LD_LIBRARY_PATH": f"{libraries}:{plugins}",
            "PATH": f"{TREE / 'usr/bin'}:{os.environ['PATH']}",
        }
        machines = [lan[name] for name in names]
        first = f"{names[0]}({machines[0].address})"
        text = CONFIG.format(first=first, plugins=plugins, place=PLACE, kill_wait=KILL_WAIT_S)
        nodes = [f"NodeName={one.name} NodeAddr={one.address} CPUs=4" for one in machines]
        partition = f"PartitionName=all Nodes={','.join(names)} Default=YES State=UP"
        (shared / "slurm.conf").write_text("\n".join([text, *nodes, partition, ""]))
        for machine in machines:
            self._add_files(machine)
        self._first.start([TREE / "usr/sbin/slurmctld-wlm", "-D"], env=self._env)
        for machine in machines:
            stepd = TREE / "usr/sbin/slurmstepd-wlm"
            machine.start([TREE / "usr/sbin/slurmd-wlm", "-D", "-d", stepd], env=self._env)
        for _ in polled(UP_S, lambda: f"the nodes are not idle: {self._command('sinfo', '--long', '--Node').output()}"):
            if self._command("sinfo", "--noheader", "--Node").output().split().count("idle") == len(names):
                break

    def sbatch(self, *arguments: str | Path) -> str:
        """Submit a job; return its number."""
        process = self._command("sbatch", "--parsable", *arguments)
        assert process.returncode == 0, process.output()
        return process.output().strip()

    def scancel(self, job: str) -> None:
        """Cancel a job."""
        process = self._command("scancel", job)
        assert process.returncode == 0, process.output()

    def state(self, job: str) -> tuple[str, str]:
        """State of a job, such as RUNNING, and its exit code, such as 0:15."""
        fields = dict(
            field.split("=", 1)
            for field in self._command("scontrol", "--oneliner", "show", "job", job).output().split()
            if "=" in field
        )
        return fields["JobState"], fields["ExitCode"]

    def wait(self, job: str, timeout_s: float) -> tuple[str, str]:
        """Wait until no process of a job runs; return its state and its exit code."""
        for _ in polled(timeout_s, lambda: f"job {job} has not ended within {timeout_s:g} s: {self.state(job)}"):
            if self.state(job)[0] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                break
        return self.state(job)

    def _command(self, name: str, *arguments: str | Path) -> Process:
        process = self._first.start([TREE / "usr/bin" / name, *arguments], env=self._env, cwd=self._shared)
        process.wait(ANSWER_S)
        self._first.processes.remove(process)  # the errors of a test show the programs that matter
        return process

    @staticmethod
    def _add_files(machine: Machine) -> None:
        for name in ("state", "spool"):
            machine.path(PLACE / name).mkdir(parents=True)
