"""Runs pre-start checks in their own process with a time limit, since they read user files and run user code."""

import gc
import os
import select
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NoReturn, Protocol, TypeVar

import msgspec

from runtime.data.data_files import DataError
from runtime.settings.load import LoadedTopology
from runtime.settings.reading.config import Problem, TopologyError
from runtime.util.descendants import continue_in_kept_child, set_parent_death_signal
from runtime.util.formatting import show, signal_name

T = TypeVar("T")
NOTE_AFTER_S: Final = 10.0  # of one activity, before a note reports the wait
MAX_PRINTED_BYTES: Final = 4 << 20  # of what the checks print, in a file
END_S: Final = 5.0  # until a keeper has killed the processes of the checks
LIMIT: Final = "run.check_timeout_s"


class Doing(Protocol):
    """Announces the next activity, so that a timeout can name it."""

    def __call__(self, key: str, value: object, what: str, *, limit_s: float | None = None) -> None:
        """Begin an activity.

        Args:
            key: setting that it checks.
            value: its value.
            what: the activity, as the subject of a sentence: "importing it".
            limit_s: its time limit in seconds; none: run.check_timeout_s.
        """
        ...


def unlimited(key: str, value: object, what: str, *, limit_s: float | None = None) -> None:
    """A `Doing` for checks that run in this process."""


class Activity(msgspec.Struct, frozen=True, tag=True):
    """Message of the checking process: its current activity."""

    key: str
    value: str
    what: str
    limit_s: float


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Message of the checking process: the checks ended with this result."""

    result: msgspec.Raw


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Message of the checking process: input cannot be used."""

    problems: tuple[Problem, ...] = ()
    data_error: str = ""


class Broken(msgspec.Struct, frozen=True, tag=True):
    """Message of the checking process: the checks raised another exception, which is a bug."""

    text: str


Report = Activity | Ended | Refused | Broken


def apart(loaded: LoadedTopology, work: Callable[[Doing], T], result: type[T], note: Callable[[str], None]) -> T:
    """Run `work` in a forked process and return its result. The process is killed if an activity takes too long.

    Args:
        loaded: the topology to check.
        work: the checks; they announce each activity.
        result: type of their result, which must be plain data.
        note: called with a line about a long wait, and with one about what user code printed.

    Raises:
        TopologyError: the checks raised it, hung, or ended their process; names the key and the activity.
        DataError: the checks raised it.
    """
    (reading, writing), (printed, printing) = os.pipe(), os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        for descriptor in (reading, printed):
            os.close(descriptor)
        _be_child(work, writing, printing, loaded.topology.run.check_timeout_s, parent)
    for descriptor in (writing, printing):
        os.close(descriptor)
    output = _Printed(printed)
    watched = _Watched(child, reading, output, loaded.topology.run.check_timeout_s, note)
    try:
        last = watched.last_report()
    finally:
        watched.end()
        output.end(note)
    match last:
        case Ended():
            return msgspec.json.decode(last.result, type=result)
        case Refused(data_error=str(text)) if text:
            raise DataError(text)
        case Refused(problems=problems):
            raise TopologyError(problems)
        case Broken(text=text):
            raise RuntimeError(f"the checks before the start failed:\n{text}")
        case Activity():
            problem = Problem(key=last.key, value=last.value, message=watched.ending(last))
            raise TopologyError([msgspec.structs.replace(problem, file=loaded.loaded.origin(last.key))])


class _Printed:
    """What the checks and user code print: a file has its beginning."""

    def __init__(self, reading: int) -> None:
        self.reading = reading
        self._num_bytes = 0
        self._file: int | None = None
        self._path = ""
        os.set_blocking(reading, False)

    def take(self) -> bool:
        """Take what was printed since the last call. Returns False at the end of the output."""
        try:
            data = os.read(self.reading, 1 << 16)
        except BlockingIOError:
            return True
        with suppress(OSError):  # a full disk ends no check
            self._keep(data[: max(0, MAX_PRINTED_BYTES - self._num_bytes)])
        self._num_bytes += len(data)
        return bool(data)

    def _keep(self, data: bytes) -> None:
        if data and self._file is None:
            self._file, self._path = tempfile.mkstemp(prefix="physarum-check-", suffix=".log")
        while data and self._file is not None:
            data = data[os.write(self._file, data) :]

    def end(self, note: Callable[[str], None]) -> None:
        """Take the rest, and name the file if something was printed."""
        until = time.monotonic() + END_S  # a process that outlived the checks may print on
        while self._num_bytes < MAX_PRINTED_BYTES and time.monotonic() < until:
            before = self._num_bytes
            if not self.take() or self._num_bytes == before:
                break
        os.close(self.reading)
        if self._file is not None:
            os.close(self._file)
            part = f", the first {MAX_PRINTED_BYTES:,} of them" if self._num_bytes > MAX_PRINTED_BYTES else ""
            note(f"note: the checks and your functions printed {self._num_bytes:,} bytes{part}: {self._path}")


