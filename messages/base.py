"""What every message is: a frozen struct with a tag, a plane and a subject, kept in one registry."""

from enum import StrEnum
from typing import Any, ClassVar, Final, TypeVar, dataclass_transform

import msgspec

VERSION: Final = 1  # of the messages; raised when the ledger gains an event, which older readers must not pass over


class Plane(StrEnum):
    """The four planes of the bus, and the stream of dead letters. Each has one delivery rule (docs/design.md, 3)."""

    EVENT = "event"
    WORK = "work"
    DATA = "data"
    CALL = "call"
    DEAD = "dead"


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))  # msgspec inherits frozen; say so
class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages: no methods beyond checks and derived properties.

    Fields are added with defaults and never change their type; a new meaning is a new tag.
    """

    plane: ClassVar[Plane]
    topic: ClassVar[str]  # the subject after the plane, shared by all instances of the type
    keyed: ClassVar[bool] = False  # whether subjects go on after the topic with key()
    answers: ClassVar[bool] = False  # whether it is sent to the inbox of who asked, and to no subject of its own

    def key(self) -> str:
        """Last tokens of the subject: what makes this instance's subject its own."""
        return ""


MessageT = TypeVar("MessageT", bound=Message)

_registry: dict[str, type[Message]] = {}


def register(message_type: type[MessageT]) -> type[MessageT]:
    """Enter a message type under its tag; used as a decorator.

    Raises:
        ValueError: the tag is taken, or the type lacks a plane or a topic.
    """
    tag = tag_of(message_type)
    if tag in _registry:
        raise ValueError(f"message tag {tag!r} is used by {_registry[tag].__name__} and {message_type.__name__}")
    for attribute in ("plane", "topic"):
        if not hasattr(message_type, attribute):
            raise ValueError(f"{message_type.__name__} has no {attribute}")
    _registry[tag] = message_type
    return message_type


def tag_of(message_type: type[Message]) -> str:
    """The tag that names a message type on the wire."""
    tag: Any = message_type.__struct_config__.tag
    if not isinstance(tag, str):
        raise ValueError(f"{message_type.__name__} has no tag")
    return tag


def message_types() -> dict[str, type[Message]]:
    """All registered message types by tag, in order of definition."""
    return dict(_registry)


class FileSum(msgspec.Struct, frozen=True, kw_only=True):
    """Size and checksum of a file that is announced."""

    size_bytes: int
    crc32: int
