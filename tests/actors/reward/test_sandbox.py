"""What graders get, are kept to and cannot see."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.reward.grades import Graded, GraderSpec, Hello
from actors.reward.pool import PoolSettings, open_pool
from actors.reward.process import GraderUnusableError
from actors.reward.samples import GradedSample
from runtime.functions import isolation, seccomp
from runtime.functions.sandbox import Sandbox
from tests.actors.reward.test_pool import AMPLE_S, is_running, until_ended, until_exists
from tests.fixtures.nats import eventually
from tests.support.other_user import open_directory

pytestmark = pytest.mark.anyio

USER_CODE = str(Path(__file__).parent / "nasty_graders.py")
REFUSAL = isolation.refusal()
CAP_SETFCAP = 31  # number of the capability
isolated_or_refused = pytest.mark.parametrize("kind", ["process", "isolated"])


async def graded_by(
    function: str,
    *responses: str,
    sandbox: Sandbox | None = None,
    timeout_s: float = AMPLE_S,
    cpu_s: float | None = None,
    **metadata: Any,
) -> list[Graded]:
    """Grades of samples with these responses, by one process, each tried once."""
    settings = PoolSettings(
        hello=Hello(reward_key="score", cpu_s=cpu_s),
        sandbox=sandbox or Sandbox(),
        num_processes=1,
        timeout_s=timeout_s,
        max_tries=1,
    )
    samples = [GradedSample(response=response, metadata=metadata) for response in responses or ("",)]
    with anyio.fail_after(AMPLE_S):
        async with open_pool(settings) as pool:
            return await pool.grade(GraderSpec(name=f"{USER_CODE}:{function}"), samples)


def details_of(graded: Graded) -> dict[str, Any]:
    assert graded.error is None
    assert graded.details is not None
    return graded.details


@pytest.mark.parametrize("kind", ["none", "process"])
async def test_a_grader_gets_the_variables_that_are_allowed_and_no_other(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHYSARUM_BUS_URL", "nats://phy:secret@127.0.0.1:1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "allowed")
    (graded,) = await graded_by("environment", "OPENAI_API_KEY", sandbox=Sandbox(kind=kind, env=("OPENAI_API_KEY",)))
    details = details_of(graded)
    names = set(details["names"].split())
    assert details["value"] == "allowed"
    assert {"PATH", "HOME", "TMPDIR"} <= names
    assert not names & {"PHYSARUM_BUS_URL", "AWS_SECRET_ACCESS_KEY"}


async def test_a_graders_temporary_files_are_in_a_folder_that_goes_with_it() -> None:
    (graded,) = await graded_by("scratch")
    folder = Path(details_of(graded)["path"]).parents[1]
    assert folder.name.startswith("physarum-grader-")
    assert not folder.exists()


async def test_a_grader_is_limited_and_gains_no_privileges() -> None:
    (graded,) = await graded_by("status", sandbox=Sandbox(memory_bytes=1 << 30, max_files=100))
    details = details_of(graded)
    assert (details["no_new_privs"], details["memory"], details["files"]) == ("1", 1 << 30, 100)


async def test_without_a_sandbox_a_grader_has_no_limits() -> None:
    (graded,) = await graded_by("status", sandbox=Sandbox(kind="none", memory_bytes=1 << 30, max_files=100))
    details = details_of(graded)
    assert details["no_new_privs"] == "0"
    assert 100 != details["files"]


@pytest.mark.parametrize(
    ("function", "reason"),
    [("opens_files", "Too many open files"), ("writes_a_large_file", "File too large")],
)
async def test_a_grader_that_takes_too_many_files_gets_an_error(function: str, reason: str) -> None:
    (graded,) = await graded_by(function)
    assert reason in str(graded.error)


@pytest.mark.slow
async def test_a_call_that_uses_up_its_processor_time_fails_and_the_next_has_its_own() -> None:
    burnt, again = await graded_by("burns_processor_time", "", "", cpu_s=1.0, timeout_s=30.0)
    assert burnt.error == again.error == "raised CpuLimitError('reward.cpu_s')"


@isolated_or_refused
async def test_a_grader_that_forks_a_bomb_is_killed_with_all_of_it(kind: Any) -> None:
    if kind == "isolated" and REFUSAL is not None:
        return await refused()
    (graded,) = await graded_by("forks_a_bomb", sandbox=Sandbox(kind=kind, max_processes=20))
    assert graded.error == ("the grader was killed: it started more processes than reward.max_processes, 1 time")
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    await eventually(lambda: not any(map(is_bomb, pids)))  # a killed process may take a moment to go


def is_bomb(pid: int) -> bool:
    try:
        ours = b"\0".join((b"runtime.functions.keeper", b"%d" % os.getpid()))  # not those of a run beside the tests
        return ours in Path(f"/proc/{pid}/cmdline").read_bytes() and is_running(pid)
    except OSError:
        return False


async def test_a_daemon_that_a_grader_leaves_ends_with_its_process(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    (graded,) = await graded_by("leaves_a_daemon", "", file=str(file))
    assert graded.reward == 1.0
    await until_ended(int(await until_exists(file)))


async def test_a_daemon_of_a_process_that_died_ends_too(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    (graded,) = await graded_by("leaves_a_daemon", "die", file=str(file))
    assert graded.error == "the grader process exited with code 3, 1 time"
    await until_ended(int(await until_exists(file)))


async def test_a_grader_may_print_a_gigabyte_and_little_of_it_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    (graded,) = await graded_by("prints_much", "1024")
    assert graded.reward == 1.0
    printed = capfd.readouterr()
    assert 64 << 10 <= printed.err.count("x") < 1 << 20
    assert "further output is left out" in printed.err


@pytest.mark.parametrize("garbage", ["length", "no struct", "deep", "half"])
async def test_what_a_grader_writes_to_the_pipe_of_its_process_fails_the_sample(garbage: str) -> None:
    (graded,) = await graded_by("writes_to_the_pipe", garbage)
    assert graded.reward is None
    assert "pipe" in str(graded.error) or "exited with code 1" in str(graded.error)


async def test_a_grader_that_dies_by_a_signal_is_told_of_by_its_name() -> None:
    (graded,) = await graded_by("dies_by_signal")
    assert graded.error == "the grader process was killed by SIGSEGV, 1 time"


async def refused() -> None:
    """Where this kernel isolates nobody, it is said at the start, with the reason."""
    with pytest.raises(
        GraderUnusableError, match=r'reward\.sandbox = "isolated": this machine cannot isolate graders: .+'
    ):
        await graded_by("status", sandbox=Sandbox(kind="isolated"))


async def test_an_isolated_grader_sees_no_network_no_run_and_no_parents(tmp_path: Path) -> None:
    if REFUSAL is not None:
        return await refused()
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "secret").write_text("password")
    with socket.create_server(("127.0.0.1", 0)) as server:
        (graded,) = await graded_by(
            "looks_around",
            sandbox=Sandbox(kind="isolated", hidden=(str(run_dir),)),
            hidden=str(run_dir),
            secret=str(run_dir / "secret"),
            pid=os.getpid(),
            port=server.getsockname()[1],
            file=str(tmp_path / "written"),
        )
    seen = details_of(graded)
    assert seen["connects"] == "ConnectionRefusedError"  # by a network of its own, in which nobody listens
    assert seen["interfaces"] == "lo"
    assert seen["processes"] == 2
    assert (seen["parent"], seen["signals"]) == ("FileNotFoundError", "ProcessLookupError")
    assert (seen["hidden"], seen["secret"]) == ("", "FileNotFoundError")
    assert (seen["writes"], seen["undoes"]) == ("OSError", "CalledProcessError")
    assert (seen["settings"], seen["own_proc"]) == ("OSError", "self thread-self")  # nothing of the kernel's to write
    assert seen["devices"] == "fd full null proc random shm stderr stdin stdout urandom zero"
    assert (seen["scratch"], seen["python"]) == ("yes", "yes")


def test_a_file_in_the_place_of_dev_null_is_a_reason_and_no_wrong_answer(tmp_path: Path) -> None:
    """In a mount namespace of its own; programs that open /dev/null would fail there, and score 0."""
    program = """
