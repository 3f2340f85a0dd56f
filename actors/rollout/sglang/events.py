"""Server-sent events, cut out of a stream of bytes as the HTML standard says."""

import re
from collections.abc import AsyncGenerator, Iterator
from typing import Final

import aiohttp

DONE = b"[DONE]"  # data of the last one
MAX_EVENT_BYTES: Final = 1 << 26  # SGLang writes about 40 bytes for a token: one of all tokens of a long answer fits
_LINE_END: Final = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a CR at the end may be half of a CRLF
_BOM: Final = b"\xef\xbb\xbf"


class EventTooLarge(ValueError):
    """An event has no end within MAX_EVENT_BYTES."""


class EventReader:
    """Cuts bytes into events as they come. Comments and other fields than data are passed over."""

    def __init__(self) -> None:
        self._rest = bytearray()  # of a line
        self._data: list[bytes] = []  # lines of the event so far
        self._size = 0  # of those
        self._begun = False

    def feed(self, part: bytes) -> Iterator[bytes]:
        """Data of the events that end in here.

        Raises:
            EventTooLarge: an event has no end.
        """
        searched = max(0, len(self._rest) - 1)
        self._rest += part
        begin = 0
        while (end := _LINE_END.search(self._rest, searched)) is not None:
            line = bytes(self._rest[begin : end.start()])
            begin = searched = end.end()
            yield from self._line(line)
        del self._rest[:begin]
        if len(self._rest) + self._size > MAX_EVENT_BYTES:
            raise EventTooLarge(f"an event has no end within {MAX_EVENT_BYTES} bytes")

    def _line(self, line: bytes) -> Iterator[bytes]:
        if not self._begun:
            line, self._begun = line.removeprefix(_BOM), True
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
            self._size += len(line)
        elif not line and self._data:
            event, self._data, self._size = b"\n".join(self._data), [], 0
            yield event


async def events_of(content: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """Data of server-sent events; one that has no end is not given.

    Raises:
        EventTooLarge: an event has no end.
    """
    reader = EventReader()
    async for part in _parts_of(content):
        for event in reader.feed(part):
            yield event


async def _parts_of(content: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """What comes. What had come when the connection broke is given too: aiohttp keeps it and raises before that."""
    try:
        async for part in content.iter_any():
            yield part
    except aiohttp.ClientError:
        yield content._read_nowait(-1)  # pyright: ignore[reportPrivateUsage]  # there is no public way to it
        raise
