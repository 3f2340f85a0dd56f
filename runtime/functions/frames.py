"""Frames between a process of users' code and its parent: a length, then the content. Imports little."""

import os
import struct
from math import inf
from typing import Final

LENGTH_BYTES: Final = 4
ANSWERED: Final = b"\1"  # first byte of the content of an answer; what the function answered follows
RAISED: Final = b"\0"  # the same; the text of an error follows, then NUL and a traceback
LATE: Final = b"\2"  # the same, if calls run together: the call took too long, and was cancelled
STUCK: Final = b"\3"  # the same, and it cannot be cancelled: the process ends
CALL: Final = struct.Struct(">Id")  # before a call, if calls run together: its number and its seconds
NUMBER: Final = struct.Struct(">I")  # before its answer: its number


class FrameError(ValueError):
    """A frame is invalid or too large."""


def framed(content: bytes, max_bytes: float = inf) -> bytes:
    """Return a frame.

    Args:
        content: its content.
        max_bytes: maximum bytes of the frame.

    Raises:
        FrameError: the frame exceeds `max_bytes`.
    """
    size = LENGTH_BYTES + len(content)
    if size > max_bytes:
        raise FrameError(f"a frame of {size} bytes; at most {max_bytes} are allowed")
    return len(content).to_bytes(LENGTH_BYTES, "big") + content


class FrameBuffer:
    """Splits a byte stream into the contents of its frames."""

    def __init__(self, max_bytes: float = inf) -> None:
        """Start without bytes.

        Args:
            max_bytes: maximum bytes of a frame.
        """
        self._bytes, self._max_bytes = bytearray(), max_bytes

    def __len__(self) -> int:
        return len(self._bytes)

    def feed(self, data: bytes) -> None:
        """Append bytes read from the stream."""
        self._bytes += data

    def next_frame(self) -> bytes | None:
        """The content of the next complete frame, or None if more bytes are needed.

        Raises:
            FrameError: the length exceeds the maximum, so the stream is not a sequence of frames.
        """
        if len(self._bytes) < LENGTH_BYTES:
            return None
        end = LENGTH_BYTES + int.from_bytes(self._bytes[:LENGTH_BYTES], "big")
        if end > self._max_bytes:
            raise FrameError(f"a frame of {end} bytes; at most {self._max_bytes} are allowed")
        if len(self._bytes) < end:
            return None
        frame = bytes(self._bytes[LENGTH_BYTES:end])
        del self._bytes[:end]
        return frame


def take_pipes() -> tuple[int, int]:
    """Move stdin and stdout to other descriptors, and the output of the user's code to stderr."""
    fd_in, fd_out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return fd_in, fd_out


def read_frame(fd: int, buffer: FrameBuffer) -> bytes | None:
    """Block until a frame is complete; return None at the end of the stream."""
    while (frame := buffer.next_frame()) is None:
        data = os.read(fd, 1 << 16)
        if not data:
            return None
        buffer.feed(data)
    return frame


def write_all(fd: int, data: bytes) -> None:
    """Block until everything is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
