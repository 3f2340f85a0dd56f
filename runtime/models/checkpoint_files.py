"""What the trainer and node daemons both know of a checkpoint's files: where they lie, and their checksums."""

import hashlib
from pathlib import Path
from typing import Final

import msgspec

CHECKPOINTS: Final = "checkpoints"  # in the run directory
CHECKSUMS_FILE: Final = "checksums.json"  # in a checkpoint


class FileChecksum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and sha256 of a file when it was written."""

    size_bytes: int
    sha256: str


class Checksums(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `checksums.json`: a checkpoint's files, by name relative to its directory."""

    files: dict[str, FileChecksum]


def checksum_of(file: Path) -> FileChecksum:
    """Compute the size and sha256 of a file."""
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256")
        return FileChecksum(opened.tell(), digest.hexdigest())
