"""An operator, an account and a user of NATS by JWT, minted as `nsc` does."""

import base64
import binascii
import hashlib
import json
import time
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PREFIX = {"operator": 14 << 3, "account": 0, "user": 20 << 3}
SEED = 18 << 3
UNLIMITED = {"subs": -1, "conn": -1, "leaf": -1, "imports": -1, "exports": -1, "data": -1, "payload": -1}
STORAGE = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
NO_STORAGE = dict.fromkeys(STORAGE, 0)


class Key:
    """A key pair of one kind."""

    def __init__(self, kind: str) -> None:
        self._key = Ed25519PrivateKey.generate()
        self.kind = kind
        self.public = _encoded(bytes([PREFIX[kind]]) + self._key.public_key().public_bytes_raw())
        first = bytes([SEED | PREFIX[kind] >> 5, (PREFIX[kind] & 31) << 3])
        self.seed = _encoded(first + self._key.private_bytes_raw())

    def mint(self, subject: "Key", name: str, claims: dict[str, Any], expires_s: float | None = None) -> str:
        """Sign a JWT about a key."""
        body: dict[str, Any] = {"iat": int(time.time()), "iss": self.public, "name": name, "sub": subject.public}
        if expires_s is not None:
            body["exp"] = int(time.time() + expires_s)
        body["nats"] = claims | {"type": subject.kind, "version": 2}
        body["jti"] = base64.b32encode(hashlib.sha256(json.dumps(body).encode()).digest()).decode().rstrip("=")
        text = (
            f"{_url64(json.dumps({'typ': 'JWT', 'alg': 'ed25519-nkey'}).encode())}.{_url64(json.dumps(body).encode())}"
        )
        return f"{text}.{_url64(self._key.sign(text.encode()))}"


class JwtAccounts:
    """One operator with a system account and an account that stores streams."""

    def __init__(self) -> None:
        operator, system, self._account = Key("operator"), Key("account"), Key("account")
        jwts = {
            system.public: operator.mint(system, "SYS", {"limits": UNLIMITED | NO_STORAGE}),
            self._account.public: operator.mint(self._account, "RL", {"limits": UNLIMITED | STORAGE}),
        }
        preload = "".join(f"  {account}: {jwt}\n" for account, jwt in jwts.items())
        self.config = (
            f"operator: {operator.mint(operator, 'O', {'system_account': system.public})}\n"
            f"system_account: {system.public}\nresolver: MEMORY\nresolver_preload {{\n{preload}}}\n"
        )

    def credentials(self, name: str, expires_s: float | None = None) -> str:
        """The text of a new user's credentials file."""
        user = Key("user")
        jwt = self._account.mint(user, name, {"subs": -1, "data": -1, "payload": -1}, expires_s)
        return (
            f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
            "************************* IMPORTANT *************************\n"
            "NKEY Seed printed below can be used to sign and prove identity.\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
        )


def _encoded(data: bytes) -> str:
    return base64.b32encode(data + binascii.crc_hqx(data, 0).to_bytes(2, "little")).decode().rstrip("=")


def _url64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
