"""Supervision of real child processes."""

import math
import os
import signal
import socket
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import msgspec
import psutil
import pytest

from runtime.node.supervisor.restarts import RestartBudget
from runtime.node.supervisor.state_changes import Change, Exited, GivenUp, Ready, Started
from runtime.node.supervisor.supervision import Supervision
from runtime.settings.processes import (
    AnswersHttp,
    NotReady,
    PortRequest,
    ProcessSpec,
    Tier,
    WhenConfirmed,
    WhenListening,
)
from runtime.util.exit_codes import EXIT_FENCED, EXIT_INPUT_ERROR

pytestmark = pytest.mark.anyio

SLEEPER = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
WITH_CHILD = """
    import subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(child.pid, flush=True)
    time.sleep(60)
"""
SERVER = """
    import http.server, sys
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Changes:
    """What a supervision announced, and a way to wait for more."""

    def __init__(self) -> None:
        self.all: list[Change] = []
        self._more = anyio.Event()

    def __call__(self, change: Change) -> None:
        self.all.append(change)
        self._more.set()
        self._more = anyio.Event()

    def of(self, kind: type[Change]) -> list[Change]:
        return [change for change in self.all if isinstance(change, kind)]

    async def until(self, condition: Callable[[], bool], timeout_s: float = 40) -> None:
        with anyio.fail_after(timeout_s):
            while not condition():
                await self._more.wait()


@asynccontextmanager
async def supervising(run_dir: Path, node: str = "local") -> AsyncIterator[tuple[Supervision, Changes]]:
    changes = Changes()
    supervision = Supervision(run_dir, environment={}, listener=changes, node=node)
    async with anyio.create_task_group() as tasks:
        await tasks.start(supervision.run)
        yield supervision, changes
        tasks.cancel_scope.cancel()


def python(name: str, code: str, *arguments: str, **settings: object) -> ProcessSpec:
    command = (sys.executable, "-c", textwrap.dedent(code), *arguments)
    return msgspec.structs.replace(ProcessSpec(name=name, command=command), **settings)


def has(log: Path, text: bytes) -> bool:
    return log.exists() and text in log.read_bytes()


async def said(log: Path, text: bytes) -> None:
    """Wait until a process has printed something."""
    with anyio.fail_after(200):
        while not has(log, text):  # noqa: ASYNC110 - the file system has no event
            await anyio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def http_server(**settings: object) -> ProcessSpec:
    return python("engine", SERVER, "{port}", port=PortRequest(), ready=WhenListening(), **settings)


async def test_a_server_that_hangs_is_killed_and_started_again(tmp_path: Path) -> None:
    """Stopped, it still takes connections and ignores every signal but one."""
    async with supervising(tmp_path) as (supervision, changes):
        supervision.start(http_server(probe=AnswersHttp("/ready"), unresponsive_after_s=0.4))
        await changes.until(lambda: len(changes.of(Ready)) == 1)
        os.kill(changes.of(Started)[0].pid, signal.SIGSTOP)
        await changes.until(lambda: len(changes.of(Ready)) == 2)
        (exited,) = changes.of(Exited)
        assert isinstance(exited, Exited)
        assert (exited.exit_code, exited.reason) == (-signal.SIGKILL, "did not answer for 0.4 s")
        assert exited.restart_in_s is not None


@pytest.mark.slow
async def test_a_server_that_answers_with_an_error_or_hangs_for_a_short_time_goes_on(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervision, changes):
        supervision.start(http_server(probe=AnswersHttp("/404"), unresponsive_after_s=2.0))
        await changes.until(lambda: len(changes.of(Ready)) == 1)
        pid = changes.of(Started)[0].pid
        for _ in range(3):  # longer than the limit, all together
            os.kill(pid, signal.SIGSTOP)
            with anyio.move_on_after(1.0):
                await changes.until(lambda: bool(changes.of(Exited)))
            os.kill(pid, signal.SIGCONT)
            with anyio.move_on_after(0.6):
                await changes.until(lambda: bool(changes.of(Exited)))
        assert not changes.of(Exited)


@pytest.fixture
def longest_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays that are not drawn."""
    monkeypatch.setattr("random.uniform", lambda _low, high: high)


