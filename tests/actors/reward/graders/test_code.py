"""The grader `code`: what counts as a program and as right, and that no program gets out of its sandbox."""

import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from actors.reward import grader_check
from actors.reward.causes import cause_of
from actors.reward.grader_check import SampleRow, check_graders
from actors.reward.graders import builtin
from actors.reward.graders.builtin import find_grader
from actors.reward.graders.code import launcher, running
from actors.reward.graders.code.grader import Cases, cases_in, code, program_in, same_output
from actors.reward.graders.code.running import NOT_ISOLATED, Limits, Ran, SandboxError, run_inputs, run_program
from actors.reward.samples import GradedSample
from actors.reward.sandbox import sandbox_of
from messages import Int32Array, Prompt
from runtime.functions import isolation
from runtime.util.descendants import children_of
from tests.build.topology import topology_with
from tests.support.checks import context_of

ADDS = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"}
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3"
DOUBLES = {"inputs": ["1\n", "4\n"], "outputs": ["2\n", "8\n"]}
FIRSTS = {"inputs": [[[3, 1]], [[5]]], "outputs": [[3], [5]], "fn_name": "first"}
REFUSAL = isolation.refusal()
T = TypeVar("T")
TRIES = 10  # of a program on a busy machine


def assert_scores(expected: float, program: str, label: Any, **metadata: Any) -> None:
    """The score of a program; where this machine refuses namespaces, that no program runs."""
    response = f"Here:\n```python\n{program}\n```\n"
    if REFUSAL is None:
        assert code(response, label, metadata, timeout_s=60) == expected
    else:
        with pytest.raises(SandboxError, match="cannot isolate"):
            code(response, label, metadata, timeout_s=60)


def ran(program: str, **limits: Any) -> Ran:
    """How a program ends in the sandbox; where there is none, as a program that fails."""
    if REFUSAL is None:
        return run_program(program, **limits)
    with pytest.raises(SandboxError, match="cannot isolate"):
        run_program(program, **limits)
    return Ran(1, b"")


@pytest.mark.parametrize(
    ("program", "label", "expected"),
    [
        ("print(2 * int(input()))", DOUBLES, 1.0),
        ("print(int(input()) + 1)", DOUBLES, 0.0),  # right for the first test alone
        ("print(2 * int(input()))\nraise SystemExit(3)", DOUBLES, 0.0),
        ("if __name__ == '__main__':\n    print(2.0 * int(input()))", json.dumps(DOUBLES), 1.0),
        ("def add(a, b):\n    print('noise')\n    return a + b", ADDS, 1.0),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", ADDS, 1.0),
        ("def add(a, b):\n    return str(a + b)", ADDS, 0.0),
        ("def other(a, b):\n    return a + b", ADDS, 0.0),
        ("def add(a, b): return a +", ADDS, 0.0),
        ("class Solution:\n    def add(self, a: List[int], b):\n        return sum(deque([a, b]))", ADDS, 1.0),
        ("def first(l):\n    return [l[0]]", FIRSTS, 1.0),  # APPS wraps a value in a list or does not
        ("def first(l):\n    return l[0]", FIRSTS, 1.0),
        ("def add(a, b):\n    print(a)\n    return a + b", ["assert add(1, 2) == 3", "assert add(2, 2) == 4"], 1.0),
        ("def add(a, b):\n    return 3", ["assert add(1, 2) == 3", "assert add(2, 2) == 4"], 0.0),
        ("raise SystemExit(0)", ["assert add(1, 2) == 3"], 0.0),
        ("import os\nos._exit(0)", ["assert add(1, 2) == 3"], 0.0),
    ],
)
def test_a_program_is_right_if_all_tests_pass(program: str, label: Any, expected: float) -> None:
    assert_scores(expected, program, label)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("```python\na = 1\n```", "a = 1"),
        ("```py\na = 1\n```\nor\n```\nb = 1\n```", "a = 1"),  # what is marked as Python is the program
        ("```\na()\n```\nor\n```\nb()\n```\nprints\n```\n1\n2\n```", "b()"),  # and an example of output is none
        ("```python\na\n```python\nb\n```", "b"),
        ("~~~python\ns = '''\n```\n'''\n~~~", "s = '''\n```\n'''"),
        ("```python\na\n```\n```bash\nls\n```", "a"),
        ("```python\ncut off", "cut off"),
        ("<think>```python\na\n```</think>b = 2", "b = 2"),
        ("1. So:\n   ```python\n   def f():\n       return 1\n\n   f()\n   ```", "def f():\n    return 1\n\nf()"),
        ("  ```\n  a = [\n 1]\n  ```", "a = [\n1]"),  # no more than the indent of the fence
        ("```py3\na\n```\n```\nb()\n```", "a"),
        ("```python\n\ufeffa\n```", "a"),  # the mark with which some files begin
        ("```json\n{}\n```", ""),
        ("  \n", ""),
        ("", ""),
    ],
)
def test_the_last_block_of_python_is_the_program(response: str, expected: str) -> None:
    assert program_in(response) == expected


