"""Parses server-sent events from a byte stream, as defined by the HTML standard."""

import re
from collections.abc import AsyncGenerator, Iterator
from typing import Final

import aiohttp

DONE = b"[DONE]"  # data of the last event
MAX_EVENT_BYTES: Final = 1 << 26  # about 40 bytes per token: one event with all tokens of a long answer fits
_LINE_END: Final = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a CR at the end of the buffer may be half of a CRLF
_BOM: Final = b"\xef\xbb\xbf"


class EventTooLarge(ValueError):
    """An event exceeds the limit."""


class EventReader:
    """Incremental parser for server-sent events. Ignores comments and fields other than data.

    Args:
        max_event_bytes: limit of an event.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = bytearray()  # incomplete line
        self._data: list[bytes] = []  # data lines of the current event
        self._size = 0  # bytes in those lines
        self._begun = False

    def feed(self, part: bytes) -> Iterator[bytes]:
        """Yield the data of the events that end in this chunk.

        Raises:
            EventTooLarge: the current event is too large.
        """
        searched = max(0, len(self._rest) - 1)
        self._rest += part
        begin = 0
        while (end := _LINE_END.search(self._rest, searched)) is not None:
            line = bytes(self._rest[begin : end.start()])
            begin = searched = end.end()
            yield from self._line(line)
        del self._rest[:begin]
        if len(self._rest) + self._size > self._max_event_bytes:
            raise EventTooLarge(f"an event is larger than {self._max_event_bytes} bytes")

    def _line(self, line: bytes) -> Iterator[bytes]:
        if not self._begun:
            line, self._begun = line.removeprefix(_BOM), True
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
            self._size += len(line)
        elif not line and self._data:
            event, self._data, self._size = b"\n".join(self._data), [], 0
            yield event


async def events_of(content: aiohttp.StreamReader, max_event_bytes: int = MAX_EVENT_BYTES) -> AsyncGenerator[bytes]:
    """Yield the data of server-sent events; an incomplete last event is dropped.

    Raises:
        EventTooLarge: an event is too large.
    """
    reader = EventReader(max_event_bytes)
    async for part in _parts_of(content):
        for event in reader.feed(part):
            yield event


async def _parts_of(content: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """Yield the received bytes, including those that aiohttp still buffers when the connection breaks."""
    try:
        async for part in content.iter_any():
            yield part
    except aiohttp.ClientError:
        yield content._read_nowait(-1)  # pyright: ignore[reportPrivateUsage]  # there is no public way to it
        raise
