"""Stacks of a process's threads as text, and what in them blocks an event loop. Pure, but for `stacks_now`.

The text is that of `faulthandler`, whose handler of a signal writes it while a call holds the interpreter's lock.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from runtime.util.import_path import OURS, ROOT

MAX_FRAMES: Final = 100  # of a thread: the newest, as faulthandler has them
MAX_THREADS: Final = 32
LOOP_ENTRY: Final = "asyncio/runners.py"  # what runs an event loop: frames below it run in any process
STANDARD: Final = f"{os.path.dirname(os.__file__)}{os.sep}"
OWN: Final = tuple(f"{ROOT / package}{os.sep}" for package in OURS)
INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

_OWN_STACK: Final = "Stack (most recent call first)"
_dump = re.compile(r"^Timeout \(", re.MULTILINE)
_thread = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*most recent call first")
_frame = re.compile(r'^\s*File "(.*)", line (\d+) in (.*)$')
_call = re.compile(r'^\s*File "(.*)", line (\d+), in (.*)$', re.MULTILINE)  # in a traceback of an exception
_escape = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")  # of characters that are not ASCII


class Frame(NamedTuple):
    """A call in a stack."""

    file: str
    line: int
    function: str

    @property
    def is_ours(self) -> bool:
        """Whether it is code of this project."""
        return self.file.startswith(OWN)

    @property
    def is_installed(self) -> bool:
        """Whether it is code of Python or of an installed package."""
        return self.file.startswith(("<", STANDARD)) or any(part in self.file for part in INSTALLED)


class Culprit(NamedTuple):
    """What blocks an event loop."""

    function: str = ""  # setting that names the user's function; empty: none does
    place: str = ""  # "file.py:12 in name", also with ", called at file.py:3 in name"; empty: unknown
    is_ours: bool = False  # it is code of this project


def stacks_now(first: int) -> str:
    """Return the stacks of this process's threads, that of the thread `first` before the others."""
    stacks = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented, "should be used for specialized purposes"
    lines = ["Timeout (of the event loop)!"]
    for ident in sorted(stacks, key=lambda ident: ident != first)[:MAX_THREADS]:
        lines.append(f"Thread 0x{ident:016x} (most recent call first):")
        frame, number = stacks[ident], 0
        while frame is not None and number < MAX_FRAMES:
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
            frame, number = frame.f_back, number + 1
    return "\n".join(lines) + "\n"


def of_thread(text: str, ident: int) -> str:
    """Return a text with each stack that faulthandler wrote for one thread, without its id, as a dump of that thread.

    Args:
        text: what a process has written.
        ident: id of the thread.
    """
    return text.replace(_OWN_STACK, f"Timeout (of the interpreter's lock)!\nThread 0x{ident:016x} {_OWN_STACK[6:]}")


def newest_dump(text: str) -> str:
    """Return the last dump in a text; empty without one."""
    starts = [found.start() for found in _dump.finditer(text)]
    return text[starts[-1] :] if starts else ""


def threads_in(dump: str) -> dict[int, list[Frame]]:
    """Return the stacks of a dump by the id of their thread, the newest call first."""
    threads: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in dump.splitlines():
        if (found := _thread.match(line)) is not None:
            frames = threads.setdefault(int(found[1], 16), [])
        elif (found := _frame.match(line)) is not None:
            frames.append(Frame(_plain(found[1]), int(found[2]), _plain(found[3])))
    return threads


def culprit(dump: str, loop_thread: int, functions: Mapping[str, str]) -> Culprit:
    """Name what blocks the event loop of a process, from the stacks of its threads.

    The innermost call of a user's code counts, and the outermost one is named too. If the event loop itself is idle,
    another thread holds the interpreter's lock.

    Args:
        dump: the stacks.
        loop_thread: id of the thread with the event loop.
        functions: users' functions that the process calls: "module:function" or "path/file.py:function", by setting.
    """
    threads = threads_in(dump)
    on_loop = _called_by_loop(threads.pop(loop_thread, []))
    stacks = [on_loop] if on_loop else list(threads.values())
    for stack in stacks:
        if users := [frame for frame in stack if _is_users(frame, functions)]:
            begun = f", called at {place_of(users[-1])}" if len(users) > 1 else ""
            return Culprit(_setting_of(stack, functions), f"{place_of(users[0])}{begun}")
    if not on_loop:
        return Culprit()
    own = next((frame for frame in on_loop if frame.is_ours), None)
    return Culprit("", place_of(own or on_loop[0]), is_ours=own is not None)


def place_of(frame: Frame) -> str:
    """Return a call for people, with a path relative to the current folder if it is below it."""
    near = os.path.relpath(frame.file) if os.path.isabs(frame.file) else frame.file
    return f"{frame.file if near.startswith(os.pardir) else near}:{frame.line} in {frame.function}"


def _plain(name: str) -> str:
    return _escape.sub(lambda found: chr(int(found[1] or found[2] or found[3], 16)), name)


def place_in(traceback: str) -> str:
    """Return the innermost call of a user's code in a traceback, for people; empty: there is none."""
    calls = [Frame(found[1], int(found[2]), found[3]) for found in _call.finditer(traceback)]
    return next((place_of(call) for call in reversed(calls) if not (call.is_ours or call.is_installed)), "")


def _called_by_loop(stack: Sequence[Frame]) -> list[Frame]:
    """Return the calls that an event loop made, without those that run it."""
    ends = [number for number, frame in enumerate(stack) if frame.file.endswith(LOOP_ENTRY)]
    return list(stack[: ends[0]] if ends else stack)


def _is_users(frame: Frame, functions: Mapping[str, str]) -> bool:
    if any(_is_in(frame, name) for name in functions.values()):
        return True
    return not (frame.is_ours or frame.is_installed)


def _is_in(frame: Frame, name: str) -> bool:
    """Whether a call is in the file or module of a user's function."""
    place = name.rpartition(":")[0]
    place = place.rpartition(":")[2]  # without the prefix of slime's functions
    if place.endswith(".py"):
        return frame.file == place
    path = f"{os.sep}{place.replace('.', os.sep)}"
    return bool(place) and frame.file.endswith((f"{path}.py", f"{path}{os.sep}__init__.py"))


def _setting_of(stack: Sequence[Frame], functions: Mapping[str, str]) -> str:
    """Return the settings whose function is in a stack: by its name, else by its file, else all of them."""
    found = [(key, name, [frame for frame in stack if _is_in(frame, name)]) for key, name in functions.items()]
    by_file = [key for key, _, frames in found if frames]
    by_name = [
        key
        for key, name, frames in found
        if name.rpartition(":")[2].rpartition(".")[2] in {frame.function for frame in frames}
    ]
    return " or ".join(by_name or by_file or functions)
