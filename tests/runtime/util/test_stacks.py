"""What blocks an event loop, read from stacks that Python's own faulthandler wrote."""

import faulthandler
import os
import re
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from runtime.util.import_path import ROOT
from runtime.util.stacks import Culprit, culprit, newest_dump, stacks_now, threads_in

STANDARD = os.path.dirname(os.__file__)
INSTALLED = f"{sys.prefix}/lib/python3/site-packages"
LOOP = [  # what runs an event loop, the newest call first
    (f"{STANDARD}/asyncio/runners.py", 118, "run"),
    (f"{INSTALLED}/anyio/_core/_eventloop.py", 74, "run"),
    (f"{ROOT}/runtime/process/main.py", 83, "run_process"),
    (f"{ROOT}/actors/host.py", 53, "main"),
]
OURS = [  # what calls a generate function
    (f"{ROOT}/actors/rollout/samples/generate_function.py", 72, "call_async"),
    (f"{ROOT}/actors/rollout/samples/conversation.py", 210, "run"),
]
REQUESTS = [(f"{STANDARD}/socket.py", 704, "readinto"), (f"{INSTALLED}/requests/api.py", 59, "request")]
WATCHDOG = [(f"{STANDARD}/threading.py", 331, "wait"), (f"{ROOT}/runtime/process/heartbeat.py", 93, "_run")]
OTHER = 7
FUNCTIONS = {"rollout.custom_generate": "/u/mylib.py:with_tool"}


def dump(*stacks: list[tuple[str, int, str]]) -> str:
    """The stacks of threads; the last one has the event loop."""
    lines = ["Timeout (0:00:05)!"]
    for number, stack in enumerate(stacks, OTHER):
        lines.append(f"Thread 0x{number:016x} (most recent call first):")
        lines += [f'  File "{file}", line {line} in {name}' for file, line, name in stack]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("stack", "functions", "found"),
    [
        (
            [*REQUESTS, ("/u/mylib.py", 12, "with_tool"), *OURS, *LOOP],
            FUNCTIONS,
            Culprit("rollout.custom_generate", "/u/mylib.py:12 in with_tool"),
        ),
        (  # a helper in another file of the user's
            [("/u/tools.py", 3, "search"), ("/u/mylib.py", 12, "with_tool"), *OURS, *LOOP],
            FUNCTIONS,
            Culprit("rollout.custom_generate", "/u/tools.py:3 in search, called at /u/mylib.py:12 in with_tool"),
        ),
        (  # a task that the function started: none of our calls is in its stack
            [*REQUESTS, ("/u/tools.py", 3, "search"), *LOOP],
            FUNCTIONS,
            Culprit("rollout.custom_generate", "/u/tools.py:3 in search"),
        ),
        (  # a module instead of a file, also one of an installed package
            [(f"{INSTALLED}/my_tools/agent.py", 5, "run"), *OURS, *LOOP],
            {"rollout.custom_generate": "my_tools.agent:run", "rollout.custom_rollout": "/u/order.py:first"},
            Culprit("rollout.custom_generate", f"{INSTALLED}/my_tools/agent.py:5 in run"),
        ),
        (  # two functions in one file: the one that runs
            [("/u/mylib.py", 40, "evaluate"), *OURS, *LOOP],
            FUNCTIONS | {"eval.0.custom_evaluation": "/u/mylib.py:evaluate"},
            Culprit("eval.0.custom_evaluation", "/u/mylib.py:40 in evaluate"),
        ),
        (  # a function of slime
            [("/u/slime_like.py", 8, "generate"), *OURS, *LOOP],
            {"rollout.custom_generate": "slime:/u/slime_like.py:generate"},
            Culprit("rollout.custom_generate", "/u/slime_like.py:8 in generate"),
        ),
        (  # our own code, with a library below it
            [(f"{STANDARD}/subprocess.py", 1, "run"), (f"{ROOT}/actors/buffer/actor.py", 9, "_look"), *LOOP],
            FUNCTIONS,
            Culprit("", f"{ROOT}/actors/buffer/actor.py:9 in _look", is_ours=True),
        ),
        (
            [(f"{INSTALLED}/aiohttp/client.py", 9, "get"), *LOOP],
            {},
            Culprit("", f"{INSTALLED}/aiohttp/client.py:9 in get"),
        ),
        (LOOP, FUNCTIONS, Culprit()),  # idle
        ([], FUNCTIONS, Culprit()),
    ],
)
def test_what_blocks_is_named_with_its_setting_file_line_and_function(
    stack: list[tuple[str, int, str]], functions: dict[str, str], found: Culprit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/usr")
    assert culprit(dump(WATCHDOG, stack), OTHER + 1, functions) == found


def test_a_thread_that_keeps_the_interpreters_lock_from_an_idle_loop_is_named() -> None:
    losses = {"algorithm.loss.function": "/u/losses.py:mine"}
    text = dump(WATCHDOG, [("/u/losses.py", 4, "mine"), *OURS], LOOP)
    assert culprit(text, OTHER + 2, losses).function == "algorithm.loss.function"


def test_a_stack_that_faulthandler_cut_off_is_read_from_its_newest_calls() -> None:
    text = dump([("/u/mylib.py", 2, "deep")] * 100)
    assert culprit(f"{text}  ...\n", OTHER, FUNCTIONS).place.startswith("/u/mylib.py:2 in deep")


def test_paths_are_relative_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = dump([(str(tmp_path / "mylib.py"), 12, "with_tool"), *LOOP])
    assert culprit(text, OTHER, {"rollout.custom_generate": str(tmp_path / "mylib.py:with_tool")}) == Culprit(
        "rollout.custom_generate", "mylib.py:12 in with_tool"
    )


def test_both_writers_of_stacks_are_read_alike(tmp_path: Path) -> None:
    """Python's faulthandler writes other letters than ASCII as escapes."""
    source = "def wärme(write):\n    return write()\n"
    place = tmp_path / "größe.py"
    names: dict[str, object] = {}
    exec(compile(source, str(place), "exec"), names)
    called = names["wärme"]
    assert callable(called)
    with tempfile.TemporaryFile() as file:
        called(lambda: faulthandler.dump_traceback(file, all_threads=True))
        file.seek(0)
        theirs = file.read().decode()
    own = called(lambda: stacks_now(threading.get_ident()))
    for text in (theirs, own):
        frames = threads_in(str(text))[threading.get_ident()]
        assert any((frame.file, frame.line, frame.function) == (str(place), 2, "wärme") for frame in frames), text


def test_the_newest_of_several_dumps_counts() -> None:
    first, second = dump([("/u/a.py", 1, "a")]), dump([("/u/b.py", 2, "b")])
    assert newest_dump(f"noise\n{first}{second}") == second
    assert newest_dump("noise\n") == ""
    assert re.match("Timeout", stacks_now(threading.get_ident()))
