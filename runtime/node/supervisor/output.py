"""The log of a process's output: one JSON object per line, bounded, with the last lines in memory."""

import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from runtime.util.formatting import printable, printable_json, shortened
from runtime.util.secrets import Secret, without

MAX_LINE_BYTES = 1 << 16  # the rest of a longer line is only counted
MAX_FILE_BYTES = 64 << 20  # a larger file is renamed to <name>.jsonl.1
TAIL_LINES = 50
MAX_SHOWN = 2000  # characters of a shown line, or of an exit reason
RECENT_LINES = 40  # the process survived errors before these lines
TRACEBACK = "Traceback (most recent call last)"
FATAL = "Fatal Python error"

_terminal_codes = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")


class CutLine(NamedTuple):
    """A line, cut to the bound if it was longer."""

    content: bytes
    left_out_bytes: int


class LineCutter:
    """Splits chunks of any size into lines, and keeps at most `max_bytes` of each.

    It never cuts a line inside one of `words`, but before it, so that the word can be found.
    """

    def __init__(self, max_bytes: int, *, words: Sequence[bytes] = ()) -> None:
        self._max_bytes = max_bytes
        self._words = words
        self._kept_bytes = max_bytes + max(map(len, words), default=1) - 1  # to see a word that begins before the bound
        self._content = bytearray()
        self._left_out_bytes = 0

    def feed(self, data: bytes) -> list[CutLine]:
        """Return the lines that end in these bytes."""
        *ends, rest = data.split(b"\n")
        lines = [self._ended(end) for end in ends]
        self._add(rest)
        return lines

    def _ended(self, end: bytes) -> CutLine:
        self._add(end)
        content = bytes(self._content[: self._end()])
        line = CutLine(content, self._left_out_bytes + len(self._content) - len(content))
        self._content.clear()
        self._left_out_bytes = 0
        return line

    def _end(self) -> int:
        """Return the length at which to cut the current line."""
        end = self._max_bytes
        while len(self._content) > end:
            places = [
                self._content.find(word, max(0, end - len(word) + 1), end + len(word) - 1) for word in self._words
            ]
            within = [place for place in places if place >= 0]
            if not within:
                break
            end = min(within)
        return end

    def _add(self, part: bytes) -> None:
        room = self._kept_bytes - len(self._content)
        self._content += part[:room]
        self._left_out_bytes += max(0, len(part) - room)


