"""Protocol between pool and grader process: length-prefixed msgpack frames over two pipes."""

import os
from array import array
from typing import Any

import msgspec

from actors.reward.causes import Cause
from actors.reward.samples import GradedSample
from runtime.functions.load import is_plugin

GATHER_S = 0.002  # grading time of a built-in grader after which the answers so far are written
LENGTH_BYTES = 4
MAX_FRAME_BYTES = 256 << 20


class GraderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A grader and how it is called."""

    name: str  # an rm_type: a built-in grader or a plug-in
    group: bool = False  # one call for a list of samples: of a prompt group, or of a batch
    parses: bool = False  # it reads a score from a judge's answer


def gathers(grader: GraderSpec) -> bool:
    """Whether a process writes several answers of a grader at once: a function of a user may end it at any sample."""
    return not is_plugin(grader.name)


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """First frame to a process: its graders and their limits."""

    graders: tuple[GraderSpec, ...] = ()  # resolved before WorkerReady; others at their first use
    base_dirs: tuple[str, ...] = ()  # directories that relative plug-in paths are resolved against
    reward_key: str | None = None  # key of the reward in a dict answer
    cpu_s: float | None = None  # CPU seconds per call
    at_once: int = 0  # calls of async functions that run together; 0: one call at a time


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True):
    """First frame from a process: ready, or the error that prevents it."""

    error: str | None = None
    asynchronous: tuple[GraderSpec, ...] = ()  # those of Hello's graders that are async functions


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """Request to grade samples, one by one or as a group in one call."""

    grader: GraderSpec
    samples: tuple[GradedSample, ...]
    call: int = 0  # number of the call, if calls run together
    timeout_s: float = 0.0  # of the call, if calls run together


class Graded(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The grade of the next sample in order: a reward or an error."""

    reward: float | None = None
    details: dict[str, Any] | None = None  # the whole answer if it was a dict
    error: str | None = None
    took_s: float = 0.0
    trace: str | None = None  # traceback of the error, if Hello requests them
    cause: Cause | None = None  # of the error
    of_machine: bool = False  # the error is the machine's or a server's: a file, a program, a module, a connection
    of_call: bool = False  # the whole call failed, so the error may be another sample's
    wait_s: float = 0.0  # after which the server that refused wants the next request; 0: it did not say
    final: bool = False  # the sample has been tried `max_tries` times: a further call would not help
    token_rewards: bytes | None = None  # [T] float32, of the response, if the grader gave a reward per token or turn


def unpacked(rewards: bytes) -> "array[float]":
    """Return the rewards per token of a grade."""
    return array("f", rewards)


class CallEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The grades of one of the calls that run together."""

    call: int
    grades: tuple[Graded, ...]
    last: bool = False  # the process ends, since this call keeps it from answering others


class FrameError(ValueError):
    """A frame is invalid or too large."""


def encode_frame(struct: msgspec.Struct, *, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Encode a struct as a length-prefixed frame.

    Args:
        struct: its content.
        max_bytes: maximum bytes of the frame.

    Raises:
        FrameError: the frame exceeds `max_bytes`.
    """
    payload = msgspec.msgpack.encode(struct)
    if LENGTH_BYTES + len(payload) > max_bytes:
        raise FrameError(f"a frame of {LENGTH_BYTES + len(payload)} bytes; at most {max_bytes} are allowed")
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


class FrameBuffer:
    """Splits a byte stream into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        """Append bytes read from the stream."""
        self._bytes += data

    def next_frame(self) -> bytes | None:
        """The next complete frame, or None if more bytes are needed.

        Raises:
            FrameError: the length exceeds MAX_FRAME_BYTES, so the stream is not a sequence of frames.
        """
        if len(self._bytes) < LENGTH_BYTES:
            return None
        end = LENGTH_BYTES + int.from_bytes(self._bytes[:LENGTH_BYTES], "big")
        if end > MAX_FRAME_BYTES:
            raise FrameError(f"a frame of {end} bytes; at most {MAX_FRAME_BYTES} are allowed")
        if len(self._bytes) < end:
            return None
        frame = bytes(self._bytes[LENGTH_BYTES:end])
        del self._bytes[:end]
        return frame


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
