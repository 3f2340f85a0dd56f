"""Hooks and fixtures of all tests. Fixtures of one subject are in tests/fixtures/, one plug-in per file."""

import contextlib
import gc
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from runtime.settings.devices import HIDDEN

# Or each worker compiles all tests again, and each process of each test all our modules.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

pytest_plugins = [f"tests.fixtures.{file.stem}" for file in sorted(Path(__file__).parent.glob("fixtures/[a-z]*.py"))]

SESSION_MARK = "PHYSARUM_TEST_SESSION"  # in the environment of every process that a test starts, orphans included
END_S = float(os.environ.get("PHYSARUM_TEST_END_S", "5"))  # seconds for a stopped process to end
# Helpers of the standard library live as long as the interpreter that started them.
MANY_DESCRIPTORS = 250  # file descriptors opened by tests since the last garbage collection
KERNEL_LISTS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()
OUTLIVES_A_TEST = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


class Collected:
    """State after the last garbage collection."""

    num_fds = 0


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until the tests are collected
    if config.option.markexpr != "gpu":
        os.environ.update(HIDDEN)  # tests compare results computed on the CPU, whatever the machine has
    settings.register_profile("no clock", deadline=None, max_examples=50)  # durations depend on the machine
    settings.load_profile("no clock")
    os.environ[SESSION_MARK] = uuid.uuid4().hex
    os.environ["HF_HUB_OFFLINE"] = "1"  # no test depends on a network
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; two threads are slower on small cores
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background: the started commands would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of whole runs first, so that the longest tests do not start last on one worker."""
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


def pytest_collection_finish() -> None:
    """Keep modules and collected tests, which live to the end, out of garbage collections: 0.3 s each."""
    gc.freeze()
    gc.enable()


def pytest_runtest_logfinish() -> None:
    """Free process groups of trainers in this process: their threads and sockets live until garbage collection."""
    if num_descriptors() > Collected.num_fds + MANY_DESCRIPTORS:
        gc.collect()
        Collected.num_fds = num_descriptors()


def num_descriptors() -> int:
    """Open file descriptors of this process. A psutil.Process of its own for each test costs 10 times as much."""
    return len(os.listdir("/dev/fd"))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True, scope="session")
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what runs note in the user's state directory out of that of the person who tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def leaves_no_child_process() -> Iterator[None]:
    """Fail a test that leaves a child process, direct or indirect, behind."""
    before = descendant_pids(os.getpid())
    yield
    if descendant_pids(os.getpid()) <= before:
        return
    left = [process for process in descendants() if process.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=END_S)
    lines = [describe(process) for process in alive]
    for process in alive:
        process.kill()
    assert not lines, f"processes left behind: {lines}"


@pytest.fixture(autouse=True, scope="session")
def session_leaves_no_process() -> Iterator[None]:
    """Fail the session if any of its processes is left, so that session fixtures clean up, too."""
    yield
    _, alive = psutil.wait_procs(descendants() + orphans(), timeout=END_S)
    lines = [describe(process) for process in alive]
    for process in alive:
        process.kill()
    assert not lines, f"processes left behind by this test session: {lines}"


def descendant_pids(pid: int) -> set[int]:
    """PIDs of all descendants, from the kernel's lists: reading each process's parent takes 40 times as long."""
    if not KERNEL_LISTS_CHILDREN:
        return {process.pid for process in psutil.Process(pid).children(recursive=True)}
    if pid == os.getpid() and not has_children():
        return set()
    found: set[int] = set()
    with contextlib.suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            found |= children_of(pid, thread)
    return found.union(*map(descendant_pids, found))


def has_children() -> bool:
    """Whether this process has a child, by one call: the tests of the trainer leave 60 threads, each with a list."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def children_of(pid: int, thread: str) -> set[int]:
    try:
        with open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as file:  # a tenth of the time of a Path's
            return set(map(int, file.read().split()))
    except OSError:  # the thread or the process has ended
        return set()


def descendants() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if not outlives_a_test(process)]


def orphans() -> list[psutil.Process]:
    """Processes of this session that are no descendants any more, found by the mark in their environment."""
    mark = os.environ[SESSION_MARK]
    return [process for process in psutil.process_iter() if process.pid != os.getpid() and mark_of(process) == mark]


def mark_of(process: psutil.Process) -> str | None:
    try:
        return None if outlives_a_test(process) else process.environ().get(SESSION_MARK)
    except (psutil.Error, OSError):  # it has ended, or belongs to another user
        return None


def outlives_a_test(process: psutil.Process) -> bool:
    try:
        return any(word in part for part in process.cmdline() for word in OUTLIVES_A_TEST)
    except psutil.Error:
        return False


def describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())}"
    except psutil.Error:
        return f"{process.pid} gone"