class _Watched:
    """The process of the checks, seen by its parent."""

    def __init__(self, pid: int, reading: int, printed: _Printed, limit_s: float, note: Callable[[str], None]) -> None:
        self._pid = pid
        self._reading = reading
        self._printed = printed
        self._limit_s = limit_s
        self._note = note
        self._status: int | None = None
        self._activity = Activity(LIMIT, show(limit_s), "the start of the checking process", limit_s)

    def last_report(self) -> Report:
        """Return the last message of the process: its result, or the activity in which it ended or timed out."""
        ended, rest = os.pidfd_open(self._pid), b""
        readable = selectors.DefaultSelector()  # select() does not accept descriptors above 1,023
        for descriptor in (self._reading, self._printed.reading, ended):
            readable.register(descriptor, selectors.EVENT_READ)
        try:
            began, noted = time.monotonic(), False
            while True:
                spent_s = time.monotonic() - began
                if spent_s > self._activity.limit_s:
                    return self._activity
                if spent_s > NOTE_AFTER_S and not noted:
                    noted = True
                    self._note(f"note: waiting for {_subject(self._activity)}")
                wait_s = min(self._activity.limit_s, self._activity.limit_s if noted else NOTE_AFTER_S) - spent_s
                ready = {key.fd for key, _ in readable.select(max(0.01, wait_s))}
                if self._printed.reading in ready and not self._printed.take():
                    readable.unregister(self._printed.reading)
                if self._reading in ready:
                    *lines, rest = (rest + os.read(self._reading, 1 << 16)).split(b"\n")
                    for line in lines:
                        last = msgspec.json.decode(line, type=Report)
                        if not isinstance(last, Activity):
                            return last
                        self._activity, began, noted = last, time.monotonic(), False
                    if lines:
                        continue
                if ended in ready:
                    _, self._status = os.waitpid(self._pid, 0)
                    return self._activity
        finally:
            readable.close()
            os.close(ended)

    def ending(self, activity: Activity) -> str:
        """Describe why there is no result."""
        if self._status is None:
            setting = f" ({LIMIT})" if activity.limit_s == self._limit_s else ""
            return f"{activity.what} did not end within {activity.limit_s:g} s{setting}"
        code = os.waitstatus_to_exitcode(self._status)
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        return f"{activity.what} ended the process: it {how}"

    def end(self) -> None:
        """Kill the process and its descendants, also those that left its session."""
        if self._status is None:
            ended = os.pidfd_open(self._pid)
            waiting = select.poll()  # select() does not accept descriptors above 1,023
            waiting.register(ended, select.POLLIN)
            try:
                for number in (signal.SIGTERM, signal.SIGKILL):  # its keeper kills the others first
                    signal.pidfd_send_signal(ended, number)
                    if waiting.poll(END_S * 1000):
                        break
            finally:
                os.close(ended)
            os.waitpid(self._pid, 0)
        os.close(self._reading)


def _subject(activity: Activity) -> str:
    return f"{activity.key} = {activity.value}: {activity.what} may take {activity.limit_s:g} s"


def _be_child(work: Callable[[Doing], T], writing: int, printing: int, limit_s: float, parent: int) -> NoReturn:
    def report(news: Report) -> None:
        data = msgspec.json.encode(news) + b"\n"
        while data:
            data = data[os.write(writing, data) :]

    def doing(key: str, value: object, what: str, *, limit_s: float | None = None) -> None:
        report(Activity(key, show(value), what, limit_s or default_s))

    default_s = limit_s
    gc.freeze()  # do not collect the parent's objects: some destructors wait for threads that do not exist here
    try:
        os.setpgid(0, 0)
        set_parent_death_signal(signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(0)
        continue_in_kept_child(forwards=False)
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and then ends this process
        _take_streams(printing)
        try:
            report(Ended(msgspec.Raw(msgspec.json.encode(work(doing)))))
        except TopologyError as error:
            report(Refused(problems=error.problems))
        except DataError as error:
            report(Refused(data_error=str(error)))
        except Exception:  # noqa: BLE001 - the parent raises it
            report(Broken(traceback.format_exc()))
    finally:
        os._exit(0)


def _take_streams(printing: int) -> None:
    """Redirect the standard streams: user code must not read the terminal, or fill it."""
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, stream in ((null, 0), (printing, 1), (printing, 2)):
        os.dup2(descriptor, stream)
    for descriptor in (null, printing):
        if descriptor > 2:
            os.close(descriptor)
    sys.stdin, sys.stderr = (
        os.fdopen(0, closefd=False),
        os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False),
    )
    sys.stdout = sys.stderr
