"""Splits a byte stream into lines of bounded length."""

from collections.abc import Sequence
from typing import NamedTuple


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
