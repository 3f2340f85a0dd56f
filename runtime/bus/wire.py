"""Encoding of messages that leave this process. Refuses messages that no reader could decode."""

from messages import EncodeError, Message, Plane, encode
from messages.codec import Encoded
from runtime.bus.errors import MessageRefused, MessageTooLarge
from runtime.bus.limits import MAX_EVENT_BYTES


def to_wire(message: Message) -> Encoded:
    """Encode a message for sending.

    Raises:
        MessageRefused: it holds a value from user code that cannot be sent.
        MessageTooLarge: the event exceeds the readers' limit.
    """
    try:
        encoded = encode(message)
    except EncodeError as error:
        raise MessageRefused(str(error)) from error
    if message.plane is Plane.EVENT and len(encoded.payload) > MAX_EVENT_BYTES:
        raise MessageTooLarge(f"event {message.topic}", len(encoded.payload), MAX_EVENT_BYTES)
    return encoded
