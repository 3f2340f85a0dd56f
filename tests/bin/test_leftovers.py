"""Users' code that commands call outside of a node daemon leaves no process, also none that left its session."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from runtime.data.dump_files import write_pair
from tests.build.dumps import dumped_group

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "topologies" / "demo" / "models" / "reverse-digits"
LEAVES = """
import os, subprocess, sys, time
{how}
"""
DOUBLE_FORK = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(os.path.join({folder!r}, str(os.getpid())), "w").close()
        time.sleep(600)
    os._exit(0)
os.wait()
"""
NEW_SESSION = """
command = "import os, sys, time; open(os.path.join(sys.argv[1], str(os.getpid())), 'w').close(); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", command, {folder!r}], start_new_session=True, env={{}})
while len(os.listdir({folder!r})) < 2:
    time.sleep(0.01)
"""
FUNCTIONS = """
def judge(group):
    return True

def row(number):
    return {"input": str(number), "label": "x"}

async def generate(conversation):
    await conversation.generate()

class Drawn:
    def __init__(self, *args, **kwargs):
        pass
"""
TOPOLOGY = """
include = "recipes/demo.toml"
engines.policy.kind = "tiny"
trainer.device = "cpu"
run.name = "left"
"""


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """A file of users' functions that leaves two processes whenever it is imported."""
    (tmp_path / "left").mkdir()
    file = tmp_path / "own.py"
    file.write_text(LEAVES.format(how=(DOUBLE_FORK + NEW_SESSION).format(folder=str(tmp_path / "left"))) + FUNCTIONS)
    return file


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    directory = tmp_path / "dump"
    directory.mkdir()
    write_pair(directory, 0, [dumped_group(0), dumped_group(1)], (1, 0))
    (directory / "topology.json").write_text(
        json.dumps({"run": {"name": "t"}, "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2,
                    "max_response_len": 8}, "train": {"num_steps": 1}, "data": [], "model": {"hf_checkpoint": "m"}})
    )  # fmt: skip
    return directory


def started(folder: Path, *words: object, new_session: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, *(str(word) for word in words)]
    return subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=new_session,
    )


def left(folder: Path) -> list[int]:
    return [int(name) for name in os.listdir(folder / "left")]


def check_gone(folder: Path) -> None:
    pids = left(folder)
    assert len(pids) > 1, "the function was not called"
    until = time.monotonic() + 20
    while (alive := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < until:
        time.sleep(0.02)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    assert not alive


Words = Callable[[Path, Path], Iterator[object]]


def _check(users: Path, _dump: Path) -> Iterator[object]:
    yield from (
        ROOT / "bin/physarum.py",
        "start-topology",
        "laptop",
        "--check",
        "--set",
        f"rollout.dynamic_filter={users}:judge",
    )


def _check_custom(users: Path, _dump: Path) -> Iterator[object]:
    yield from (
        ROOT / "bin/physarum.py",
        "start-topology",
        "laptop",
        "--check",
        "--set",
        f"rollout.custom_generate={users}:generate",
    )


def _try_filter(users: Path, dump: Path) -> Iterator[object]:
    yield from (ROOT / "bin/physarum.py", "try", "filter", f"{users}:judge", "--on", dump)


def _try_source(users: Path, _dump: Path) -> Iterator[object]:
    yield from (ROOT / "bin/physarum.py", "try", "source", f"{users}:row")


def _replay(users: Path, dump: Path) -> Iterator[object]:
    yield from (
        ROOT / "bin/physarum.py",
        "replay",
        dump,
        "--to",
        "filter",
        "--set",
        f"rollout.dynamic_filter={users}:judge",
    )


@pytest.mark.parametrize("words", [_check, _check_custom, _try_filter, _try_source, _replay])
def test_a_command_leaves_no_daemonized_child(users: Path, dump: Path, words: Words) -> None:
    process = started(users.parent, *words(users, dump))
    said, _ = process.communicate(timeout=120)
    assert left(users.parent), said
    check_gone(users.parent)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_check_that_ends_early_leaves_no_daemonized_child(users: Path, dump: Path, number: int) -> None:
    users.write_text(users.read_text() + "\ntime.sleep(600)\n")
    process = started(users.parent, *_check(users, dump))
    until = time.monotonic() + 60
    while len(left(users.parent)) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate(timeout=60)
    check_gone(users.parent)


CALLS = "\ndef judge(group):\n    open(os.path.join({folder!r}, str(os.getpid())), 'w').close()\n    time.sleep(600)\n"


@pytest.mark.parametrize("words", [_try_filter, _replay])
@pytest.mark.parametrize("whole_group", [False, True])
def test_a_command_that_is_killed_in_a_call_leaves_no_process(
    users: Path, dump: Path, words: Words, whole_group: bool
) -> None:
    """Neither the call nor what it daemonized, nor the processes that keep both."""
    users.write_text(users.read_text() + CALLS.format(folder=str(users.parent / "left")))
    process = started(users.parent, *words(users, dump), new_session=True)
    until = time.monotonic() + 100
    while len(left(users.parent)) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    for child in psutil.Process(process.pid).children(recursive=True):
        (users.parent / "left" / str(child.pid)).touch()
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert len(left(users.parent)) > 3
    check_gone(users.parent)


def test_a_command_whose_keeper_is_killed_leaves_no_process(users: Path, dump: Path) -> None:
    users.write_text(users.read_text() + CALLS.format(folder=str(users.parent / "left")))
    process = started(users.parent, *_try_filter(users, dump))
    until = time.monotonic() + 100
    while len(left(users.parent)) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    (keeper,) = psutil.Process(process.pid).children()
    keeper.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    check_gone(users.parent)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -15), (signal.SIGINT, 130)])
def test_a_command_that_calls_users_code_ends_as_it_did_before(users: Path, dump: Path, number: int, code: int) -> None:
    users.write_text(users.read_text() + "\ntime.sleep(600)\n")
    process = started(users.parent, *_replay(users, dump))
    until = time.monotonic() + 60
    while len(left(users.parent)) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    check_gone(users.parent)
