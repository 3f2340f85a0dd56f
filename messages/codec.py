"""Encoding and decoding of messages. The headers select the message type and its encoding."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from messages.arrays import from_extension, from_list, to_extension, to_list
from messages.base import Message, MessageT, Plane, message_types, tag_of
from messages.plain import UNREADABLE, check_json, check_open_fields, has_open_fields

JSON = "application/json"
MSGPACK = "application/msgpack"
CONTENT_TYPE_HEADER = "Content-Type"
TYPE_HEADER = "Physarum-Type"
VERSION_HEADER = "Physarum-Version"  # VERSION of the messages that the writer of a ledger event knows

MAX_ERROR_CHARS: Final = 300  # bound of an error text, which may quote the received bytes

_json_encoder = msgspec.json.Encoder(enc_hook=to_list)
_msgpack_encoder = msgspec.msgpack.Encoder(enc_hook=to_extension)
_decoders: dict[tuple[str, str], Any] = {}


StructT = TypeVar("StructT", bound=msgspec.Struct)


class DecodeError(ValueError):
    """A message that cannot be used. The text is the reason."""


class UnknownType(DecodeError):
    """A message of a type that this version does not know."""

    def __init__(self, tag: str) -> None:
        super().__init__(f"unknown message type {tag!r}")
        self.tag = tag


class EncodeError(ValueError):
    """A message that no reader could decode and that must not be sent. The text is the reason."""


class Encoded(NamedTuple):
    """An encoded message: payload and headers."""

    payload: bytes
    headers: dict[str, str]


class _Encoding(NamedTuple):
    """How a type is encoded. Cached, because a lookup per message would cost as much as encoding a small one."""

    encode: Callable[[Message], bytes]
    content_type: str
    tag: str
    is_open: bool  # it holds values from user code


@cache
def _encoding_of(message_type: type[Message], content_type: str | None) -> _Encoding:
    content_type = content_type or content_type_of(message_type)
    return _Encoding(_encoder(content_type).encode, content_type, tag_of(message_type), has_open_fields(message_type))


def content_type_of(message_type: type[Message]) -> str:
    """The default content type of a message type. Events and dead letters are JSON, so that people can read them."""
    return JSON if message_type.plane in (Plane.EVENT, Plane.DEAD) else MSGPACK


def encode(message: Message, *, content_type: str | None = None) -> Encoded:
    """Encode a message with its headers.

    Raises:
        ValueError: the content type is neither JSON nor msgpack.
        EncodeError: a value from user code cannot be sent: an object, text that is not valid Unicode, an integer over
            64 bits, or lists nested too deeply.
    """
    encoding = _encoding_of(type(message), content_type)
    try:
        payload = encoding.encode(message)
        if encoding.is_open:  # other types hold only values from this code base
            _check(message, payload, encoding.content_type)
    except (*UNREADABLE, TypeError, NotImplementedError) as error:
        raise EncodeError(f"{encoding.tag}: {str(error)[:MAX_ERROR_CHARS] or type(error).__name__}") from error
    return Encoded(payload, {CONTENT_TYPE_HEADER: encoding.content_type, TYPE_HEADER: encoding.tag})


def decode(payload: bytes, headers: Mapping[str, str] | None) -> Message:
    """Decode a message of any registered type. Every decoded message can be encoded again.

    Raises:
        DecodeError: type or content type is missing or unknown, or the bytes do not fit the type. No bytes cause any
            other error.
    """
    headers = headers or {}
    tag, content_type = headers.get(TYPE_HEADER), headers.get(CONTENT_TYPE_HEADER, JSON)
    if tag is None:
        raise DecodeError(f"no {TYPE_HEADER} header")
    decoder = _decoders.get((tag, content_type)) or _make_decoder(tag, content_type)
    try:
        message = decoder.decode(payload)
        _check(message, payload, content_type)
    except UNREADABLE as error:
        raise DecodeError(f"{tag}: {str(error)[:MAX_ERROR_CHARS] or type(error).__name__}") from error
    return message


def decode_as(message_type: type[MessageT], payload: bytes, headers: Mapping[str, str] | None) -> MessageT:
    """Decode a message that has to be of one type.

    Raises:
        DecodeError: as `decode`, or the message is of another type.
    """
    message = decode(payload, headers)
    if not isinstance(message, message_type):
        raise DecodeError(f"got {type(message).__name__}, expected {message_type.__name__}")
    return message


def _check(message: Message, payload: bytes, content_type: str) -> None:
    if content_type == JSON:
        check_json(message, payload)
    else:
        check_open_fields(message)


def _encoder(content_type: str) -> msgspec.json.Encoder | msgspec.msgpack.Encoder:
    if content_type == JSON:
        return _json_encoder
    if content_type == MSGPACK:
        return _msgpack_encoder
    raise ValueError(f"content type {content_type!r}: allowed are {JSON} and {MSGPACK}")


def _make_decoder(tag: str, content_type: str) -> Any:
    message_type = message_types().get(tag)
    if message_type is None:
        raise UnknownType(tag[:MAX_ERROR_CHARS])
    if content_type == JSON:
        decoder: Any = msgspec.json.Decoder(message_type, dec_hook=from_list)
    elif content_type == MSGPACK:
        # dec_hook serves senders in other languages that send plain lists in msgpack
        decoder = msgspec.msgpack.Decoder(message_type, ext_hook=from_extension, dec_hook=from_list)
    else:
        raise DecodeError(f"unknown content type {content_type[:MAX_ERROR_CHARS]!r}")
    _decoders[(tag, content_type)] = decoder
    return decoder


def pack(struct: msgspec.Struct) -> bytes:
    """Encode a struct that is not a message as msgpack."""
    return _msgpack_encoder.encode(struct)


def unpack(content: bytes, struct: type[StructT]) -> StructT:
    """Decode the output of `pack`.

    Raises:
        DecodeError: the bytes do not fit the type.
    """
    decoder = msgspec.msgpack.Decoder(struct, ext_hook=from_extension, dec_hook=from_list)
    try:
        return decoder.decode(content)
    except (msgspec.DecodeError, ValueError, RecursionError, OverflowError) as error:
        raise DecodeError(f"{struct.__name__}: {error}") from error
