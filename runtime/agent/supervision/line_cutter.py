"""Lines out of a stream of bytes, none longer than a bound."""

from typing import NamedTuple


class CutLine(NamedTuple):
    """The beginning of a line, whole if nothing is left out."""

    content: bytes
    left_out_bytes: int


class LineCutter:
    """Takes bytes in pieces of any size, gives lines, and keeps no more of one than its bound."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._content = bytearray()
        self._left_out_bytes = 0

    def feed(self, data: bytes) -> list[CutLine]:
        """The lines that end in these bytes."""
        *ends, rest = data.split(b"\n")
        lines = [self._ended(end) for end in ends]
        self._add(rest)
        return lines

    def _ended(self, end: bytes) -> CutLine:
        self._add(end)
        line = CutLine(bytes(self._content), self._left_out_bytes)
        self._content.clear()
        self._left_out_bytes = 0
        return line

    def _add(self, part: bytes) -> None:
        room = self._max_bytes - len(self._content)
        self._content += part[:room]
        self._left_out_bytes += max(0, len(part) - room)
