"""What leaves this process: a message as bytes, if some reader could use it."""

from messages import EncodeError, Message, Plane, encode
from messages.codec import Encoded
from runtime.bus.errors import MessageRefused, MessageTooLarge
from runtime.bus.limits import MAX_EVENT_BYTES


def to_wire(message: Message) -> Encoded:
    """Encode a message that is to be sent.

    Raises:
        MessageRefused: a user's function put something into it that cannot be sent.
        MessageTooLarge: an event that is too long for readers.
    """
    try:
        encoded = encode(message)
    except EncodeError as error:
        raise MessageRefused(str(error)) from error
    if message.plane is Plane.EVENT and len(encoded.payload) > MAX_EVENT_BYTES:
        raise MessageTooLarge(f"event {message.topic}", len(encoded.payload), MAX_EVENT_BYTES)
    return encoded
