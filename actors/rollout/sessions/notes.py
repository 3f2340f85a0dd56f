"""Notes of a session: what the successor of its rollout actor needs to go on with it. Pure.

Tokens are not among them: the segments of the sample have them. A note is written once its turn is stored, and before
the client gets the answer.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from actors.rollout.sessions.tree import Cause
from messages import SampleSummary
from runtime.sessions.keys import SessionKeys
from runtime.sessions.link import ControlCall
from runtime.sessions.programs import Held
from runtime.sessions.turns import ChatMessage, Finish, Tool, TurnSampling


class About(Struct, frozen=True):
    """Whose session it is, and the digests of its keys; without a group, that of an evaluation."""

    group_id: int | None
    index: int
    keys: SessionKeys


class TurnNote(Struct, frozen=True, tag=True):
    """A turn that was sampled to its end.

    Args:
        after: number of the turn that it goes on from, counted from 0 in the order of these notes; -1: none.
        path: messages between the two.
        path_ids: tokens between the two, of a client that renders itself; None: it sent messages.
        tools: that the client offered.
        sampling, model, choice: of the request.
        branch: of the tree.
        cause: why the branch forked; None: it did not.
        part: conversation of the sample.
        has_tools: whether the first request of the branch has tools.
        is_whole: whether the prompt was rendered from its beginning, instead of after the turn that it goes on from.
        message: that was sampled.
        finish: why it ended.
        ended_at: in seconds of the machine's monotonic clock.
        own_s: time that the program took itself until then, in seconds.
        waited_s: time that it waited for the model until then, in seconds.
    """

    after: int
    path: tuple[ChatMessage, ...]
    path_ids: tuple[int, ...] | None
    tools: tuple[Tool, ...]
    sampling: TurnSampling
    model: str
    choice: int
    branch: int
    cause: Cause | None
    part: int
    has_tools: bool
    is_whole: bool
    message: ChatMessage
    finish: Finish
    ended_at: float
    own_s: float = 0.0
    waited_s: float = 0.0


class ControlNote(Struct, frozen=True, tag=True):
    """A call of a holder of the control key that was allowed."""

    call: ControlCall
    content: dict[str, Any]


class State(Struct, frozen=True):
    """What is stored of a sample and its further conversations after its newest turn."""

    samples: tuple[SampleSummary, ...] = ()


class LeftSession(Struct, frozen=True):
    """A session whose rollout actor died while its program goes on.

    Args:
        about: whose it is.
        notes: of its turns and control calls, in their order; None: there were too many to hold.
        samples: what is stored.
    """

    about: About
    notes: tuple[TurnNote | ControlNote, ...] | None
    samples: tuple[SampleSummary, ...]

    @classmethod
    def of(cls, held: Held) -> "LeftSession":
        """Decode what the process of programs held."""
        notes = None if held.notes is None else tuple(_NOTE.decode(note) for note in held.notes)
        state = _STATE.decode(held.state) if held.state else State()
        return cls(_ABOUT.decode(held.about), notes, state.samples)

    @property
    def turns(self) -> list[TurnNote]:
        """Notes of its turns, in their order."""
        return [note for note in self.notes or () if isinstance(note, TurnNote)]

    def stored(self, carried: Sequence[SampleSummary]) -> list[SampleSummary]:
        """Return what its sample goes on from: what was noted, and further tokens of it that its group carries.

        The group may carry tokens of an earlier attempt of the sample, which are left out.

        Args:
            carried: by the group, of any samples.
        """
        others = {one.part: one for one in carried if one.index == self.about.index}
        return [_longer(own, others.get(own.part, own)) for own in self.samples]


def encoded(note: About | TurnNote | ControlNote | State) -> bytes:
    """Return a note as bytes."""
    return _ENCODER.encode(note)


def _longer(noted: SampleSummary, carried: SampleSummary) -> SampleSummary:
    """Return what is carried if it goes on from what was noted: segments are stored once, so they identify tokens."""
    goes_on = bool(noted.segments) and carried.segments[: len(noted.segments)] == noted.segments
    return carried if goes_on else noted


_ENCODER: Final = msgspec.msgpack.Encoder()
_NOTE: Final = msgspec.msgpack.Decoder(TurnNote | ControlNote)
_STATE: Final = msgspec.msgpack.Decoder(State)
_ABOUT: Final = msgspec.msgpack.Decoder(About)
