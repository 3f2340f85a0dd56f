"""Logins and TLS as options of nats-py: a user and password, a token, or a JWT with the seed that signs for it."""

import base64
import binascii
from typing import Any, Final

from runtime.bus.nats.certificate import NAME, client_context
from runtime.util.secrets import Login

_REFUSALS: Final = ("authorization", "authentication")  # the latter if the login expired
_SEED_BYTES: Final = 36  # two bytes of prefix, the 32 of an ed25519 key, two of a checksum


def login_options(login: Login | None) -> dict[str, Any]:
    """Login as nats-py options. In a URL, nats-py would not decode percent signs.

    Raises:
        ValueError: the seed of a JWT is invalid.
    """
    if login is None:
        return {}
    if login.user is None:
        return {"token": login.password.reveal()}
    if not login.is_jwt:
        return {"user": login.user, "password": login.password.reveal()}
    jwt, key = login.user.encode(), _key_of(login.password.reveal())

    def sign(nonce: str) -> bytes:
        # imported late: only nodes of a run have the package, and only this kind of login needs it
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return base64.b64encode(Ed25519PrivateKey.from_private_bytes(key).sign(nonce.encode()))

    return {"user_jwt_cb": lambda: bytearray(jwt), "signature_cb": sign}


def tls_options(certificate: str | None) -> dict[str, Any]:
    """TLS with a pinned certificate as nats-py options. Without one, the URL's scheme decides."""
    return {} if certificate is None else {"tls": client_context(certificate), "tls_hostname": NAME}


def requires_tls(servers: str, certificate: str | None) -> bool:
    """Whether a login may only be sent over TLS: with a pinned certificate, or if a URL asks for TLS."""
    return certificate is not None or "tls://" in servers


def is_refusal(error: str) -> bool:
    """Whether the text of a server's error says that it rejects the login."""
    return any(word in error.lower() for word in _REFUSALS)


def _key_of(seed: str) -> bytes:
    """Decode the private key in a seed of NATS.

    Raises:
        ValueError: it is none.
    """
    try:
        found = base64.b32decode(seed + "=" * (-len(seed) % 8))
    except binascii.Error:
        found = b""
    if len(found) != _SEED_BYTES or binascii.crc_hqx(found[:-2], 0) != int.from_bytes(found[-2:], "little"):
        raise ValueError("the seed of the JWT is damaged")
    return found[2:-2]