@pytest.mark.parametrize(
    ("label", "metadata", "expected"),
    [
        (ADDS, {}, Cases(([1, 2], [3, 4]), (3, 7), "add")),
        ({**ADDS, "outputs": [[3], [7]]}, {}, Cases(([1, 2], [3, 4]), ([3], [7]), "add", wrapped=True)),  # as in APPS
        (
            [{"input": "[1]\n2", "output": "3", "testtype": "functional"}],
            {"func_name": "f"},
            Cases(([[1], 2],), (3,), "f"),
        ),
        ([{"input": "1", "output": "2", "testtype": "stdin"}], {"func_name": "f"}, Cases(("1",), ("2",))),
        ({"inputs": [["1", "2"]], "outputs": [[3]]}, {}, Cases(("1\n2",), ("3",))),
        ({"input": ["1"], "output": ["2"]}, {}, Cases(("1",), ("2",))),  # as in CodeContests
        (["assert f(1)"], {}, Cases(checks="\nassert f(1)")),  # as in MBPP
        ({"test_list": ["assert f(1)"], "test_setup_code": "x = 1"}, {}, Cases(checks="x = 1\nassert f(1)")),
        (CHECK, {"entry_point": "f"}, Cases(checks=f"\n{CHECK}\ncheck(f)")),  # as in HumanEval
        ({"test": CHECK, "entry_point": "f"}, {}, Cases(checks=f"\n{CHECK}\ncheck(f)")),
        (CHECK, {}, None),
        ({"inputs": ["1"], "outputs": []}, {}, None),
        ({"inputs": [], "outputs": []}, {}, None),
        ("no JSON", {}, None),
        ("[" * 100_000, {}, None),
        (None, {}, None),
        ([1], {}, None),
    ],
)
def test_tests_are_read_in_the_formats_of_data_sets(label: Any, metadata: dict[str, Any], expected: Any) -> None:
    assert cases_in(label, metadata) == expected


@pytest.mark.parametrize(
    ("output", "wanted", "expected"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1  \n\n", "1", True),
        ("1.0", "1", True),
        ("0.30000001", "0.3", False),
        ("YES", "yes", False),
        ("1_0", "10", False),  # as Python writes a number, and nothing else
        ("１２", "12", False),  # digits of another width are other text
        ("\n1\n2", "1\n2", True),
        ("a  b", "a b", True),
        ("a\n\nb", "a\nb", False),
        ("1 2", "1\n2", False),
        ("", "0", False),
        ("nan", "nan", True),
    ],
)
def test_outputs_are_compared_by_line_and_numbers_by_value(output: str, wanted: str, expected: bool) -> None:
    assert same_output(output, wanted) == expected