import ctypes, sys
from runtime.functions import isolation
if (reason := isolation.refusal()) is None:
    isolation.enter_user_and_pid_namespaces()
    libc = ctypes.CDLL(None)
    assert libc.unshare(0x00020000) == 0  # CLONE_NEWNS
    assert libc.mount(sys.argv[1].encode(), b"/dev/null", None, 4096, None) == 0  # MS_BIND
    reason = isolation.refusal()
print(reason)
"""
    (tmp_path / "file").touch()
    command = [sys.executable, "-c", program, str(tmp_path / "file")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=AMPLE_S, check=True).stdout.strip()
    assert said == (REFUSAL or "/dev/null: Read-only file system")


async def test_an_isolated_grader_is_limited_and_has_no_privileges() -> None:
    if REFUSAL is not None:
        return await refused()
    (graded,) = await graded_by("status", sandbox=Sandbox(kind="isolated", memory_bytes=1 << 30))
    details = details_of(graded)
    kept = 1 << CAP_SETFCAP if os.getuid() == 0 else 0  # without it, root could not isolate the programs of `code`
    assert (details["no_new_privs"], int(details["capabilities"], 16), details["memory"]) == ("1", kept, 1 << 30)


async def test_an_isolated_grader_with_privileges_in_a_namespace_gets_no_settings_of_the_kernel() -> None:
    """As root it could otherwise write core_pattern, whose program runs outside, and freeze the run's cgroup."""
    if REFUSAL is not None:
        return await refused()
    (graded,) = await graded_by("isolates_itself", sandbox=Sandbox(kind="isolated"))
    seen = details_of(graded)
    assert (seen["namespaces"], seen["tmpfs"]) == ("yes", "yes")
    assert (seen["proc"], seen["sysfs"]) == ("Operation not permitted",) * 2
    assert seen["cgroups"] == "No space left on device"  # none is allowed


