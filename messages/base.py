"""Base of all messages: a frozen struct with a tag, a plane and a subject, and the registry of message types."""

from enum import StrEnum
from typing import Any, ClassVar, Final, TypeVar, dataclass_transform

import msgspec

VERSION: Final = 1  # of the message set; raised when the ledger gains an event that older readers must not skip


class Plane(StrEnum):
    """The four planes of the bus, and the dead-letter stream. Each has one delivery rule (docs/understand/bus.md)."""

    EVENT = "event"
    WORK = "work"
    DATA = "data"
    CALL = "call"
    DEAD = "dead"


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))  # subclasses inherit frozen
class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages: no methods beyond checks and derived properties.

    New fields have defaults. A field never changes its type. A new meaning gets a new tag.
    """

    plane: ClassVar[Plane]
    topic: ClassVar[str]  # subject tokens after the plane, shared by all instances of the type
    keyed: ClassVar[bool] = False  # whether key() is appended to the subject
    answers: ClassVar[bool] = False  # whether it is sent to the caller's inbox and has no subject of its own

    def key(self) -> str:
        """Last tokens of the subject, which make it unique to this instance."""
        return ""


MessageT = TypeVar("MessageT", bound=Message)

_registry: dict[str, type[Message]] = {}


def register(message_type: type[MessageT]) -> type[MessageT]:
    """Register a message type under its tag. Used as a decorator.

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
    """The tag that identifies a message type on the wire.

    Raises:
        ValueError: the type has no string tag.
    """
    tag: Any = message_type.__struct_config__.tag
    if not isinstance(tag, str):
        raise ValueError(f"{message_type.__name__} has no tag")
    return tag


def message_types() -> dict[str, type[Message]]:
    """All registered message types by tag, in order of definition."""
    return dict(_registry)


class EngineSums(msgspec.Struct, frozen=True, kw_only=True):
    """Checksums of a weight version's tensors as engines hold them, computed by the trainer."""

    tp_size: int
    dtype: str
    is_padded: bool  # as SGLang pads; the tiny engine does not
    checksum: str  # of all tensors, as an engine reports it
    tensors: str  # 8 hex digits of each tensor, in the order of the engine's names


class FileSum(msgspec.Struct, frozen=True, kw_only=True):
    """Size and checksum of a published file."""

    size_bytes: int
    crc32: int