def test_a_label_without_tests_is_refused_before_a_run_and_scores_zero() -> None:
    with pytest.raises(ValueError, match="the label has no tests"):
        find_grader("code")(GradedSample(label="72"))
    assert code("print(1)", "72") == 0.0


@pytest.mark.parametrize(
    ("limits", "seconds"), [({}, 8.0), ({"code": {"timeout_s": 60.0}}, 58.0), ({"code": {"timeout_s": 1.0}}, 0.5)]
)
def test_the_tests_of_a_response_have_the_time_of_the_recipe(
    limits: dict[str, Any], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    monkeypatch.setattr(builtin, "code", lambda *_, timeout_s: given.append(timeout_s) or 1.0)
    for name, value in sandbox_of(topology_with(reward={"limits": limits})).also.items():
        monkeypatch.setenv(name, value)
    assert find_grader("code")(GradedSample(label=DOUBLES)) == 1.0
    assert given == [seconds]


@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True:\n    os.fork()",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.posix_spawn('/bin/true', ['true'], {})",
        "import os\nos.execv('/bin/true', ['true'])",
    ],
)
def test_a_program_starts_no_processes(program: str) -> None:
    assert ran(program).code == 1  # the call raised


def test_a_program_may_start_threads() -> None:
    program = "import threading\nthread = threading.Thread(target=print, args=('hi',))\nthread.start()\nthread.join()"
    assert ran(program).output == (b"hi\n" if REFUSAL is None else b"")


def test_a_program_that_eats_memory_fails() -> None:
    assert ran("x = 'a' * (1 << 30)", limits=Limits(memory_bytes=1 << 28)).code == 1


def test_endless_output_is_cut_and_ends_the_program() -> None:
    found = ran("while True:\n    print('x' * 1000)", max_output_bytes=10_000)
    assert (found.code, len(found.output)) in ((-1, 10_000), (1, 0))


def test_a_program_ends_at_its_time_and_at_its_cpu_time() -> None:
    assert ran("import time\ntime.sleep(60)", limit_s=0.5).code in (-1, 1)
    assert ran("while True: pass", limits=Limits(cpu_s=1), limit_s=120).code in (128 + 24, 1)  # SIGXCPU


@pytest.mark.parametrize(
    ("elapsed", "threads", "own"),
    [
        (10, [(10, 0)], 10),  # it had the core
        (10, [(6, 4)], 6),  # others had the core
        (10, [(6, 0)], 10),  # it slept for the rest
        (10, [(0, 0)], 10),
        (10, [(1, 3)], 7),  # it ran, waited and slept
        (10, [(0, 0), (6, 4)], 6),  # a thread waits for another
        (10, [(10, 0), (2, 8)], 10),  # a thread ran all the time
        (10, [(5, 5), (5, 5)], 10),  # they took turns
        (10, [(2, 8), (2, 8)], 4),
        (10, [(20, 0)], 10),
        (10, [], 0),  # the kernel counted nothing
    ],
)
def test_own_time_of_a_program_leaves_out_the_wait_for_a_core(
    elapsed: int, threads: list[tuple[int, int]], own: int
) -> None:
    assert launcher.own_ns_of(elapsed, threads) == own


