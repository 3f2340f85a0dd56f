"""What a process prints: kept as one JSON object per line in its log, bounded, with its last lines at hand."""

import re
import time
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

MAX_LINE_BYTES = 1 << 16  # a longer line is cut
MAX_FILE_BYTES = 64 << 20  # then the file is kept as <name>.jsonl.1 and a new one begun
TAIL_LINES = 200
RECENT_LINES = 40  # an error before these was survived

_input_error = re.compile(r"^InputError\((['\"])(.*)\1\)$", re.DOTALL)  # its text was written for people
_terminal_codes = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")


class OutputLog:
    """Takes the bytes that a process prints and writes its log.

    A line that is a JSON object goes in as it is; any other is wrapped as the event "output".
    """

    def __init__(self, path: Path, actor: str, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._actor = actor
        self._max_bytes = max_bytes
        self._file = path.open("ab", buffering=0)
        self._size_bytes = self._file.tell()
        self._partial = b""
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)

    def feed(self, data: bytes) -> None:
        """Take what was read from the process."""
        lines = (self._partial + data).split(b"\n")
        self._partial = lines.pop()
        if len(self._partial) > MAX_LINE_BYTES:
            lines.append(self._partial)
            self._partial = b""
        self._write([self._wrapped(line[:MAX_LINE_BYTES]) for line in lines if line.strip()])

    def end(self) -> None:
        """The process has ended: its last line may lack its end."""
        self.feed(b"\n")

    def tail(self, count: int = 20) -> list[str]:
        """The last lines, for people."""
        lines = list(self._tail)[-count:]
        return [text for line in lines for text in readable(line).splitlines()][-count:]

    def why(self) -> str | None:
        """What the process said last about why it ends: its last error, or else its last words outside its log."""
        last_words = None
        for line in list(self._tail)[: -RECENT_LINES - 1 : -1]:
            entry = _entry_of(line)
            if entry.get("level") in ("error", "critical"):
                return _error_of(entry)
            if last_words is None and entry.get("event") == "output":
                last_words = str(entry.get("text"))
        return last_words

    def forget(self) -> None:
        """Begin a new process's tail."""
        self._tail.clear()

    def close(self) -> None:
        self._file.close()

    def _write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        self._tail.extend(lines)
        try:
            self._file.write(b"".join(line + b"\n" for line in lines))
        except OSError:  # a full disk costs log lines; those who store data fail by themselves and say so
            return
        self._size_bytes += sum(len(line) + 1 for line in lines)
        if self._size_bytes > self._max_bytes:
            self._rotate()

    def _rotate(self) -> None:
        self._file.close()
        self.path.replace(self.path.with_name(self.path.name + ".1"))
        self._file = self.path.open("ab", buffering=0)
        self._size_bytes = 0

    def _wrapped(self, line: bytes) -> bytes:
        line = line.rstrip(b"\r")
        if line.startswith(b"{") and _is_object(line):
            return line
        text = _terminal_codes.sub(b"", line).decode(errors="replace")
        moment = datetime.fromtimestamp(time.time(), UTC).isoformat().replace("+00:00", "Z")
        entry = {"time": moment, "level": "info", "event": "output", "actor": self._actor, "text": text}
        return msgspec.json.encode(entry)


def readable(line: bytes) -> str:
    """One log line as people read it: time, level, event, then its fields."""
    entry = _entry_of(line)
    if entry.get("event") == "output":
        return str(entry.get("text", ""))
    return " ".join(_words(entry)) or line.decode(errors="replace")


def _words(entry: dict[str, Any]) -> Iterator[str]:
    moment = str(entry.pop("time", ""))
    yield from (word for word in (moment[11:19], str(entry.pop("level", "")), str(entry.pop("event", ""))) if word)
    exception = entry.pop("exception", None)
    yield from (f"{key}={value}" for key, value in entry.items() if key not in ("run", "actor"))
    if exception:
        yield f"\n{exception}"


def _error_of(entry: dict[str, Any]) -> str:
    said = [] if entry.get("event") == "actor_failed" else [str(entry.get("event", ""))]
    if entry.get("error"):
        said.append(_input_error.sub(r"\2", str(entry["error"])))
    elif entry.get("exception"):
        said.append(str(entry["exception"]).strip().splitlines()[-1])
    return ": ".join(part for part in said if part)


def _entry_of(line: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}


def _is_object(line: bytes) -> bool:
    try:
        msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return False
    return True
