"""Runs one program in namespaces of its own, without processes of its own. Standard library only.

Run as `python -I launcher.py FOLDER STATUS_FD TIME_FD`. Standard input has the order, as 8 bytes of length and JSON,
and then what the program reads. The launcher writes "+" to STATUS_FD once the sandbox stands, or the reason why it does
not, and "!" if the sandbox is killed. In the file TIME_FD it keeps two numbers of nanoseconds, 8 bytes each: the
program's own time, which is that of all runs less the time in which they waited for a core; and when it last looked.
Between two runs a sandbox is made: of that time, up to BETWEEN_NS are own time.

With inputs in the order, the program runs once for each, in new namespaces and in an empty folder each time. The
launcher writes how each run ended: its exit code and the length of its output, 8 bytes each, and the output.
"""

import atexit
import builtins
import fcntl
import importlib
import json
import mmap
import os
import resource
import signal
import struct
import sys
import threading
import time
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

IS_PROGRAM = __name__ == "__main__"
ROOT = str(Path(__file__).resolve().parents[4])  # import path of `actors`, which an isolated interpreter lacks
FOLDER, STATUS_FD, TIME_FD = (sys.argv[1], int(sys.argv[2]), int(sys.argv[3])) if IS_PROGRAM else ("", -1, -1)
LENGTH_BYTES = 8
LOOK_S = 0.02  # between two looks at the own time of a program
BETWEEN_NS = 20_000_000  # twice what it takes without a wait for a core
MAX_FILES = 10_000  # in its folder; each takes memory of the kernel
RAISED = 1
READY, LOST = b"+", b"!"
USUAL_MODULES = (
    "typing",
    "collections",
    "heapq",
    "bisect",
    "math",
    "itertools",
    "functools",
    "string",
    "re",
    "operator",
)
TOO_MUCH = -1  # code of a run that wrote too much

if IS_PROGRAM:
    sys.path.insert(0, ROOT)
from runtime.functions import isolation  # noqa: E402 - needs ROOT
from runtime.functions.seccomp import refuse_new_processes  # noqa: E402
from runtime.util.descendants import set_parent_death_signal  # noqa: E402

if IS_PROGRAM:
    sys.path.remove(ROOT)


def main() -> int:
    """Run the program of the order; return its exit code, or 128 + the signal that ended it."""
    set_parent_death_signal(signal.SIGKILL)
    order = _order()
    own_time = mmap.mmap(TIME_FD, 2 * LENGTH_BYTES)
    os.close(TIME_FD)
    if order["inputs"] is None:
        return _isolated(order, own_time)
    for given, max_bytes in order["inputs"]:
        code, output = _run_of(order, own_time, given.encode("utf-8", "surrogatepass"), max_bytes)
        lengths = (number.to_bytes(LENGTH_BYTES, "big", signed=True) for number in (code, len(output)))
        _write_all(1, b"".join((*lengths, output)))
        if code != 0:
            break
    return 0


def _run_of(order: dict[str, Any], own_time: mmap.mmap, given: bytes, max_bytes: int) -> tuple[int, bytes]:
    """Run the program with an input; return its exit code and its output."""
    reading, writing = os.pipe()
    run = os.fork()
    if run == 0:
        set_parent_death_signal(signal.SIGKILL)
        os.dup2(_sealed(given), 0)
        os.dup2(writing, 1)
        os.closerange(3, STATUS_FD)
        os.closerange(STATUS_FD + 1, 256)
        os._exit(_isolated(order, own_time))
    os.close(writing)
    output = bytearray()
    while len(output) <= max_bytes and (read := os.read(reading, 1 << 16)):
        output += read
    os.close(reading)
    if len(output) > max_bytes:
        os.kill(run, signal.SIGKILL)
        os.waitpid(run, 0)
        return TOO_MUCH, bytes(output[:max_bytes])
    status = os.waitpid(run, 0)[1]
    if os.WIFSIGNALED(status):  # the program cannot do that
        os.write(STATUS_FD, LOST)
    return _code(status), bytes(output)