def test_a_program_that_was_not_given_its_time_is_not_wrong() -> None:
    reading, writing = os.pipe()
    try:
        for own_s, is_wrong in ((0.0, False), (0.049, False), (0.05, True)):
            with mmap.mmap(-1, 16) as own_time:
                own_time[:] = struct.pack("=qq", round(own_s * 1e9), 0)
                clock = running._Clock(own_time, 0.05)  # pyright: ignore[reportPrivateUsage]
                if is_wrong:
                    assert not clock.waits_for(reading)
                    continue
                with pytest.raises(SandboxError, match=r"too busy: in 0\.25 s, a program ran or slept") as raised:
                    clock.waits_for(reading)
                assert cause_of(raised.value) == "sandbox_lost"
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize(("since_ns", "own_ns"), [(10**9, launcher.BETWEEN_NS), (None, 0)])
def test_making_the_next_sandbox_is_not_a_wait_for_a_core(
    since_ns: int | None, own_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a slow program with a hundred short tests would never be wrong, on any machine."""
    monkeypatch.setattr(launcher, "own_ns_of", lambda *_: 0)
    looked_ns = 0 if since_ns is None else time.monotonic_ns() - since_ns
    with mmap.mmap(-1, 16) as own_time, subprocess.Popen([sys.executable, "-c", ""]) as program:
        own_time[:] = struct.pack("=qq", 5, looked_ns)
        launcher._keep_own_time(program.pid, own_time)  # pyright: ignore[reportPrivateUsage]
        assert struct.unpack("=qq", own_time[:])[0] == 5 + own_ns


@contextmanager
def busy_core() -> Iterator[None]:
    """This thread and what it starts share a core with two endless loops."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        for loop in loops:
            loop.kill()
            loop.wait()


def patient(call: Callable[[], T]) -> T:
    """Repeat a call while the machine is too busy for it, as the reward actor grades such a sample again."""
    for _ in range(TRIES):
        with suppress(SandboxError):
            return call()
    raise AssertionError(f"too busy {TRIES} times")


def test_a_busy_core_changes_no_score() -> None:
    """The right program needs a quarter of its time, of which it gets a third, or less beside other tests."""
    right = "import time\nwhile time.process_time() < 0.25: pass\nprint(2 * int(input()))"
    with busy_core():
        for program, score in ((right, 1.0), ("while True: pass", 0.0), ("import time\ntime.sleep(99)", 0.0)):
            if REFUSAL is None:
                response = f"```python\n{program}\n```"
                assert patient(partial(code, response, DOUBLES, timeout_s=1.0)) == score
            else:
                assert ran(program).code == 1


def test_a_slow_program_is_judged_by_the_time_of_all_its_runs() -> None:
    """What threads did that have ended counts."""
    work = "import threading, time\ndef work():\n    while time.thread_time() < 0.4: pass\n"
    program = work + "thread = threading.Thread(target=work)\nthread.start()\nthread.join()"
    if REFUSAL is not None:
        assert ran(program).code == 1
        return
    codes = patient(lambda: [run.code for run in run_inputs(program, [("", 10)] * 3, limit_s=0.75)])
    assert codes == [0, -1]


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos.nice(19)",
        "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})",
        "import os\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))",
        "open('/proc/1/mem', 'rb')",
        "import ctypes\nassert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0",  # PTRACE_ATTACH
        "import os\nos.memfd_create('unbounded')",
        "import ctypes\nassert ctypes.CDLL(None).shmget(0, 1 << 30, 0o1600) >= 0",
        "for number in range(10**5): open(str(number), 'w').close()",
        "for number in range(10**5): open(f'/dev/shm/{number}', 'w').close()",
    ],
)
def test_a_program_changes_neither_its_limits_nor_its_sandbox(program: str) -> None:
    """With less of a core it would not be judged by its time, nor if it stopped the sandbox."""
    assert ran(program).code == 1


def test_a_program_that_kills_its_process_group_ends_itself_alone() -> None:
    assert ran("import os\nos.kill(0, 9)").code in (128 + 9, 1)


