"""What the pool and a grader process say to each other: length-prefixed msgpack frames over two pipes."""

import os
from typing import Any

import msgspec

from actors.reward.samples import GradedSample

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 256 << 20


class GraderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One way of grading."""

    name: str  # an rm_type: a built-in grader or a plug-in
    group: bool = False  # one call for all samples of a prompt group


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """First frame to a process: what it grades with."""

    graders: tuple[GraderSpec, ...] = ()  # resolved before it says that it is ready; others when first asked for
    base_dirs: tuple[str, ...] = ()  # where relative plug-in files are looked for
    reward_key: str | None = None  # which value of a dict is the reward
    cpu_s: float | None = None  # processor time of one call


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True):
    """First frame from a process: it can grade, or why not."""

    error: str | None = None


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """Grade these samples, one after the other or in one call, as the grader says."""

    grader: GraderSpec
    samples: tuple[GradedSample, ...]


class Graded(msgspec.Struct, frozen=True, kw_only=True):
    """The grade of the next sample in order: a reward, or why there is none."""

    reward: float | None = None
    details: dict[str, Any] | None = None  # the whole answer when it was a dict
    error: str | None = None
    took_s: float = 0.0


class FrameError(ValueError):
    """Bytes that are no frame, or too many for one."""


def encode_frame(struct: msgspec.Struct) -> bytes:
    """A struct with its length before it.

    Raises:
        FrameError: it is more than the other side takes.
    """
    payload = msgspec.msgpack.encode(struct)
    if LENGTH_BYTES + len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"{len(payload)} bytes, {MAX_FRAME_BYTES} are taken")
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


class FrameBuffer:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        """Append what was read."""
        self._bytes += data

    def next_frame(self) -> bytes | None:
        """The next whole frame, or None until more was fed.

        Raises:
            FrameError: the length is absurd, so this is not our stream.
        """
        if len(self._bytes) < LENGTH_BYTES:
            return None
        end = LENGTH_BYTES + int.from_bytes(self._bytes[:LENGTH_BYTES], "big")
        if end > MAX_FRAME_BYTES:
            raise FrameError(f"a frame of {end} bytes")
        if len(self._bytes) < end:
            return None
        frame = bytes(self._bytes[LENGTH_BYTES:end])
        del self._bytes[:end]
        return frame


def read_frame(fd: int, buffer: FrameBuffer) -> bytes | None:
    """Block until a frame is there; None at the end of the stream."""
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