async def test_an_isolated_grader_isolates_the_programs_of_code() -> None:
    """A run grades by `code` in isolated processes alone."""
    if REFUSAL is not None:
        return await refused()
    looks = "import os\nlines = dict(line.split(':') for line in open('/proc/self/status'))\n"
    looks += "print(lines['CapEff'].strip(), os.path.exists('/dev/proc'), input())"
    label = {"inputs": ["7"], "outputs": ["0000000000000000 False 7"]}
    settings = PoolSettings(
        hello=Hello(), sandbox=Sandbox(kind="isolated"), num_processes=1, timeout_s=AMPLE_S, max_tries=1
    )
    samples = [GradedSample(response=program, label=label) for program in (looks, "print(7)")]
    with anyio.fail_after(AMPLE_S):
        async with open_pool(settings) as pool:
            grades = await pool.grade(GraderSpec(name="code"), samples)
    assert [(graded.reward, graded.error) for graded in grades] == [(1.0, None), (0.0, None)]


@pytest.mark.parametrize("user", sorted({os.getuid(), 65534 if os.getuid() == 0 else os.getuid()}))
def test_an_isolated_process_can_isolate_another_one(user: int) -> None:
    """As root, and as any other user."""
    program = """
import os, sys
from runtime.functions import isolation
os.setuid(int(sys.argv[1]))
isolation.set_traceable(True)  # as it is for who logs in as this user
for folder, isolates in zip(sys.argv[2:], (True, False)):
    isolation.enter_user_and_pid_namespaces()
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    isolation.enter_other_namespaces(folder, (), isolates=isolates)
print("isolated twice")
"""
    with open_directory() as place:
        folders = [place / "first", place / "second"]
        for folder in folders:
            folder.mkdir()
            os.chown(folder, user, -1)
        command = [sys.executable, "-c", program, str(user), *map(str, folders)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=AMPLE_S, check=False)
    assert REFUSAL is not None or done.stdout.strip() == "isolated twice", done.stderr


async def test_an_isolated_grader_that_dies_is_told_of_as_any_other() -> None:
    if REFUSAL is not None:
        return await refused()
    (graded,) = await graded_by("dies_by_signal", sandbox=Sandbox(kind="isolated"))
    assert graded.error == "the grader process was killed by SIGSEGV, 1 time"


@pytest.mark.parametrize("kind", ["process", "isolated"])
async def test_an_isolated_grader_reaches_no_socket_that_has_a_path(kind: Any, tmp_path: Path) -> None:
    if kind == "isolated" and REFUSAL is not None:
        return await refused()
    with socket.socket(socket.AF_UNIX) as server:  # as docker.sock and D-Bus have one, of the same user
        server.bind(str(tmp_path / "s"))
        server.listen()
        (graded,) = await graded_by("connects", sandbox=Sandbox(kind=kind), path=str(tmp_path / "s"))
    seen = details_of(graded)
    assert (seen["pair"], seen["own_network"], seen["pool"]) == ("yes", "yes", "yes")
    if kind == "process":
        assert seen["stream"] == "yes"
        return
    assert seen["stream"] == seen["datagram_of_a_pair"] == seen["vsock"] == seen["ring"] == "PermissionError"
    assert seen["keyring"] == "PermissionError"
    assert seen["pair_connected_elsewhere"] == "OSError"  # it is connected already


def test_a_machine_whose_calls_are_not_known_cannot_isolate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "s390x")
    assert str(isolation.attempted(seccomp.refuse_foreign_sockets)).startswith(
        "s390x: system calls can be filtered only on"
    )


@pytest.mark.parametrize(
    ("attempt", "reason"),
    [
        ("raise RuntimeError('no such device')", "the attempt raised RuntimeError('no such device')"),
        ("raise SystemExit", "the process that tried it ended with exit code 1"),
        ("os.kill(os.getpid(), 9)", "the process that tried it ended with exit code -9"),
        ("return None", None),
    ],
)
def test_a_failed_attempt_to_isolate_is_the_reason(
    attempt: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope: dict[str, Any] = {"os": os}
    exec(f"def attempt():\n    {attempt}", scope)
    monkeypatch.setattr(isolation, "_refusal_here", scope["attempt"])
    assert isolation.refusal() == reason
