"""All names on the bus: subjects, streams, buckets. They are spelled here and nowhere else."""

import re
from collections.abc import Iterable
from functools import cache, lru_cache

from messages.base import Message, Plane, message_types

ROOT = "phy"
STORED_PLANES = (Plane.EVENT, Plane.WORK, Plane.DATA, Plane.DEAD)
INBOX = "_INBOX"
NO_TOKEN = re.compile(r"[^A-Za-z0-9_-]+")
MAX_INBOX_CHARS = 512
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def check_run_name(run: str) -> str:
    """Return the name if it can be part of subjects, streams and paths.

    Raises:
        ValueError: it cannot.
    """
    if not RUN_NAME.fullmatch(run):
        raise ValueError(f"run name {run!r}: allowed are 1 to 64 letters, digits, '-' and '_', not '-' or '_' first")
    return run


def plane_filter(run: str, plane: Plane) -> str:
    """Every subject of one plane of a run."""
    return f"{ROOT}.{run}.{plane}.>"


def filter_of(run: str, message_type: type[Message]) -> str:
    """Every subject of one message type of a run."""
    subject = _topic_subject(run, message_type)
    return f"{subject}.>" if message_type.keyed else subject


def subject_of(run: str, message: Message) -> str:
    """The subject of one message."""
    subject = _topic_subject(run, type(message))
    return f"{subject}.{message.key()}" if message.keyed else subject


@lru_cache(maxsize=1024)
def _topic_subject(run: str, message_type: type[Message]) -> str:
    return f"{ROOT}.{run}.{message_type.plane}.{message_type.topic}"


def key_of(subject: str, message_type: type[Message]) -> str | None:
    """The key in a subject of a keyed message type; None for the subject of another type."""
    _, _, rest = subject.partition(f".{message_type.plane}.{message_type.topic}.")
    return rest or None


@cache
def _event_topics() -> dict[str, bool]:
    """Whether subjects go on after it, by the topic of each event type."""
    types = message_types().values()
    return {message_type.topic: message_type.keyed for message_type in types if message_type.plane is Plane.EVENT}


def is_known_event(subject: str) -> bool:
    """Whether some event type of this version is published under a subject; others are no business of ours."""
    _, _, rest = subject.partition(f".{Plane.EVENT}.")
    topics = _event_topics()
    if rest in topics:
        return not topics[rest]
    return any(keyed and rest.startswith(f"{topic}.") for topic, keyed in topics.items())


def is_ledger(subject: str) -> bool:
    """Whether a subject is the buffer's alone."""
    return subject.partition(f".{Plane.EVENT}.")[2].startswith("ledger.")


def ledger_filter(run: str) -> str:
    """What the buffer alone writes; appended to with the expected last sequence over this filter."""
    return f"{ROOT}.{run}.{Plane.EVENT}.ledger.>"


def event_filters(run: str, types: Iterable[type[Message]]) -> list[str]:
    """Every subject of some event types; of none: of the plane. All of the ledger's types are the ledger itself."""
    asked = set(types)
    ledger = {one for one in message_types().values() if one.plane is Plane.EVENT and one.topic.startswith("ledger.")}
    if not asked:
        return [plane_filter(run, Plane.EVENT)]
    if not ledger <= asked:
        return sorted(filter_of(run, message_type) for message_type in asked)
    return [*sorted(filter_of(run, message_type) for message_type in asked - ledger), ledger_filter(run)]


def call_subject(run: str, instance: str, topic: str) -> str:
    """Where one actor instance answers one kind of call."""
    return f"{ROOT}.{run}.{Plane.CALL}.{instance}.{topic}"


def inbox_prefix(run: str, name: str) -> str:
    """What the subjects begin with under which a client of a run takes answers."""
    return f"{INBOX}.{run}.{NO_TOKEN.sub('-', name) or 'client'}"


def is_inbox(run: str, subject: str) -> bool:
    """Whether a subject that came over the bus is one for answers: nothing is ever sent to another one."""
    tokens = subject.split(".")
    own = tokens[:2] == [INBOX, run] and len(tokens) > 2 and len(subject) <= MAX_INBOX_CHARS
    return own and not any(not token or NO_TOKEN.search(token) for token in tokens)


def stream_of(run: str, plane: Plane) -> str:
    """The JetStream stream that stores a plane of a run."""
    return f"{ROOT}-{run}-{plane}"


def bucket_of(run: str) -> str:
    """The KV bucket of a run: roster, addresses, claims."""
    return f"{ROOT}-{run}"