def test_restart_delays_double_up_to_the_limit_until_the_budget_is_spent() -> None:
    budget = RestartBudget(9)
    *delays, end = [budget.spend(1) for _ in range(10)]
    most = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert all(delay is not None and bound / 2 <= delay <= bound for delay, bound in zip(delays, most, strict=True))
    assert end is None


@pytest.mark.usefixtures("longest_pauses")
def test_progress_refills_the_budget_and_a_process_that_lasted_is_restarted_soon() -> None:
    budget = RestartBudget(2)
    assert [budget.spend(1), budget.spend(1), budget.spend(1)] == [0.1, 0.2, None]
    budget.refill()
    assert [budget.spend(1), budget.spend(60), budget.spend(1)] == [0.4, 0.1, None]


@pytest.mark.usefixtures("longest_pauses")
async def test_a_crashing_process_is_restarted_with_growing_delays_then_given_up(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervision, changes):
        supervision.start(python("crasher", "raise RuntimeError('no luck')", max_restarts=3))
        await changes.until(lambda: bool(changes.of(GivenUp)))
    delays = [change.restart_in_s for change in changes.of(Exited)]
    assert delays == [0.1, 0.2, 0.4, None]
    assert [change.restarts for change in changes.of(Started)] == [0, 1, 2, 3]
    (given_up,) = changes.of(GivenUp)
    assert "RuntimeError: no luck (exit code 1)" in given_up.reason
    assert given_up.tail[-1] == "RuntimeError: no luck"
    assert Path(given_up.log).name == "crasher.jsonl"


async def test_a_process_that_a_users_function_ended_is_restarted(tmp_path: Path) -> None:
    """With 3, which once said that another process has its role, so that the run stood still."""
    async with supervising(tmp_path) as (supervision, changes):
        supervision.start(python("actor", "import os; os._exit(3)", max_restarts=1))
        await changes.until(lambda: bool(changes.of(GivenUp)))
    assert [change.restarts for change in changes.of(Started)] == [0, 1]


@pytest.mark.parametrize("code", [EXIT_INPUT_ERROR, EXIT_FENCED])
async def test_input_errors_and_fencing_are_not_restarted(tmp_path: Path, code: int) -> None:
    async with supervising(tmp_path) as (supervision, changes):
        supervision.start(python("actor", f"import sys; sys.exit({code})"))
        await changes.until(lambda: bool(changes.of(GivenUp)))
    assert len(changes.of(Started)) == 1
    assert changes.of(GivenUp)[0].exit_code == code


async def test_a_command_that_does_not_exist_is_given_up_with_its_name(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervision, changes):
        supervision.start(ProcessSpec(name="lost", command=("/no/such/program",)))
        await changes.until(lambda: bool(changes.of(GivenUp)))
    assert "/no/such/program" in changes.of(GivenUp)[0].reason


async def test_a_process_is_ready_when_it_listens_and_keeps_its_port_when_killed(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervision, changes):
        spec = python("server", SERVER, "{port}", port=PortRequest(), ready=WhenListening())
        supervision.start(spec)
        await changes.until(lambda: len(changes.of(Ready)) == 1)
        os.kill(changes.of(Started)[0].pid, signal.SIGKILL)
        await changes.until(lambda: len(changes.of(Ready)) == 2)
        assert changes.of(Exited)[0].reason == "killed by SIGKILL"
    first, second = changes.of(Ready)
    assert first.port == second.port
    assert second.restarts == 1


async def test_a_fixed_port_in_use_is_an_input_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with supervising(tmp_path) as (supervision, changes):
            supervision.start(python("server", SERVER, "{port}", port=PortRequest(fixed=port), ready=WhenListening()))
            await changes.until(lambda: bool(changes.of(GivenUp)))
    given_up = changes.of(GivenUp)[0]
    assert given_up.exit_code == 2
    assert f"port {port}" in given_up.reason
    assert "in use" in given_up.reason


async def test_a_process_that_is_not_ready_in_time_is_killed_and_counts_as_failed(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervision, changes):
        spec = python("mute", SLEEPER, port=PortRequest(), ready=WhenListening(), ready_timeout_s=0.3, max_restarts=0)
        supervision.start(spec)
        await changes.until(lambda: bool(changes.of(GivenUp)))
    assert "not ready within 0.3 s" in changes.of(GivenUp)[0].reason