def _sealed(content: bytes) -> int:
    """A file in memory that cannot grow, so that the program cannot keep data in it."""
    memory = os.memfd_create("input", os.MFD_ALLOW_SEALING)
    _write_all(memory, content)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    os.lseek(memory, 0, os.SEEK_SET)
    return memory


def _write_all(fd: int, content: bytes) -> None:
    while content:
        content = content[os.write(fd, content) :]


def _isolated(order: dict[str, Any], own_time: mmap.mmap) -> int:
    """Run the program in new namespaces; return its exit code, or 128 + the signal that ended it."""
    refusal = isolation.attempted(isolation.enter_user_and_pid_namespaces)
    if refusal is not None:
        return _refused(refusal)
    init = os.fork()
    if init == 0:
        os._exit(_as_init(order, own_time))
    status = os.waitpid(init, 0)[1]
    if os.WIFSIGNALED(status):  # the program cannot do that
        os.write(STATUS_FD, LOST)
    return _code(status)


def _as_init(order: dict[str, Any], own_time: mmap.mmap) -> int:
    """The first process of the namespace: when it ends, the kernel ends all others. The program cannot touch it."""
    set_parent_death_signal(signal.SIGKILL)
    scratch = f"size={order['scratch_bytes']},nr_inodes={MAX_FILES},mode=700".encode()
    refusal = isolation.attempted(lambda: isolation.enter_other_namespaces(FOLDER, (), scratch))
    if refusal is not None:
        return _refused(refusal)
    isolation.set_traceable(False)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    program = os.fork()
    if program == 0:
        set_parent_death_signal(signal.SIGKILL)
        isolation.set_traceable(True)  # else it could not open its own /proc/self/fd
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.setsid()  # a signal to its process group reaches nothing else
        own_time.close()
        _limit(order)
        refusal = isolation.attempted(refuse_new_processes)
        if refusal is not None:
            os._exit(_refused(refusal))
        os.write(STATUS_FD, READY)
        os.close(STATUS_FD)
        os._exit(_run(order))
    os.close(STATUS_FD)
    _keep_own_time(program, own_time)
    return _code(os.waitpid(program, 0)[1])


