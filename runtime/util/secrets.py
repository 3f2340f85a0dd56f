"""Secrets: hidden when printed, stored in files that only their owner can read, and removed from displayed URLs."""

import logging
import os
import re
import secrets
import select
import stat
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Self
from urllib.parse import quote, unquote

import msgspec

from runtime.util.files import PRIVATE_DIRECTORY, write_atomically

HIDDEN: Final = "***"
_CREDENTIALS: Final = re.compile(
    r"-+BEGIN NATS USER JWT-+\s+(\S+)\s+-+END NATS USER JWT-+.*-+BEGIN USER NKEY SEED-+\s+(\S+)\s+-+END", re.DOTALL
)
_JWT: Final = re.compile(r"eyJ[\w-]+\.[\w-]+\.[\w-]+")
_SEED: Final = re.compile(r"SU[A-Z2-7]{56}")  # of a user
SAY_AFTER_S: Final = 2.0  # of a wait for a pipe
PIPE_S: Final = 30.0  # until a pipe must have been written and closed
PIPE_BYTES: Final = 1 << 20
_BYTES: Final = 24  # random bytes in a generated secret
_LOGIN: Final = re.compile(r"(?<=://)[^\s,]*@")  # up to the last @ of a URL, because a password may hold any character


class Secret(str):
    """A text that shows as `***` when printed, joined, encoded or logged. Only `reveal` returns it."""

    __slots__ = ("_text",)
    _text: str

    def __new__(cls, text: str) -> Self:
        """Wrap a text."""
        secret = super().__new__(cls, HIDDEN)
        secret._text = text
        return secret

    @classmethod
    def random(cls) -> Self:
        """Generate a random secret of hexadecimal digits."""
        return cls(secrets.token_hex(_BYTES))

    def reveal(self) -> str:
        """The text itself."""
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and secrets.compare_digest(self._text.encode(), other._text.encode())

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return HIDDEN

    def __reduce__(self) -> str:
        raise TypeError("a secret is not pickled")


class Login(msgspec.Struct, frozen=True, kw_only=True):
    """Login of a server: user and password, a token alone, or a JWT and its seed."""

    user: str | None = None  # or the JWT
    password: Secret  # or the token, without a user; or the seed that signs for the JWT

    @property
    def is_jwt(self) -> bool:
        """Whether it is a JWT and its seed. No user and password look like these."""
        is_seed = _SEED.fullmatch(self.password.reveal()) is not None
        return is_seed and self.user is not None and _JWT.fullmatch(self.user) is not None


class _LoginFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    user: str | None = None
    password: str | None = None
    token: str | None = None


def split_login(url: str) -> tuple[str, Login | None]:
    """Split comma-separated URLs into URLs without login, and their login.

    Raises:
        ValueError: the URLs have different logins.
    """
    bare: list[str] = []
    found: set[tuple[str | None, str]] = set()
    for one in url.split(","):
        scheme, slashes, rest = one.rpartition("://")
        login, at, place = rest.rpartition("@")
        bare.append(f"{scheme}{slashes}{place}")
        if at:
            user, colon, password = login.partition(":")
            found.add((unquote(user), unquote(password)) if colon else (None, unquote(user)))
    if len(found) > 1:
        raise ValueError(f"the servers of one bus have different logins: {','.join(bare)}")
    user, password = next(iter(found), (None, None))
    return ",".join(bare), None if password is None else Login(user=user, password=Secret(password))


def with_login(url: str, login: Login | None) -> str:
    """Insert a percent-encoded login into each URL. The result is secret."""
    if login is None:
        return url
    words = [login.password.reveal()] if login.user is None else [login.user, login.password.reveal()]
    written = ":".join(quote(word, safe="") for word in words)
    return ",".join(one.replace("://", f"://{written}@", 1) for one in url.split(","))


def read_login(path: Path) -> Login:
    """Read the login in a file: TOML with `user` and `password` or `token`, or a credentials file of NATS.

    Raises:
        OSError: the file cannot be read.
        ValueError: other users may read the file, or its content is invalid. The text shows none of the content.
    """
    text = read_private(path)
    if (credentials := _CREDENTIALS.search(text)) is not None:
        login = Login(user=credentials[1], password=Secret(credentials[2]))
        if not login.is_jwt:
            raise ValueError(f"{path}: a JWT and the seed of a user (SU...) are expected between the lines of dashes")
        return login
    try:
        found = msgspec.convert(tomllib.loads(text), _LoginFile)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError):
        found = _LoginFile()
    match found:
        case _LoginFile(user=str(user), password=str(password), token=None):
            return Login(user=user, password=Secret(password))
        case _LoginFile(user=None, password=None, token=str(token)):
            return Login(password=Secret(token))
        case _:
            raise ValueError(
                f'{path}: expected user = "..." and password = "...", token = "..." alone, or a NATS credentials file'
            )


def without_logins(text: str) -> str:
    """Hide the logins of all URLs in a text."""
    return _LOGIN.sub(f"{HIDDEN}@", text) if "@" in text and "://" in text else text


def without(text: bytes, known: Iterable[Secret]) -> bytes:
    """Hide known secrets in the output of a process."""
    for secret in known:
        text = text.replace(secret.reveal().encode(), HIDDEN.encode())
    return text


def kept_secret(path: Path) -> Secret:
    """Return the secret in a file; generate and write it if the file is missing.

    Raises:
        OSError: the file cannot be read or written.
        ValueError: other users may read the file.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"{Secret.random().reveal()}\n".encode())
    return Secret(read_private(path).strip())


def read_private(path: Path) -> str:
    """Read a file, or a pipe, that only its owner may read.

    Raises:
        OSError: the file cannot be read.
        ValueError: other users may read the file, or a pipe brings no whole text in time; the text says what to do.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would block
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if mode & 0o077:
            raise ValueError(f"{path} holds a secret and others may read it (mode {mode & 0o777:o}): chmod 600 {path}")
        return (_piped(path, descriptor) if stat.S_ISFIFO(mode) else file.read()).decode()


def _piped(path: Path, descriptor: int) -> bytes:
    """Read a pipe to its end. Log a wait, and end it with an error."""
    content, readable, began, has_said = b"", select.poll(), time.monotonic(), False
    readable.register(descriptor, select.POLLIN)
    while (waited_s := time.monotonic() - began) < PIPE_S and len(content) <= PIPE_BYTES:
        if waited_s >= SAY_AFTER_S and not has_said:
            has_said = True
            logging.getLogger(__name__).warning("%s is a pipe: waiting up to %g s for its content", path, PIPE_S)
        limit_s = (PIPE_S if has_said else SAY_AFTER_S) - waited_s
        if readable.poll(max(1, limit_s * 1000)):
            part = os.read(descriptor, PIPE_BYTES)
            if not part:
                return content
            content += part
    raise ValueError(
        f"{path} is a pipe: no program wrote at most {PIPE_BYTES:,} bytes and closed it within {PIPE_S:g} s"
    )


def make_private(directory: Path) -> None:
    """Create a directory for its owner alone, or restrict an existing one to its owner.

    Raises:
        OSError: the directory cannot be created, or belongs to another user.
    """
    directory.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    if directory.stat().st_mode & 0o077:
        directory.chmod(PRIVATE_DIRECTORY)