async def test_a_process_that_will_not_be_ready_is_killed_at_once_with_the_reason(tmp_path: Path) -> None:
    async def refuse(_pid: int) -> None:
        raise NotReady("its store is no store")

    async with supervising(tmp_path) as (supervision, changes):
        spec = python("broken", SLEEPER, ready=WhenConfirmed(refuse), ready_timeout_s=math.inf, max_restarts=0)
        supervision.start(spec)
        await changes.until(lambda: bool(changes.of(GivenUp)))
    assert "its store is no store" in changes.of(GivenUp)[0].reason


async def test_stopping_ends_actors_before_services_before_the_bus_and_kills_the_stubborn(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervision, changes):
        supervision.start(python("bus", SLEEPER, tier=Tier.BUS))
        supervision.start(python("service", SLEEPER, tier=Tier.SERVICE))
        supervision.start(python("actor", STUBBORN, stop_timeout_s=0.5))
        await changes.until(lambda: len(changes.of(Started)) == 3)
        for name in ("bus", "service", "actor"):
            await said(tmp_path / "logs" / f"{name}.jsonl", b"up")
        with anyio.fail_after(200):
            await supervision.stop()
    exits = changes.of(Exited)
    assert [change.spec.name for change in exits] == ["actor", "service", "bus"]
    assert exits[0].exit_code == -signal.SIGKILL
    assert all(change.restart_in_s is None for change in exits)
    assert not any(alive(change.pid) for change in exits)


async def test_grandchildren_end_with_their_process(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervision, changes):
        supervision.start(python("parent", WITH_CHILD, max_restarts=0))
        log = tmp_path / "logs" / "parent.jsonl"
        await said(log, b"text")
        grandchild = int(msgspec.json.decode(log.read_bytes())["text"])
        assert alive(grandchild)
        os.kill(changes.of(Started)[0].pid, signal.SIGKILL)
        await changes.until(lambda: bool(changes.of(GivenUp)))
        assert not alive(grandchild)


async def test_a_killed_guardian_is_replaced(tmp_path: Path) -> None:
    def guardians() -> list[int]:
        found: list[int] = []
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):  # dead, whether or not it was waited for yet
                found += [child.pid] if any("guardian.py" in part for part in child.cmdline()) else []
        return found

    async with supervising(tmp_path) as (supervision, changes):
        supervision.start(python("sleeper", SLEEPER))
        await changes.until(lambda: bool(changes.of(Started)))
        with anyio.fail_after(200):
            while not guardians():  # noqa: ASYNC110 - a foreign process
                await anyio.sleep(0.01)
            (first,) = guardians()
            os.kill(first, signal.SIGKILL)
            while guardians() in ([], [first]):  # noqa: ASYNC110
                await anyio.sleep(0.01)
    assert guardians() == []


async def test_leaving_the_context_leaves_no_process(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervision, changes):
        supervision.start(python("sleeper", SLEEPER))
        supervision.start(python("stubborn", STUBBORN))
        await changes.until(lambda: len(changes.of(Started)) == 2)
    assert not any(alive(change.pid) for change in changes.of(Started))


async def test_two_daemons_of_one_directory_and_host_leave_each_others_processes_alone(tmp_path: Path) -> None:
    async with supervising(tmp_path, "n0") as (first, changes):
        first.start(python("sleeper", SLEEPER))
        await changes.until(lambda: bool(changes.of(Started)))
        pid = changes.of(Started)[0].pid
        await said(tmp_path / "logs" / "sleeper.jsonl", b"up")
        async with supervising(tmp_path, "0"):  # also a name that another one ends with
            assert alive(pid)
        assert alive(pid)


@pytest.mark.usefixtures("longest_pauses")
async def test_progress_refills_the_budget(tmp_path: Path) -> None:
    async with supervising(tmp_path) as (supervision, changes):
        supervision.start(python("crasher", "raise SystemExit(1)", max_restarts=2))
        await changes.until(lambda: len(changes.of(Exited)) == 2)
        supervision.progress()
        await changes.until(lambda: bool(changes.of(GivenUp)))
    assert [change.restart_in_s for change in changes.of(Exited)] == [0.1, 0.2, 0.4, 0.8, None]