@pytest.mark.parametrize(
    "program",
    [
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('ok'))).start()",
        "import atexit\natexit.register(print, 'ok')",
        "import atexit, io, os, sys\nsys.stdout = io.StringIO()\n"
        "atexit.register(lambda: os.write(1, sys.stdout.getvalue().encode()))\nprint('ok')",
        "import sys\nprint('ok')\nsys.stdout = sys.stderr",
        "import sys\nprint('ok')\nsys.stdout = None",
        "out = open(1, 'w', closefd=False)\nout.write('ok\\n')",
        "import io, os, sys\nclass Fast(io.IOBase):\n  buffer = io.BytesIO()\n"
        "  def write(self, text): self.buffer.write(text.encode())\n"
        "  def flush(self): os.write(1, self.buffer.getvalue()), self.buffer.truncate(0), self.buffer.seek(0)\n"
        "sys.stdout = Fast()\nprint('ok')",
        "import sys\nclass Out:\n  write, flush = sys.stdout.write, sys.stdout.flush\nsys.stdout = Out()\nprint('ok')",
        "import sys\nclass Late:\n  def __del__(self): print('ok')\nlate = Late()",
        "import os\nprint('ok' if __file__.endswith('.py') else __file__)",
        "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'x')\n  except OSError: pass\nprint('ok')",
    ],
)
def test_a_program_ends_as_with_an_interpreter_of_its_own(program: str) -> None:
    """Threads, exit functions and open files write the rest of its output."""
    assert ran(program) == (Ran(0, b"ok\n") if REFUSAL is None else Ran(1, b""))


