"""What a pool and a grader process send to each other, in msgpack. Grades of a batch may come in several parts."""

from array import array
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from actors.reward.causes import Cause
from actors.reward.samples import GradedSample
from runtime.functions.load import is_plugin

GATHER_S = 0.002  # grading time of a built-in grader after which the answers so far are written
MAX_FRAME_BYTES = 256 << 20
MARGIN_BYTES: Final = 64  # of a frame, around what it holds


class GraderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A grader and how it is called."""

    name: str  # an rm_type: a built-in grader or a plug-in
    group: bool = False  # one call for a list of samples: of a prompt group, or of a batch
    parses: bool = False  # it reads a score from a judge's answer


def gathers(grader: GraderSpec) -> bool:
    """Whether a process writes several answers of a grader at once: a function of a user may end it at any sample."""
    return not is_plugin(grader.name)


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What a process gets first: its graders and their limits."""

    graders: tuple[GraderSpec, ...] = ()  # resolved before the process is ready; others at their first use
    base_dirs: tuple[str, ...] = ()  # directories that relative plug-in paths are resolved against
    reward_key: str | None = None  # key of the reward in a dict answer
    cpu_s: float | None = None  # CPU seconds per call
    together: bool = False  # calls run together; its graders are async functions


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """Request to grade samples, one by one or as a group in one call."""

    grader: GraderSpec
    samples: tuple[GradedSample, ...]


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


GRADES: Final = msgspec.msgpack.Decoder(list[Graded])


def encoded_grades(grades: Sequence[Graded]) -> bytes:
    """Encode the grades of samples. If they are larger than an answer may be, each is an error."""
    content = msgspec.msgpack.encode(grades)
    if len(content) < MAX_FRAME_BYTES - MARGIN_BYTES:
        return content
    error = f"the answer is too large: a frame of {len(content)} bytes; at most {MAX_FRAME_BYTES} are allowed"
    return msgspec.msgpack.encode(
        [Graded(error=error, cause="bad_answer", took_s=graded.took_s, of_call=len(grades) > 1) for graded in grades]
    )
