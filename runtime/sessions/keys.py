"""Keys of sessions: one for the model, which generates and nothing else, and one for the session's control."""

import hashlib
import re
import secrets
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from runtime.util.secrets import Secret

PREFIX: Final = "physarum"
SESSION: Final = re.compile(r"[A-Za-z0-9_.]{1,64}")  # a name of a session; it is in its keys and no secret
MAX_KEY_CHARS: Final = 256
Use = Literal["model", "control"]


class SessionKeys(Struct, frozen=True):
    """What the listener knows of a session: the digests of its keys, from which no key can be computed.

    Args:
        session: its name, unique in the run.
        model: SHA-256 of the model key.
        control: SHA-256 of the control key.
    """

    session: str
    model: bytes
    control: bytes

    def use_of(self, key: str) -> Use | None:
        """Return what a key is for, compared in constant time; None: it is no key of the session."""
        given = _digest(key)
        is_model = secrets.compare_digest(given, self.model)
        is_control = secrets.compare_digest(given, self.control)
        return "model" if is_model else "control" if is_control else None


class KeyPair(NamedTuple):
    """The two keys of a session. The agent gets the first one; its adapter or environment keeps the second one."""

    session: str
    model: Secret
    control: Secret

    @classmethod
    def new(cls, session: str) -> "KeyPair":
        """Draw the keys of a session.

        Raises:
            ValueError: the name has other signs than letters, digits, `_` and `.`, or over 64.
        """
        if not SESSION.fullmatch(session):
            raise ValueError(f"{session!r} is no name of a session: up to 64 letters, digits, _ and . are allowed")
        return cls(session, *(Secret(f"{PREFIX}-{session}-{Secret.random().reveal()}") for _ in range(2)))

    def digests(self) -> SessionKeys:
        """Return what the listener knows of it."""
        return SessionKeys(self.session, _digest(self.model.reveal()), _digest(self.control.reveal()))


def session_of(key: str) -> str | None:
    """Return the session that a key names; None: it is no key."""
    parts = key.split("-")
    if len(key) > MAX_KEY_CHARS or len(parts) != 3 or parts[0] != PREFIX or not SESSION.fullmatch(parts[1]):
        return None
    return parts[1]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
