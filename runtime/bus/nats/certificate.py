"""The certificate of a run's own server: self-signed, with a fixed name, and pinned by its clients."""

import datetime
import ssl
from pathlib import Path
from typing import Final

import msgspec

from runtime.util.files import write_atomically
from runtime.util.secrets import make_private, read_private

NAME: Final = "bus.physarum"  # in every certificate, whatever address, DNS name or tunnel leads to the server
VALID: Final = datetime.timedelta(days=3650)
CLOCKS_DIFFER: Final = datetime.timedelta(days=365)  # a client's clock may be behind: valid for that long already
CERTIFICATE_FILE: Final = "certificate.pem"
KEY_FILE: Final = "key.pem"


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """A certificate and its private key, in files."""

    certificate: Path
    key: Path

    def pem(self) -> str:
        """The certificate, which is not secret."""
        return self.certificate.read_text()


def own_certificate(directory: Path) -> Certificate:
    """Return the certificate in a directory; make it if there is none. Later starts use the same one.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: other users may read the key.
    """
    found = Certificate(certificate=directory / CERTIFICATE_FILE, key=directory / KEY_FILE)
    if found.certificate.exists():  # written last
        read_private(found.key)
        return found
    make_private(directory)
    certificate, key = _self_signed()
    write_atomically(found.key, key)
    write_atomically(found.certificate, certificate)
    return found


def client_context(certificate: str) -> ssl.SSLContext:
    """Return a TLS context that trusts this certificate alone, under its fixed name.

    Raises:
        ssl.SSLError: the text is not a certificate.
    """
    return ssl.create_default_context(cadata=certificate)


def _self_signed() -> tuple[bytes, bytes]:
    """Make a certificate and its key, both as PEM."""
    from cryptography import x509  # imported late: only the node with the bus needs it
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_DIFFER)
        .not_valid_after(now + VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return certificate.public_bytes(Encoding.PEM), pem
