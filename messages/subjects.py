"""All names on the bus: subjects, streams, buckets. No other module builds them."""

import hashlib
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
GRADER_NAME = RUN_NAME  # names of graders that are tokens as they are
OWN_GRADERS = "_own"  # token of score requests that only the run's own reward actors may grade


def check_run_name(run: str) -> str:
    """Return the name if it is valid in subjects, streams and paths.

    Raises:
        ValueError: the name is invalid.
    """
    if not RUN_NAME.fullmatch(run):
        raise ValueError(f"run name {run!r}: allowed are 1 to 64 letters, digits, '-' and '_', not '-' or '_' first")
    return run


def plane_filter(run: str, plane: Plane) -> str:
    """Subject filter of one plane of a run."""
    return f"{ROOT}.{run}.{plane}.>"


def filter_of(run: str, message_type: type[Message]) -> str:
    """Subject filter of one message type of a run."""
    subject = _topic_subject(run, message_type)
    return f"{subject}.>" if message_type.keyed else subject


def subject_of(run: str, message: Message) -> str:
    """The subject of one message."""
    subject = _topic_subject(run, type(message))
    return f"{subject}.{message.key()}" if message.keyed else subject


def key_subject(run: str, message_type: type[Message], key: str) -> str:
    """The subject of a keyed message type with this key."""
    return f"{_topic_subject(run, message_type)}.{key}"


@lru_cache(maxsize=1024)
def _topic_subject(run: str, message_type: type[Message]) -> str:
    return f"{ROOT}.{run}.{message_type.plane}.{message_type.topic}"


def key_of(subject: str, message_type: type[Message]) -> str | None:
    """The key in a subject of a keyed message type; None for the subject of another type."""
    _, _, rest = subject.partition(f".{message_type.plane}.{message_type.topic}.")
    return rest or None


@cache
def _event_topics() -> dict[str, bool]:
    """Return, for the topic of each event type, whether its subjects continue after the topic."""
    types = message_types().values()
    return {message_type.topic: message_type.keyed for message_type in types if message_type.plane is Plane.EVENT}


def is_known_event(subject: str) -> bool:
    """Whether this version has an event type for the subject. Readers ignore all other events."""
    _, _, rest = subject.partition(f".{Plane.EVENT}.")
    topics = _event_topics()
    if rest in topics:
        return not topics[rest]
    return any(keyed and rest.startswith(f"{topic}.") for topic, keyed in topics.items())


def is_ledger(subject: str) -> bool:
    """Whether only the buffer may publish under the subject."""
    return subject.partition(f".{Plane.EVENT}.")[2].startswith("ledger.")


def ledger_filter(run: str) -> str:
    """Filter of the ledger's subjects. The buffer appends with the expected last sequence over this filter."""
    return f"{ROOT}.{run}.{Plane.EVENT}.ledger.>"


def event_filters(run: str, types: Iterable[type[Message]]) -> list[str]:
    """Subject filters of some event types; without types, of the whole plane.

    All types of the ledger together become the ledger's filter.
    """
    wanted = set(types)
    ledger = {one for one in message_types().values() if one.plane is Plane.EVENT and one.topic.startswith("ledger.")}
    if not wanted:
        return [plane_filter(run, Plane.EVENT)]
    if not ledger <= wanted:
        return sorted(filter_of(run, message_type) for message_type in wanted)
    return [*sorted(filter_of(run, message_type) for message_type in wanted - ledger), ledger_filter(run)]


def call_subject(run: str, instance: str, topic: str) -> str:
    """Subject where one actor instance answers one kind of call."""
    return f"{ROOT}.{run}.{Plane.CALL}.{instance}.{topic}"


def inbox_prefix(run: str, name: str) -> str:
    """Prefix of the subjects on which a client of a run receives answers."""
    return f"{INBOX}.{run}.{NO_TOKEN.sub('-', name) or 'client'}"


def is_inbox(run: str, subject: str) -> bool:
    """Whether a subject received over the bus is an inbox of this run. Answers are sent to no other subject."""
    tokens = subject.split(".")
    own = tokens[:2] == [INBOX, run] and len(tokens) > 2 and len(subject) <= MAX_INBOX_CHARS
    return own and not any(not token or NO_TOKEN.search(token) for token in tokens)


@lru_cache(maxsize=1024)
def grader_token(name: str) -> str:
    """The subject token of a grader: its name, or a readable form with a hash where the name is not a token."""
    if GRADER_NAME.fullmatch(name):
        return name
    readable = NO_TOKEN.sub("-", name).lstrip("-_")[:48] or "grader"
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def score_durable(token: str) -> str:
    """Name of the durable consumer that delivers the score requests of one grader."""
    return f"score-{token}"


def score_filter(run: str, token: str) -> str:
    """Subject filter of the score requests of one grader. The last token is the id of the request."""
    return f"{ROOT}.{run}.{Plane.WORK}.score.{token}.*"


def scores_subject(run: str, token: str, inbox: str) -> str:
    """Subject of the answers to score requests of one grader. With token "*": filter of all answers to one inbox."""
    return f"{ROOT}.{run}.scores.{token}.{inbox}"


def scores_filter(run: str, token: str) -> str:
    """Subject filter of all answers of one grader."""
    return f"{ROOT}.{run}.scores.{token}.>"


def scores_token(run: str, subject: str) -> str | None:
    """The grader's token in a subject that takes answers to score requests; None for any other subject."""
    tokens = subject.split(".")
    own = tokens[:3] == [ROOT, run, "scores"] and len(tokens) == 5 and len(subject) <= MAX_INBOX_CHARS
    return tokens[3] if own and not any(not token or NO_TOKEN.search(token) for token in tokens[3:]) else None


def prompt_filter(run: str) -> str:
    """Subject filter of the stored prompts of a run."""
    return f"{ROOT}.{run}.{Plane.DATA}.prompt.>"


def stream_of(run: str, plane: Plane) -> str:
    """The JetStream stream that stores a plane of a run."""
    return f"{ROOT}-{run}-{plane}"


def bucket_of(run: str) -> str:
    """The KV bucket of a run: roster, addresses, claims."""
    return f"{ROOT}-{run}"