class OutputLog:
    """Writes the output of a process to its log.

    A line that is a JSON object is written as it is. Any other line, cut or not, is wrapped in the event "output".
    """

    def __init__(
        self,
        path: Path,
        actor: str,
        *,
        max_bytes: int = MAX_FILE_BYTES,
        hidden: Sequence[Secret] = (),
        crash_words: Sequence[str] = (),
    ) -> None:
        """Open the log.

        Args:
            path: path of the log file.
            actor: name of the process.
            max_bytes: size of the file at which it is rotated.
            hidden: secrets of the process, removed from its output.
            crash_words: a line with one of these reports a crash, however many lines follow.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._actor = actor
        self._hidden = hidden
        self._max_bytes = max_bytes
        self._file = path.open("ab", buffering=0)
        self._size_bytes = self._file.tell()
        self._lines = LineCutter(MAX_LINE_BYTES, words=[secret.reveal().encode() for secret in hidden])
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._crash_words = [word.encode() for word in crash_words]
        self._crash: bytes | None = None  # newest line that reports a crash

    def feed(self, data: bytes) -> None:
        """Log bytes that were read from the process."""
        self._write([self._logged(line) for line in self._lines.feed(data) if line.content.strip()])

    def add(self, event: str, **fields: Any) -> None:
        """Log an event about the process, which it did not write itself."""
        entry = {"time": _now(), "level": "warning", "event": event, "actor": self._actor, **fields}
        self._write([without(printable_json(msgspec.json.encode(entry).decode()).encode(), self._hidden)])

    def end(self) -> None:
        """Log the last line of a process that ended, which may lack its newline."""
        self.feed(b"\n")

    def tail(self, count: int = 20) -> list[str]:
        """Return the last lines in readable form."""
        lines = list(self._tail)[-count:]
        return [text for line in lines for text in _shown(line)][-count:]

    def why(self) -> str | None:
        """Return the likely cause of the end: the last error, else the last plain output, else None."""
        return self.error() or self.last_words()

    def error(self) -> str | None:
        """Return the last logged error, else the exception of the last traceback, else None."""
        for entry in self._recent():
            if entry.get("level") in ("error", "critical"):
                return shortened(printable(_error_of(entry)), MAX_SHOWN)
        exception = self._exception()
        return None if exception is None or is_interrupt(exception) else exception

    def last_words(self) -> str | None:
        """Return the last plain output, None if there is none: what a process printed last need not explain its end."""
        text = next((entry.get("text") for entry in self._recent() if entry.get("event") == "output"), None)
        return None if text is None else shortened(printable(_word(text)), MAX_SHOWN)

    def _recent(self) -> Iterator[dict[str, Any]]:
        """The last lines, the newest first."""
        return (_entry_of(line) or {} for line in list(self._tail)[: -RECENT_LINES - 1 : -1])

    def _exception(self) -> str | None:
        """The line of the last traceback that names its exception, or the last fatal error of an interpreter."""
        after: str | None = None  # the oldest line after a traceback's frames, as they are read backwards
        for entry in self._recent():
            text = _word(entry.get("text")) if entry.get("event") == "output" else ""
            if text.startswith(FATAL):
                return shortened(printable(text), MAX_SHOWN)
            if text.startswith(TRACEBACK):
                return None if after is None else shortened(printable(after), MAX_SHOWN)
            if text and not text.startswith(" "):
                after = text
        return None

    def crash(self) -> str | None:
        """Return the newest line that reports a crash, or None."""
        return None if self._crash is None else shortened(printable(readable(self._crash)), MAX_SHOWN)

    def forget(self) -> None:
        """Clear the last lines, for a new process."""
        self._tail.clear()
        self._crash = None

    def close(self) -> None:
        self._file.close()

    def _write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        self._tail.extend(lines)
        for line in lines:
            if any(word in line for word in self._crash_words):
                self._crash = line
        try:
            self._file.write(b"".join(line + b"\n" for line in lines))
            self._size_bytes += sum(len(line) + 1 for line in lines)
            if self._size_bytes > self._max_bytes:
                self._rotate()
        except OSError:  # a full disk costs log lines; processes that store data fail by themselves
            return

    def _rotate(self) -> None:
        self._size_bytes = 0
        self.path.replace(self.path.with_name(self.path.name + ".1"))
        file = self.path.open("ab", buffering=0)
        self._file.close()
        self._file = file

    def _logged(self, line: CutLine) -> bytes:
        content = without(line.content.rstrip(b"\r"), self._hidden)
        entry = _entry_of(content) if content.startswith(b"{") and not line.left_out_bytes else None
        if entry is not None:
            return _one_line(content, entry)
        text = _terminal_codes.sub(b"", content).decode(errors="replace")
        entry = dict[str, Any]({"time": _now(), "level": "info", "event": "output", "actor": self._actor, "text": text})
        if line.left_out_bytes:
            entry["left_out_bytes"] = line.left_out_bytes
        return printable_json(msgspec.json.encode(entry).decode()).encode()


def is_interrupt(text: str) -> bool:
    """Whether an exception says only that the process was to end."""
    return text.partition(":")[0] in ("KeyboardInterrupt", "SystemExit", "asyncio.exceptions.CancelledError")


def _now() -> str:
    return datetime.fromtimestamp(time.time(), UTC).isoformat().replace("+00:00", "Z")


def readable(line: bytes) -> str:
    """Format one log line for users: time, level, event, then its fields."""
    entry = _entry_of(line)
    if not entry:
        return line.decode(errors="replace")
    if entry.get("event") == "output":
        left_out = entry.get("left_out_bytes")
        cut = f"(the first {MAX_LINE_BYTES} bytes of a line, {left_out} more are left out) " if left_out else ""
        return cut + _word(entry.get("text", ""))
    return " ".join(_words(entry))


def _shown(line: bytes) -> list[str]:
    return [shortened(printable(text), MAX_SHOWN) for text in readable(line).split("\n")]


def _words(entry: dict[str, Any]) -> Iterator[str]:
    moment = _word(entry.pop("time", ""))
    yield from (word for word in (moment[11:19], _word(entry.pop("level", "")), _word(entry.pop("event", ""))) if word)
    exception = entry.pop("exception", None)
    yield from (f"{key}={_word(value)}" for key, value in entry.items() if key not in ("run", "actor"))
    if exception:
        yield f"\n{_word(exception)}"


def _word(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        return "(nested too deep)"


def _error_of(entry: dict[str, Any]) -> str:
    parts = [] if entry.get("event") == "actor_failed" else [_word(entry.get("event", ""))]
    lines = _word(entry.get("exception") or "").strip().splitlines()
    if entry.get("error"):
        parts.append(_word(entry["error"]))
    elif lines:
        parts.append(lines[-1])
    return ": ".join(part for part in parts if part)


def _entry_of(line: bytes) -> dict[str, Any] | None:
    """Parse the JSON object of a line; None for other lines, too deep nesting, or too large numbers."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (ValueError, RecursionError, OverflowError):  # a DecodeError and a UnicodeDecodeError are ValueErrors
        return None


def _one_line(content: bytes, entry: dict[str, Any]) -> bytes:
    text = content.decode()
    if "\r" in text or "\t" in text:  # JSON whitespace that some readers take for the end of a line
        text = msgspec.json.encode(entry).decode()
    return printable_json(text).encode()