async def test_a_process_may_print_anything_and_end_by_any_signal(tmp_path: Path) -> None:
    code = r"""
        import os
        lines = [b'{"answer": ' + b"[" * 60000, b'{"event": "\\u001b[2J", "\xff": "\xff"}', b"\x00\x1b[2J\xff\x9b"]
        os.write(2, b"\n".join(lines) + b"\n")
        os.kill(os.getpid(), 35)
    """
    async with supervising(tmp_path) as (supervision, changes):
        supervision.start(python("sleeper", SLEEPER))
        supervision.start(python("talker", code, max_restarts=1))
        await changes.until(lambda: bool(changes.of(GivenUp)))
        sleeper = next(change.pid for change in changes.of(Started) if change.spec.name == "sleeper")
        assert alive(sleeper)
    given_up = changes.of(GivenUp)[0]
    assert "killed by signal 35" in given_up.reason
    assert not any(character < " " for character in given_up.reason + "".join(given_up.tail))


async def test_output_is_kept_as_json_lines(tmp_path: Path) -> None:
    code = r"""
        import sys
        print('{"event": "said", "level": "info"}')
        print("plain \x1b[31mred\x1b[0m")
        sys.stderr.write("no newline at the end")
    """
    async with supervising(tmp_path) as (supervision, changes):
        supervision.start(python("talker", code, max_restarts=0))
        await changes.until(lambda: bool(changes.of(GivenUp)))
    lines = [msgspec.json.decode(line) for line in (tmp_path / "logs" / "talker.jsonl").read_bytes().splitlines()]
    assert {line["event"] for line in lines} == {"said", "output"}
    assert {line.get("text") for line in lines} == {None, "plain red", "no newline at the end"}


@pytest.mark.parametrize(("said", "reason"), [("hit an exception", "Scheduler hit an exception"), ("all is well", "")])
async def test_one_that_kills_itself_says_why(tmp_path: Path, said: str, reason: str) -> None:
    """What it says of it may be a long traceback: SGLang's has 88 lines on the CPU."""
    lines = f"print('Scheduler {said}'); print('  File\\n' * 500, flush=True)"
    code = f"import os, signal; {lines}; os.kill(os.getpid(), signal.SIGKILL)"
    spec = ProcessSpec(name="engine", command=(sys.executable, "-c", code), crash_words=("hit an exception",))
    async with supervising(tmp_path) as (supervision, changes):
        supervision.start(spec)
        await changes.until(lambda: bool(changes.of(Exited)))
    exited = changes.of(Exited)[0]
    assert isinstance(exited, Exited)
    assert exited.reason == (f"{reason} (killed by SIGKILL)" if reason else "killed by SIGKILL")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('epoch 3 done', flush=True); sys.exit(7)", "exit code 7; its last output: epoch 3 done"),
        ("print('bad topology', flush=True); sys.exit(2)", "bad topology (exit code 2, input error)"),
        ("print('epoch 3 done', flush=True); os.kill(os.getpid(), 15)", "killed by SIGTERM"),
        ("print('KeyboardInterrupt', flush=True); sys.exit(143)", "exit code 143, as after SIGTERM"),
        ("print('x', flush=True); signal.raise_signal(signal.SIGINT)", "killed by SIGINT"),
        ("print('epoch 3 done', flush=True); os.abort()", "killed by SIGABRT; its last output: epoch 3 done"),
        ("raise KeyError('x')", "KeyError: 'x' (exit code 1)"),
    ],
)
async def test_an_end_is_not_blamed_on_the_last_line_that_was_printed(tmp_path: Path, code: str, reason: str) -> None:
    async with supervising(tmp_path) as (supervision, changes):
        supervision.start(python("ends", f"import os, signal, sys; {code}", max_restarts=0))
        await changes.until(lambda: bool(changes.of(Exited)))
    (exited,) = changes.of(Exited)
    assert isinstance(exited, Exited)
    assert exited.reason == reason