def _keep_own_time(program: int, own_time: mmap.mmap) -> None:
    """Add the own time of a program until it has ended, and of the time since the run before."""
    (before, looked), started = struct.unpack("=qq", own_time[:]), time.monotonic_ns()
    before += min(started - looked, BETWEEN_NS) if looked else 0
    counts: dict[str, tuple[int, int]] = {}
    has_ended = False
    while not has_ended:
        signal.sigtimedwait({signal.SIGCHLD}, LOOK_S)
        has_ended = os.waitid(os.P_PID, program, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        counts.update(_counts_of(program))
        now = time.monotonic_ns()
        own_time[:] = struct.pack("=qq", before + own_ns_of(now - started, list(counts.values())), now)


def _counts_of(program: int) -> dict[str, tuple[int, int]]:
    """Nanoseconds that each thread ran, and that it waited for a core. Threads that have ended are not there."""
    found: dict[str, tuple[int, int]] = {}
    for thread in Path(f"/proc/{program}/task").iterdir():
        with suppress(OSError):
            ran, waited, turns = map(int, (thread / "schedstat").read_text(encoding="ascii").split())
            if turns:  # 0: the kernel does not count
                found[thread.name] = (ran, waited)
    return found


def own_ns_of(elapsed_ns: int, counts: list[tuple[int, int]]) -> int:
    """The part of a time in which a program ran or waited by itself, and not for a core.

    Threads that wait while another one runs lose no time. Without any count nothing is known, and the answer is 0.

    Args:
        elapsed_ns: the time, in nanoseconds.
        counts: for each thread, how long it ran and how long it waited for a core.
    """
    ran, waited = (sum(each) for each in zip(*counts, strict=True)) if counts else (0, elapsed_ns)
    return min(elapsed_ns, max(ran, elapsed_ns - waited))


def _order() -> dict[str, Any]:
    size = int.from_bytes(os.read(0, LENGTH_BYTES), "big")
    read = b""
    while len(read) < size:
        read += os.read(0, size - len(read))
    order: dict[str, Any] = json.loads(read)
    return order


def _refused(reason: str) -> int:
    os.write(STATUS_FD, reason.encode()[:4000])
    return RAISED


def _code(status: int) -> int:
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _limit(order: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_AS: order["memory_bytes"],
        resource.RLIMIT_CPU: order["cpu_s"],  # SIGXCPU, and SIGKILL a second later
        resource.RLIMIT_FSIZE: order["scratch_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: 64,  # threads; the kernel counts them for users other than root
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        most = limit + (kind == resource.RLIMIT_CPU)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (min(limit, most), most))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)


def _run(order: dict[str, Any]) -> int:
    """Run the program as a script; then call its function, if the order names one."""
    os.chdir(FOLDER)
    os.environ.update(HOME=FOLDER, TMPDIR=FOLDER)
    sys.argv = ["program.py"]
    module = types.ModuleType("__main__")
    module.__file__ = os.path.join(FOLDER, "program.py")
    sys.modules["__main__"] = module
    code = 0
    try:
        function, checks = order["function"], order["checks"]
        if function is None and checks is None:
            _execute(order["program"], module)
        else:
            module.__name__ = "program"  # so that `if __name__ == "__main__"` runs nothing
            answers = os.dup(1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            _know_usual_names()
            _execute(order["program"], module)
            if function is not None:
                _call_all(module, function, order["calls"], answers)
            else:
                _execute(checks[0], module)
                _write_all(answers, checks[1].encode())
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - a program may raise anything; it has then failed
        return RAISED
    try:
        return _finished(module, code)
    except BaseException:  # noqa: BLE001 - so may a thread's end, or what the program wrote its output with
        return RAISED


def _execute(program: str, module: types.ModuleType) -> None:
    exec(compile(program, "program.py", "exec"), module.__dict__)


def _know_usual_names() -> None:
    """Make names known that such tasks use without an import. Those that Python or the program has stay."""
    for name in USUAL_MODULES:
        module = importlib.import_module(name)
        names = getattr(module, "__all__", [each for each in dir(module) if not each.startswith("_")])
        for each, value in ((name, module), *((each, getattr(module, each)) for each in names)):
            builtins.__dict__.setdefault(each, value)


def _call_all(module: types.ModuleType, name: str, calls: list[Any], answers: int) -> None:
    """Write the value of each call as a line of JSON."""
    for arguments in calls:
        owner = getattr(module, "Solution", None)
        call = getattr(owner(), name) if owner is not None and hasattr(owner, name) else getattr(module, name)
        _write_all(answers, json.dumps(call(*arguments), default=_listed).encode() + b"\n")


def _listed(value: Any) -> Any:
    """An array or a number of NumPy as JSON has them; raises for anything else."""
    return value.tolist()


def _finished(module: types.ModuleType, code: int) -> int:
    """End the program as an interpreter ends: wait for its threads, call its exit functions, write its files."""
    threading._shutdown()  # pyright: ignore - as multiprocessing ends a process; neither has a public name
    atexit._run_exitfuncs()  # pyright: ignore
    _flush(sys.stdout)  # before the names are gone that a class of the program may need for it
    sys.stdout = sys.__stdout__
    module.__dict__.clear()
    _flush(sys.__stdout__)
    return code & 0xFF


def _flush(stream: Any) -> None:
    if stream is not None and not getattr(stream, "closed", False):
        stream.flush()


if IS_PROGRAM:
    try:
        ended = main()
    except BaseException as error:  # noqa: BLE001 - the reason must reach the grader
        with suppress(OSError):
            os.write(STATUS_FD, f"the launcher raised {error!r}".encode()[:4000])
        ended = RAISED
    os._exit(ended)
