"""The manifest of a published weight version, or of other files of a run: with the sha256 of each of their pieces.

Nodes that do not see the files fetch them by their manifest. The digest of the manifest is announced, and its sums
cover every byte. So each piece is verified on its own, whichever node it comes from.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from runtime.models.delta import Version
from runtime.util.files import write_atomically

MANIFEST: Final = "manifest.json"  # in a published version
PIECE_BYTES: Final = 8 << 20
MAX_MANIFEST_BYTES: Final = 64 << 20
_THREADS: Final = 4  # pieces hashed at a time
MAX_DEPTH: Final = 4  # of a name: folders, and the file
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_PART: Final = re.compile(r"(?!\.\.?$)[^/\x00-\x1f\x7f]{1,200}")  # of a name that may lie in a folder
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class FetchFailed(Exception):
    """A version cannot be fetched. The message names each node with its reason.

    Args:
        unusable: what home sent differs from what was announced.
    """

    def __init__(self, reason: str, *, unusable: bool = False) -> None:
        super().__init__(reason)
        self.unusable = unusable


class ManifestFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file."""

    name: str  # in the directory; of a version without a folder
    size_bytes: int
    pieces: tuple[str, ...]  # sha256 of each, in hexadecimal digits

    @property
    def digest(self) -> str:
        """The sha256 of the file's name and of the sums of its pieces."""
        return hashlib.sha256("\n".join((self.name, *self.pieces)).encode()).hexdigest()


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `manifest.json`."""

    version: Version | None = None  # None: other files of the run
    title: str = ""  # of other files: the setting that names them
    base: str = ""  # for a delta: digest of the manifest of the version that it applies to
    base_version: Version | None = None  # for a delta
    piece_bytes: int = PIECE_BYTES
    files: tuple[ManifestFile, ...]

    def __post_init__(self) -> None:
        names = [file.name for file in self.files]
        allowed = _is_path if self.version is None else _NAME.fullmatch
        if len({*names}) != len(names) or MANIFEST in names or not all(map(allowed, names)):
            raise ValueError(f"the manifest of {self.shown} has files of wrong names: {names}")
        if self.piece_bytes < 1 or (self.base and not _SHA256.fullmatch(self.base)):
            raise ValueError(f"the manifest of {self.shown} is not one")
        for file in self.files:
            if len(file.pieces) != -(-file.size_bytes // self.piece_bytes) or not all(
                map(_SHA256.fullmatch, file.pieces)
            ):
                raise ValueError(f"{file.name}: {file.size_bytes} bytes do not have {len(file.pieces)} pieces")

    @property
    def shown(self) -> str:
        """How messages name what the files are."""
        return self.title if self.version is None else f"version {self.version.number}"

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(file.size_bytes for file in self.files)

    def size_of(self, file: ManifestFile, piece: int) -> int:
        """Return the size of a piece in bytes."""
        return min(self.piece_bytes, file.size_bytes - piece * self.piece_bytes)


def write_manifest(
    directory: Path, version: Version, *, base: tuple[str, Version] | None = None, piece_bytes: int = PIECE_BYTES
) -> str:
    """Write the manifest of the files in a directory; return its digest.

    Args:
        directory: of a version that is complete but for this file.
        version: its version.
        base: for a delta: digest of the manifest of its base, and its version.
        piece_bytes: size of a piece.

    Raises:
        OSError: a file cannot be read, or the manifest not be written.
    """
    files = files_of({file.name: file for file in directory.iterdir() if file.name != MANIFEST}, piece_bytes)
    begins, base_version = base or ("", None)
    content, digest = manifest_of(
        Manifest(version=version, base=begins, base_version=base_version, piece_bytes=piece_bytes, files=files)
    )
    write_atomically(directory / MANIFEST, content)
    return digest


def manifest_of(manifest: Manifest) -> tuple[bytes, str]:
    """Return the content of a manifest, and its digest."""
    content = msgspec.json.encode(manifest)
    return content, hashlib.sha256(content).hexdigest()


def files_of(paths: Mapping[str, Path], piece_bytes: int = PIECE_BYTES) -> tuple[ManifestFile, ...]:
    """Return files with the sums of their pieces, in the order of their names.

    Args:
        paths: each by the name that it gets.
        piece_bytes: size of a piece.

    Raises:
        OSError: a file cannot be read.
    """
    found = [(name, paths[name], paths[name].stat().st_size) for name in sorted(paths)]
    todo = [(path, at) for _, path, size in found for at in range(0, size, piece_bytes)]
    with ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="manifest") as executor:
        sums = executor.map(_sum_at, [path for path, _ in todo], [at for _, at in todo], [piece_bytes] * len(todo))
    return tuple(
        ManifestFile(name=name, size_bytes=size, pieces=tuple(next(sums) for _ in range(0, size, piece_bytes)))
        for name, _, size in found
    )


def manifest_in(content: bytes, digest: str) -> Manifest:
    """Decode a manifest, after comparing it with its digest.

    Raises:
        ValueError: it is not the manifest of this digest.
    """
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise ValueError(f"its sha256 is {found}, expected {digest}")
    return msgspec.json.decode(content, type=Manifest)


def read_manifest(directory: Path) -> tuple[str, Manifest]:
    """Return the digest and the manifest of a version in a directory.

    Raises:
        OSError: there is none.
        ValueError: it cannot be read.
    """
    content = (directory / MANIFEST).read_bytes()
    return hashlib.sha256(content).hexdigest(), msgspec.json.decode(content, type=Manifest)


def verified_pieces(directory: Path, manifest: Manifest) -> Mapping[str, set[int]]:
    """Return the indices of the pieces that a directory has as they were announced, by the name of their file."""
    todo = [(file, piece) for file in manifest.files for piece in range(len(file.pieces))]

    def is_there(each: tuple[ManifestFile, int]) -> bool:
        file, piece = each
        try:
            return (
                _sum_at(directory / file.name, piece * manifest.piece_bytes, manifest.piece_bytes) == file.pieces[piece]
            )
        except OSError:
            return False

    with ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="manifest") as executor:
        there = list(executor.map(is_there, todo))
    found = {file.name: set[int]() for file in manifest.files}
    for (file, piece), is_right in zip(todo, there, strict=True):
        if is_right:
            found[file.name].add(piece)
    return found


def _is_path(name: str) -> bool:
    parts = name.split("/")
    return len(parts) <= MAX_DEPTH and all(map(_PART.fullmatch, parts))


def _sum_at(file: Path, begin: int, size: int) -> str:
    opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return hashlib.sha256(os.pread(opened, size, begin)).hexdigest()
    finally:
        os.close(opened)
