"""Deltas between weight versions, and their application to a full copy.

A delta directory contains `delta.json` and payload files, one from each rank that wrote. `delta.json` has version and
checksum (`checksums.py`) of base and target. For every tensor it has both checksums and its form: unchanged, changed
values (`tensor_delta.py`), or whole. Payloads have a CRC, and `delta.json` has its own hash. So any flipped byte of a
delta is found and attributed to the delta; any other difference is in the base.

Applying deltas makes a new copy under a hidden name, and renames it once it is complete, verified and on disk. A crash
leaves the old copy unchanged, and an engine that reads it is not disturbed. In-place updates would write only 2 % of
the bytes, but do not have these properties. Tensors are read, changed, hashed and written one at a time.
"""

import hashlib
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np

from runtime.models.checksums import combined, tensor_checksum
from runtime.models.safetensors import ITEM_BYTES, StoredFile, StoredTensor, read_files
from runtime.models.tensor_delta import apply
from runtime.util.files import atomic_directory, write_atomically

INDEX: Final = "delta.json"
_PAYLOADS: Final = "delta-"  # prefix of payload files
HELD: Final = "version.json"  # in a copy: its version
NOTE: Final = "published.json"  # in a published version: the files that it has
FORMAT: Final = 1
Form = Literal["unchanged", "changes", "whole"]


class DeltaError(ValueError):
    """A delta cannot be applied: it is damaged, or has another base. The message names file and tensor."""


class Version(NamedTuple):
    """Number and checksum that identify a weight version."""

    number: int
    checksum: str  # over all tensors


class TensorDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The delta of one tensor."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    base: str  # checksum in the base
    target: str  # checksum in the target
    form: Form
    file: str = ""  # payload file; empty: unchanged
    begin: int = 0  # offset of the payload in its file
    size_bytes: int = 0  # of the payload
    crc32: int = 0  # of the payload
    count: int = 0  # number of changes


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `delta.json`."""

    format: int = FORMAT
    base: Version
    target: Version
    tensors: tuple[TensorDelta, ...]


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: str  # of the bytes of `delta`
    delta: msgspec.Raw


def payload_file(number: int, total: int) -> str:
    """Return the name of the payload file of one of several ranks, counted from 1."""
    return f"{_PAYLOADS}{number:05d}-of-{total:05d}.bin"


def write_index(directory: Path, base: Version, number: int, tensors: Iterable[TensorDelta]) -> Delta:
    """Write `delta.json` after all payloads.

    Args:
        directory: contains the payloads.
        base: the version that they were computed against.
        number: number of the target version.
        tensors: every tensor of the model.

    Raises:
        DeltaError: the tensors' base checksums do not match the base. It names no tensor, since only the total is
            known.
    """
    ordered = tuple(sorted(tensors, key=lambda tensor: tensor.name))
    target = Version(number, _total(ordered, "target"))
    delta = Delta(base=base, target=target, tensors=ordered)
    if _total(ordered, "base") != base.checksum:
        raise DeltaError(f"{directory}: its base is not version {base.number} ({base.checksum})")
    raw = msgspec.json.encode(delta)
    sealed = _Sealed(hashlib.sha256(raw).hexdigest(), msgspec.Raw(raw))
    write_atomically(directory / INDEX, msgspec.json.encode(sealed))
    return delta


def read_index(directory: Path) -> Delta:
    """Read the `delta.json` of a directory.

    Raises:
        FileNotFoundError: there is none.
        DeltaError: `delta.json` is damaged, or has another format.
    """
    path = directory / INDEX
    content = path.read_bytes()
    try:
        sealed = msgspec.json.decode(content, type=_Sealed)
        if sealed.sha256 != hashlib.sha256(sealed.delta).hexdigest() or content != msgspec.json.encode(sealed):
            raise DeltaError(f"{path}: damaged: its hash does not match")
        delta = msgspec.json.decode(sealed.delta, type=Delta)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DeltaError(f"{path}: damaged: {error}") from error
    if delta.format != FORMAT:
        raise DeltaError(f"{path}: format {delta.format} is not supported; supported: {FORMAT}")
    return delta


def apply_deltas(copy: Path, deltas: Sequence[Path], target: Path) -> Version:
    """Make a full copy from an older copy and the deltas since. A crash leaves the older copy usable.

    Args:
        copy: a directory with the base's safetensors files; its other files are copied too.
        deltas: at least one directory, each with a delta against the previous one.
        target: directory of the new copy; must not exist. Until it is complete, a hidden directory next to it is used.

    Returns:
        The version of the new copy; `held_in` reads it again.

    Raises:
        DeltaError: a delta is damaged, does not follow the previous one, or the copy is not its base; names the tensor.
        FileNotFoundError: a file is missing.
        FileExistsError: the target exists.
    """
    if target.exists():
        raise FileExistsError(f"{target}: already exists")
    chain = _chain(deltas)
    files = read_files(copy)
    _check_names(copy, files, chain)
    version = chain[-1].delta.target
    with atomic_directory(target) as partial:
        for file in files:
            _write_file(file, partial / file.path.name, chain)
        _copy_others(copy, partial, {file.path.name for file in files})
        write_held(partial, version)
    return version


def write_held(directory: Path, version: Version) -> None:
    """Write the version of a copy into it."""
    write_atomically(directory / HELD, msgspec.json.encode(version))


def held_in(directory: Path) -> Version | None:
    """Return the version noted in a copy; None if there is no copy, or no readable note."""
    try:
        return msgspec.json.decode((directory / HELD).read_bytes(), type=Version)
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


class _Link(NamedTuple):
    """One delta of a chain, read from its directory."""

    directory: Path
    delta: Delta
    tensors: Mapping[str, TensorDelta]


def _chain(directories: Sequence[Path]) -> list[_Link]:
    chain: list[_Link] = []
    for directory in directories:
        delta = read_index(directory)
        if chain and delta.base != chain[-1].delta.target:
            before = chain[-1].delta.target
            raise DeltaError(
                f"{directory}: the base of this delta is {_name_of(delta.base)}, expected {_name_of(before)}"
            )
        chain.append(_Link(directory, delta, {tensor.name: tensor for tensor in delta.tensors}))
    if not chain:
        raise DeltaError("no delta to apply")
    return chain


def _name_of(version: Version) -> str:
    return f"version {version.number} ({version.checksum})"


def _check_names(copy: Path, files: Iterable[StoredFile], chain: Iterable[_Link]) -> None:
    names = {tensor.name for file in files for tensor in file.tensors}
    for link in chain:
        if differing := sorted(names ^ link.tensors.keys()):
            only = "copy" if differing[0] in names else "delta"
            raise DeltaError(
                f"{link.directory}: its tensors are not those of {copy}: {len(differing)} differ, such as "
                f"{differing[0]}, which only the {only} has"
            )


def _write_file(file: StoredFile, path: Path, chain: Sequence[_Link]) -> None:
    """Write a file with its tensors changed. Its header stays the same."""
    with path.open("wb") as written:
        with file.path.open("rb") as old:
            written.write(old.read(file.start))
        for tensor in file.tensors:
            written.write(_changed(tensor, chain))


def _changed(tensor: StoredTensor, chain: Sequence[_Link]) -> memoryview:
    """Apply all deltas to a tensor and check the last checksum. If it is wrong, `_why` checks the earlier ones."""
    data = tensor.data()
    for link in chain:
        data = _after(tensor, data, link)
    if _checksum(tensor, data) != chain[-1].tensors[tensor.name].target:
        raise DeltaError(_why(tensor, chain))
    return data


def _after(tensor: StoredTensor, data: memoryview, link: _Link) -> memoryview:
    own = link.tensors[tensor.name]
    if (own.dtype, own.shape) != (tensor.dtype, tensor.shape):
        raise DeltaError(
            f"{tensor.file}: {tensor.name} is {tensor.dtype} {list(tensor.shape)}; {link.directory} has "
            f"{own.dtype} {list(own.shape)}"
        )
    if own.form == "unchanged":
        return data
    payload = _payload(own, link)
    if own.form == "whole":
        return payload
    try:
        return apply(payload, own.count, data, ITEM_BYTES[tensor.dtype])
    except ValueError as error:
        raise DeltaError(f"{link.directory / own.file}: the delta of {own.name}: {error}") from error


def _payload(own: TensorDelta, link: _Link) -> memoryview:
    path = link.directory / own.file
    if own.begin + own.size_bytes > path.stat().st_size:
        raise DeltaError(f"{path}: the file ends before {own.name} does")
    payload = np.memmap(path, dtype=np.uint8, mode="r", offset=own.begin, shape=(own.size_bytes,)).data
    if zlib.crc32(payload) != own.crc32:
        raise DeltaError(f"{path}: damaged: the CRC of {own.name} does not match {INDEX}")
    return payload


def _why(tensor: StoredTensor, chain: Sequence[_Link]) -> str:
    """Find why a tensor has a wrong checksum. Payloads are intact, so the copy is not the base, or a delta is wrong."""
    data = tensor.data()
    for link in chain:
        expected, found = link.tensors[tensor.name].base, _checksum(tensor, data)
        if found != expected:
            where = tensor.file if link is chain[0] else link.directory
            return (
                f"{where}: {tensor.name} is not that of {_name_of(link.delta.base)}: its checksum is {found}, "
                f"expected {expected}"
            )
        data = _after(tensor, data, link)
    directory, target = chain[-1].directory, _name_of(chain[-1].delta.target)
    return f"{directory}: from the right base, this delta does not give {tensor.name} of {target}"


def _checksum(tensor: StoredTensor, data: memoryview) -> str:
    return tensor_checksum(tensor.name, tensor.dtype, tensor.shape, data)


def _copy_others(copy: Path, partial: Path, names: set[str]) -> None:
    for file in copy.iterdir():
        if file.is_file() and file.name not in {*names, HELD, INDEX, NOTE} and not file.name.startswith(_PAYLOADS):
            shutil.copyfile(file, partial / file.name)


def _total(tensors: Iterable[TensorDelta], which: Literal["base", "target"]) -> str:
    return combined({tensor.name: getattr(tensor, which) for tensor in tensors}).total
