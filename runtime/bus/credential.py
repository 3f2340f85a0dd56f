"""The credential of an external client: one file with all that its program needs, and nothing else of the run."""

import datetime
import ssl
import tomllib
from pathlib import Path
from typing import Annotated, Final

import msgspec

from runtime.util.secrets import Login, Secret, read_private

Instant = Annotated[datetime.datetime, msgspec.Meta(tz=True)]
HEAD: Final = "# Credential of an external client of a Physarum run. Keep it secret: chmod 600."


class Credential(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Login and subjects of an external client. Each field is one line of the file, a JSON string."""

    kind: str  # "grader", "viewer" or "auditor"
    run: str
    name: str
    url: str
    tls_name: str  # name in the server's certificate, whatever address leads there
    user: str
    password: str
    expires: Instant
    inbox: str  # prefix of the subjects on which the client may receive answers
    stream: str  # with the score requests of the grader, with the events, or with the data plane
    grader: str = ""  # name in the topology
    token: str = ""  # of the grader in subjects
    domain: str = ""  # under which JetStream clients find the consumer
    durable: str = ""  # consumer of the grader's score requests
    pull: str = ""  # subject of requests for the next score requests
    answers: str = ""  # filter of the subjects that take answers
    prompts: str = ""  # subject of requests for a stored prompt, without its key
    events: str = ""  # filter of the subjects of new events
    history: str = ""  # subject of requests for stored messages of the stream
    certificate: str  # PEM; the client trusts it alone

    @property
    def login(self) -> Login:
        """The login of the client."""
        return Login(user=self.user, password=Secret(self.password))

    def is_expired(self, now: datetime.datetime) -> bool:
        """Return whether the credential has expired at a time."""
        return now >= self.expires


def credential_text(credential: Credential) -> str:
    """Return the content of a credential file."""
    fields: dict[str, str] = msgspec.to_builtins(credential)
    lines = [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in fields.items()]
    return "\n".join([HEAD, *lines, ""])  # JSON strings are TOML strings


def read_credential(path: Path) -> Credential:
    """Read a credential file.

    Raises:
        OSError: it cannot be read.
        ValueError: other users may read it, or its content is invalid. The text shows none of the content.
    """
    try:
        found = msgspec.convert(tomllib.loads(read_private(path)), Credential)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a credential of this version") from error
    check_certificate(path, found.certificate)
    return found


def check_certificate(path: Path, certificate: str) -> None:
    """Check the certificate that a file holds.

    Raises:
        ValueError: it is not a certificate in PEM.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=certificate)
    except (ssl.SSLError, TypeError, ValueError) as error:  # a TypeError for a text that is not ASCII
        raise ValueError(f"{path}: its certificate is not one in PEM") from error