def test_a_program_reaches_no_server_of_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        port = server.getsockname()[1]
        assert ran(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)").code == 1
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_program_writes_into_its_own_folder_alone_and_leaves_nothing(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    assert ran(f"open({str(outside)!r}, 'w')").code == 1
    assert not outside.exists()
    found = ran("import os\nopen('inside', 'w').write('x')\nprint(os.getcwd(), os.listdir('.'))")
    folder, _, listed = found.output.decode().partition(" ")
    assert listed in ("['inside']\n", "")
    assert folder == "" or not Path(folder).exists()


def test_a_program_sees_no_other_process_and_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hidden")
    program = "import os\nprint('SECRET_KEY' in os.environ, sorted(filter(str.isdigit, os.listdir('/proc'))))"
    assert ran(program).output in (b"False ['1', '2']\n", b"")


KEYRINGS = """
import ctypes, platform
libc, session, user = ctypes.CDLL(None, use_errno=True), -3, -4
add_key, request_key, keyctl = (248, 249, 250) if platform.machine() == "x86_64" else (217, 218, 219)
for call in (
    (add_key, b"user", b"physarum:left", b"x", 1, session),
    (add_key, b"keyring", b"physarum:ring", None, 0, user),
    (request_key, b"user", b"physarum:left", None, session),
    (keyctl, 0, session, 0),  # its id
    (keyctl, 1, b"physarum:own"),  # another session keyring
    (keyctl, 11, session, None, 0),  # its keys
    (keyctl, 6, session),  # their description
):
    print(libc.syscall(*call), ctypes.get_errno(), end=" ")
"""


def test_a_program_reaches_no_keyring() -> None:
    """Keys of the user are there; so would be what another program left."""
    found = ran(KEYRINGS)
    assert found.output in (b"-1 1 " * 7, b""), found


def test_a_program_inherits_nothing_but_its_own_folder() -> None:
    program = "import os, tempfile\nprint(sorted(os.environ), os.listdir('/proc/self/fd'))\n"
    program += "home = os.getcwd()\nprint([home == each for each in (os.environ['HOME'], os.environ['TMPDIR'], "
    program += "os.path.expanduser('~'), tempfile.gettempdir())], os.listdir(home))"
    kept = "'HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH', 'PYTHONHASHSEED', 'TMPDIR'"
    expected = f"[{kept}] ['0', '1', '2', '3']\n[True, True, True, True] []\n"
    found = ran(program)
    assert found.output in (expected.encode(), b""), found


def ran_on(program: str, *inputs: str, **options: Any) -> list[Ran]:
    """How a program ends for each input; where there is no sandbox, as a program that fails."""
    if REFUSAL is None:
        return list(run_inputs(program, [(each, 1000) for each in inputs], limit_s=60, **options))
    with pytest.raises(SandboxError, match="cannot isolate"):
        list(run_inputs(program, [(each, 1000) for each in inputs], limit_s=60))
    return []


def test_a_program_has_an_empty_folder_and_no_memory_of_earlier_inputs() -> None:
    program = "import os\nprint(input(), os.listdir('.'), os.getpid())\nopen('left', 'w').write('x' * 1000)"
    found = ran_on(program, "a", "b\nrest", "\ud800")
    outputs = [b"a [] 2\n", b"b [] 2\n", b"\xed\xa0\x80 [] 2\n"]
    assert [(one.code, one.output) for one in found] in ([(0, output) for output in outputs], [])


def test_the_first_input_that_a_program_fails_is_the_last() -> None:
    program = "number = int(input())\nprint(number)\nraise SystemExit(number)"
    assert [one.code for one in ran_on(program, "0", "3", "0")] in ([0, 3], [])
    cut = ran_on("print('x' * int(input()))", "1", "2000", "1")
    assert [(one.code, len(one.output)) for one in cut] in ([(0, 2), (-1, 1000)], [])


def test_what_a_program_writes_is_the_output_of_its_own_run() -> None:
    """It holds no descriptor of the launcher, and what looks like the launcher's report is output."""
    program = """import os
for fd in range(1, 300):
    try:
        os.write(fd, bytes(16))
    except OSError:
        pass
"""
    found = ran_on(program, "a", "b")
    assert {one.code for one in found} <= {0}
    assert len({one.output for one in found}) <= 1


def test_right_values_are_nowhere_in_the_sandbox() -> None:
    program = "import gc, sys\ndef add(a, b):\n    return sys.stdin.read() or open('/proc/self/cmdline').read()"
    assert_scores(0.0, program, ADDS)


@pytest.mark.parametrize("depth", [0, 1], ids=["one run", "runs of inputs"])
def test_a_sandbox_that_is_killed_is_no_wrong_answer(depth: int) -> None:
    killed, program = threading.Event(), "import time\ntime.sleep(30)"

    def run() -> object:
        return list(run_inputs(program, [("", 10)], limit_s=60)) if depth else run_program(program, limit_s=60)

    def kill_the_first_child() -> None:
        while not killed.is_set():
            parents = children_of(os.getpid())
            for parent in [child for each in parents for child in children_of(each)] if depth else parents:
                for init in children_of(parent):
                    if len(children_of(init)) == 1:
                        os.kill(init, signal.SIGKILL)
                        return
            killed.wait(0.01)

    killer = threading.Thread(target=kill_the_first_child)
    killer.start()
    try:
        with pytest.raises(SandboxError, match="was killed" if REFUSAL is None else "cannot isolate"):
            run()
    finally:
        killed.set()
        killer.join()


def test_the_check_runs_a_program_within_a_grader_process(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = {"sandbox": "isolated", "timeout_s": 20.0}
    topology = topology_with(data=[{"name": "d", "path": "p", "rm_type": "code"}], reward=reward)
    label = {"inputs": ["1"], "outputs": ["1"]}
    prompt = Prompt(data="d", row=0, text="p", prompt_ids=Int32Array([1]), rm_type="code", label=label)
    rows, ran = {"data.0": SampleRow(prompt, group=False)}, list[str]()
    context = context_of(topology, doing=lambda *of, limit_s: ran.append(of[2]))
    assert (list(check_graders(context, rows)), context.notes) == ([], [])
    assert ran == ["grading a program"]

    async def refused(*_: object) -> grader_check.Failure:
        return grader_check.Failure(
            f"raised SandboxError('{NOT_ISOLATED}: /proc/self/setgroups: Read-only file system')"
        )

    monkeypatch.setattr(grader_check, "_failure_of", refused)
    (problem,) = check_graders(context_of(topology), rows)
    assert problem.key == "data.0.rm_type"
    assert "Read-only file system" in problem.message
