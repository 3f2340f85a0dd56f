"""Machines share nothing but what a test names, and nothing of them is left afterwards."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.machines.lan import ROOT, NoMachines, machines
from tests.support.machines.machine import polled

pytestmark = [pytest.mark.nodes]

PYTHON = [sys.executable, "-c"]
TIMES = "import time; print(time.time(), time.time_ns() / 1e9, time.clock_gettime(0), time.mktime(time.localtime()))"
RESOLVE = "import socket; print(socket.gethostbyname(socket.gethostname()))"
SLEEP = ["sh", "-c", "sleep 600 & echo ready; wait"]
HOUR_S = 3600.0


def test_wall_clocks_differ_by_what_the_test_says() -> None:
    with machines("n0", "n1", clocks={"n1": 2 * HOUR_S}) as lan:
        now = time.time()
        own = [float(word) for word in lan["n0"].run([*PYTHON, TIMES]).split()]
        ahead = [float(word) for word in lan["n1"].run([*PYTHON, TIMES]).split()]
    assert all(0 <= moment - now + 1 < 100 for moment in own)  # localtime has whole seconds
    assert all(0 <= moment - now - 2 * HOUR_S + 1 < 100 for moment in ahead)


def test_programs_that_a_program_starts_have_its_clock() -> None:
    with machines("n0", clocks={"n0": -5 * HOUR_S}) as lan:
        nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {TIMES!r}], check=True)"
        moments = lan["n0"].run([*PYTHON, nested], env={"PYTHONPATH": "/nowhere"}).split()
    assert all(float(moment) < time.time() - 4 * HOUR_S for moment in moments)


def test_uptimes_and_boot_ids_differ() -> None:
    with machines("n0", "n1") as lan:
        told = [lan[name].run(["cat", "/proc/uptime", "/proc/sys/kernel/random/boot_id"]) for name in ("n0", "n1")]
    uptimes = [float(text.split()[0]) for text in told]
    assert uptimes[1] - uptimes[0] > HOUR_S
    assert len({text.split()[2] for text in told}) == 2


def test_a_shared_directory_is_common_and_all_others_are_not(tmp_path: Path) -> None:
    shared, own, unnamed = (tmp_path / name for name in ("shared", "own", "unnamed"))
    for place in (shared, own, unnamed):
        place.mkdir()
        (place / "of_the_host").touch()
    with machines("n0", "n1", shared=shared, own=[own, shared / "logs"]) as lan:
        for place in (shared, own, shared / "logs", "/tmp", "/dev/shm", "/run"):
            lan["n0"].run(["touch", f"{place}/from_n0"])
        assert lan["n1"].run(["ls", shared]).split() == ["from_n0", "logs", "of_the_host"]
        for place in (own, shared / "logs", "/dev/shm", "/run"):
            assert lan["n0"].run(["ls", place]).split() == ["from_n0"]
            assert lan["n1"].run(["ls", place]).split() == []
        assert "from_n0" not in lan["n1"].run(["ls", "/tmp"])
        assert not unnamed.is_relative_to("/tmp") or lan["n0"].start(["ls", unnamed]).wait(60) != 0
        for place in (ROOT, "/etc", "/var"):
            refused = lan["n0"].start(["touch", f"{place}/from_n0"])
            assert refused.wait(60) != 0
            assert "Read-only file system" in refused.output()
        assert lan["n0"].path(own / "from_n0").exists()
        assert lan["n0"].path(shared / "from_n0") == shared / "from_n0"
        assert lan["n0"].path(shared / "logs" / "from_n0").exists()
    assert sorted(path.name for path in own.iterdir()) == ["of_the_host"]


def test_a_host_name_resolves_only_as_the_test_says() -> None:
    with machines(
        "n0", "n1", "n2", hosts={"n1": ["127.0.1.1 box.example box"]}, hostnames={"n1": "box", "n2": "box"}
    ) as lan:
        assert [lan[name].run(["hostname"]).strip() for name in ("n0", "n1", "n2")] == ["n0", "box", "box"]
        assert lan["n1"].run([*PYTHON, RESOLVE]).strip() == "127.0.1.1"
        for name in ("n0", "n2"):
            unknown = lan[name].start([*PYTHON, RESOLVE])
            assert unknown.wait(60) != 0
            assert "socket.gaierror" in unknown.output()
        lan["n2"].set_hosts(f"{lan['n0'].address} home", "127.0.0.2 box")
        assert lan["n2"].run([*PYTHON, RESOLVE]).strip() == "127.0.0.2"
        assert lan["n2"].run(["getent", "ahostsv4", "home"]).split()[0] == lan["n0"].address


def test_a_machine_sees_its_own_processes_alone() -> None:
    with machines("n0", "n1") as lan:
        other = lan["n1"].start(SLEEP)
        other.wait_for("ready", 60)
        pids = [int(word) for word in lan["n0"].run(["sh", "-c", "ls /proc"]).split() if word.isdigit()]
        assert len(pids) <= 3  # process 1, the shell, and ls
        assert other.returncode is None


def test_signals_and_exit_codes_pass() -> None:
    with machines("n0") as lan:
        assert lan["n0"].start(["sh", "-c", "exit 7"]).wait(60) == 7
        process = lan["n0"].start(
            ["sh", "-c", "trap 'echo caught; exit 130' INT; echo ready; while :; do sleep 0.05; done"]
        )
        process.wait_for("ready", 60)
        process.pause()
        process.signal(signal.SIGINT)
        assert "caught" not in process.output()
        process.resume()
        assert process.wait(60) == 130
        with pytest.raises(AssertionError, match="exit code 3"):
            lan["n0"].run(["sh", "-c", "exit 3"])
        with pytest.raises(TimeoutError, match="runs after"):
            lan["n0"].run(["sleep", "60"], timeout_s=0.1)
        with pytest.raises(AssertionError, match="without 'never'"):
            lan["n0"].start(["echo", "something else"]).wait_for("never", 60)


def test_an_error_of_a_test_shows_the_output_of_all_programs() -> None:
    def fail() -> None:
        with machines("n0", "n1") as lan:
            assert lan["n0"].start(["sh", "-c", "echo from n0; exit 4"]).wait(60) == 4
            lan["n1"].start(SLEEP).wait_for("ready", 60)
            lan["n1"].unplug()
            raise ValueError("of the test")

    with pytest.raises(ValueError, match="of the test") as caught:
        fail()
    [note] = caught.value.__notes__
    assert "exit code 4\nfrom n0" in note
    assert "exit code -9\nready" in note


def test_unplugging_a_machine_ends_every_process_in_it() -> None:
    with machines("n0", "n1") as lan:
        running, stopped, other = (lan[name].start(SLEEP) for name in ("n1", "n1", "n0"))
        for process in (running, stopped, other):
            process.wait_for("ready", 60)
        stopped.pause()
        within = [psutil.Process(p) for p in (lan["n1"].pid, running.pid, stopped.pid)]
        within += psutil.Process(running.pid).children()
        lan["n1"].unplug()
        assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in within)
        assert (running.returncode, stopped.returncode) == (-9, -9)
        assert other.returncode is None
        with pytest.raises(KeyError):
            lan["n1"]


def test_no_farewell_of_an_unplugged_machine_arrives() -> None:
    listen = (
        "import socket; s = socket.create_server(('', 7000)); print('ready', flush=True); c, _ = s.accept(); c.recv(9)"
    )
    connect = (
        "import socket, sys; s = socket.create_connection((sys.argv[1], 7000)); print('ready', flush=True);"
        "s.settimeout(1.5); print(s.recv(9))"
    )
    with machines("n0", "n1") as lan:
        lan["n1"].start([*PYTHON, listen]).wait_for("ready", 60)
        client = lan["n0"].start([*PYTHON, connect, lan["n1"].address])
        client.wait_for("ready", 60)
        lan["n1"].unplug()
        assert client.wait(60) == 1
        assert "TimeoutError" in client.output()  # neither the end of the stream nor a reset


def test_no_process_namespace_or_file_is_left_when_the_test_is_killed(tmp_path: Path) -> None:
    mounts, links = Path("/proc/self/mounts").read_text(), sorted(os.listdir("/sys/class/net"))
    program = [
        sys.executable,
        "-P",
        str(Path(__file__).with_name("programs") / "lab_of_a_killed_test.py"),
        str(tmp_path),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment) as test:
        assert test.stdout is not None
        try:
            assert select.select([test.stdout], [], [], 60)[0]
            pids, networks, directory = json.loads(test.stdout.readline())
            assert all(is_alive(pid) for pid in pids)
            assert Path(directory).exists()
        finally:
            killed_at = time.time()
            test.kill()
    for _ in polled(60, lambda: f"left: {[pid for pid in pids if is_alive(pid)]}"):
        if not any(is_alive(pid) for pid in pids):
            break
    # a machine that another test begins later may get the number of a network that is gone
    before = [process for process in psutil.process_iter() if process.create_time() < killed_at]
    assert not set(networks) & {network_of(process) for process in before}
    for _ in polled(60, lambda: f"left: {directory}"):
        if not Path(directory).parent.exists():
            break
    assert Path("/proc/self/mounts").read_text() == mounts
    assert sorted(os.listdir("/sys/class/net")) == links


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def network_of(process: psutil.Process) -> str:
    try:
        return os.readlink(f"/proc/{process.pid}/ns/net")
    except OSError:
        return ""


def test_all_machines_end_with_the_switch() -> None:
    with machines("n0", "n1") as lan:
        processes = [lan[name].start(SLEEP) for name in ("n0", "n1")]
        for process in processes:
            process.wait_for("ready", 60)
        os.kill(lan.pid, signal.SIGKILL)
        assert [process.wait(60) for process in processes] == [-9, -9]
        with pytest.raises((NoMachines, OSError)):
            lan.stats()


def test_an_impossible_machine_is_refused_with_its_reason() -> None:
    with machines() as lan, pytest.raises(NoMachines, match=r"File name too long|Invalid argument"):
        lan.add("n0", hostname="x" * 100)
