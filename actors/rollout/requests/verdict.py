"""Judges how a request ended: its answer is kept, it is sent again, refused, or ended by a halt. Pure."""

from enum import StrEnum
from typing import Final, NamedTuple

from actors.rollout.sglang.errors import (
    AbortedUnasked,
    EngineBusy,
    EngineError,
    EngineFailed,
    PrefixOutdated,
    RequestRefused,
    TokensUnverified,
)


class End(StrEnum):
    """How one try of a request ended, before its circumstances are known."""

    FINISHED = "finished"  # by the model or the token limit
    ABORTED = "aborted"  # by a call to abort it, by this actor or another client
    LOST = "lost"  # without an end: the connection broke, or it got no token for too long
    BUSY = "busy"  # the engine or the router cannot serve it now
    FAILED = "failed"  # with a server error, or an answer that cannot be true
    UNVERIFIED = "unverified"  # its tokens come from weights that were not verified
    OUTDATED = "outdated"  # newer weights sampled its first token than may have computed its cached prefix
    REFUSED = "refused"  # the engine reports that the request is invalid


NO_FAILURES: Final = (End.UNVERIFIED, End.OUTDATED)  # of an engine or a request


class Asked(StrEnum):
    """Whether this actor asked engines to abort the request."""

    NO = "no"
    HALT = "halt"  # the round was halted
    UPDATE = "update"  # for a weight update


class Isolation(StrEnum):
    """Whether the request runs alone on its engine, and what that showed."""

    NO = "no"
    YES = "yes"
    POISON = "poison"  # engines crashed while it was their only request


class Outcome(StrEnum):
    """What becomes of a request."""

    RESEND = "resend"
    REFUSE = "refuse"  # its group fails
    ABORTED = "aborted"  # by the halt of its round; its tokens stay
    KEEP = "keep"  # the answer is complete


class Verdict(NamedTuple):
    """What becomes of a request, and of the tokens that it got."""

    outcome: Outcome
    keeps_tokens: bool = True  # a resent request goes on from them, or its sample ends with them
    is_failure: bool = False  # a running engine failed: pauses grow, and it or the request is given up in the end


def end_of(error: EngineError) -> End:
    """Return how a try ended that raised an error."""
    match error:
        case RequestRefused():
            return End.REFUSED
        case TokensUnverified():
            return End.UNVERIFIED
        case PrefixOutdated():
            return End.OUTDATED
        case AbortedUnasked():
            return End.ABORTED
        case EngineBusy():
            return End.BUSY
        case EngineFailed():
            return End.FAILED
        case _:
            return End.LOST


def judge(
    end: End, *, streamed: bool, had_tokens: bool, asked: Asked, engine_died: bool, isolation: Isolation
) -> Verdict:
    """Judge the end of a try.

    Args:
        end: how it ended.
        streamed: its tokens came one chunk at a time; a whole answer has all or none.
        had_tokens: each of its samples got usable tokens.
        asked: whether this actor asked for an abort.
        engine_died: an engine that may have had it died since it was sent, or none is up.
        isolation: whether it ran alone.
    """
    keeps = had_tokens and (streamed or end in (End.FINISHED, End.ABORTED)) and end is not End.OUTDATED
    if end is End.REFUSED or isolation is Isolation.POISON:
        return Verdict(Outcome.REFUSE, keeps_tokens=False)
    if end is End.FINISHED:
        return Verdict(Outcome.KEEP)
    if asked is Asked.HALT:
        return Verdict(Outcome.ABORTED, keeps_tokens=keeps or end is End.ABORTED)
    if end is End.ABORTED and (asked is Asked.UPDATE or had_tokens):
        return Verdict(Outcome.RESEND)
    return Verdict(Outcome.RESEND, keeps_tokens=keeps, is_failure=not engine_died and end not in NO_FAILURES)
