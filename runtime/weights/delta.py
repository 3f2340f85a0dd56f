"""A version of the weights as what changed since another one, and the making of a whole copy from it.

A directory with a delta holds `delta.json` and files of payloads, one of each rank that wrote. `delta.json` names the
base and the target, version and checksum each (`runtime/checksums.py`), and for every tensor the checksums of both and
how it goes: unchanged, as its changes (`changes.py`), or whole. A payload has a CRC beside it and `delta.json` a hash
of itself, so that a flipped byte anywhere is found, and found to be the delta's; what then differs is the base.

A copy is applied to by making a new one beside it, under a name that is hidden until all is there, proven and on the
disk. A death in between leaves the old copy as it was, and an engine that reads it is not disturbed: that is why
nothing is overwritten in place, which would write 2 % of the bytes instead of all. Tensors are read, changed, hashed
and written one at a time.
"""

import hashlib
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np

from runtime.checksums import combined, tensor_checksum
from runtime.files import complete_directory, write_atomically
from runtime.weights.changes import apply
from runtime.weights.stored import ITEM_BYTES, StoredFile, StoredTensor, read_files

INDEX: Final = "delta.json"
_PAYLOADS: Final = "delta-"  # how their files' names begin
HELD: Final = "version.json"  # in a copy: which version it is
NOTE: Final = "published.json"  # where a version is published: what lies there
FORMAT: Final = 1
Form = Literal["unchanged", "changes", "whole"]


class DeltaError(ValueError):
    """A delta cannot be applied: it is damaged, or not of this base. The message names file and tensor."""


class Version(NamedTuple):
    """A set of weights."""

    number: int
    checksum: str  # of all its tensors


class TensorDelta(msgspec.Struct, frozen=True, kw_only=True):
    """How a tensor goes."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    base: str  # checksum before
    target: str  # and after
    form: Form
    file: str = ""  # with the payload; none: unchanged
    begin: int = 0  # of the payload in its file
    size_bytes: int = 0  # of the payload
    crc32: int = 0  # of the payload
    count: int = 0  # of changes


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What `delta.json` says."""

    format: int = FORMAT
    base: Version
    target: Version
    tensors: tuple[TensorDelta, ...]


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: str  # of the bytes of `delta`
    delta: msgspec.Raw


def payload_file(number: int, total: int) -> str:
    """How the file of payloads of one of several ranks is called; the first is 1."""
    return f"{_PAYLOADS}{number:05d}-of-{total:05d}.bin"


def write_index(directory: Path, base: Version, number: int, tensors: Iterable[TensorDelta]) -> Delta:
    """Write `delta.json`, once all payloads are written.

    Args:
        directory: with the payloads.
        base: what they were made against.
        number: of the version that they lead to.
        tensors: every tensor of the model.

    Raises:
        DeltaError: the tensors' checksums before are not those of the base; names no tensor, since it knows the whole
            alone.
    """
    ordered = tuple(sorted(tensors, key=lambda tensor: tensor.name))
    target = Version(number, _total(ordered, "target"))
    delta = Delta(base=base, target=target, tensors=ordered)
    if _total(ordered, "base") != base.checksum:
        raise DeltaError(f"{directory}: made against other weights than version {base.number}, {base.checksum}")
    raw = msgspec.json.encode(delta)
    sealed = _Sealed(hashlib.sha256(raw).hexdigest(), msgspec.Raw(raw))
    write_atomically(directory / INDEX, msgspec.json.encode(sealed))
    return delta


def read_index(directory: Path) -> Delta:
    """What the delta of a directory is of.

    Raises:
        FileNotFoundError: there is none.
        DeltaError: `delta.json` is damaged, or of another format.
    """
    path = directory / INDEX
    content = path.read_bytes()
    try:
        sealed = msgspec.json.decode(content, type=_Sealed)
        if sealed.sha256 != hashlib.sha256(sealed.delta).hexdigest() or content != msgspec.json.encode(sealed):
            raise DeltaError(f"{path}: damaged, its hash is another")
        delta = msgspec.json.decode(sealed.delta, type=Delta)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DeltaError(f"{path}: damaged: {error}") from error
    if delta.format != FORMAT:
        raise DeltaError(f"{path}: format {delta.format}, read is {FORMAT}")
    return delta


def apply_deltas(copy: Path, deltas: Sequence[Path], target: Path) -> Version:
    """Make a whole copy of the weights from an older one and the deltas since; a death leaves the older one usable.

    Args:
        copy: a directory with the base's safetensors files; what else lies there is copied.
        deltas: directories, each a delta against the one before, at least one.
        target: where the new copy goes; must not exist. Hidden beside it is what is not complete yet.

    Returns:
        What the new copy holds; `held_in` reads it again.

    Raises:
        DeltaError: a delta is damaged, is not of what comes before it, or the copy is not its base; says which tensor.
        FileNotFoundError: a file is missing.
        FileExistsError: the target exists.
    """
    if target.exists():
        raise FileExistsError(f"{target}: exists already")
    chain = _chain(deltas)
    files = read_files(copy)
    _check_names(copy, files, chain)
    partial = target.with_name(f".{target.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in files:
        _write_file(file, partial / file.path.name, chain)
    _copy_others(copy, partial, {file.path.name for file in files})
    version = chain[-1].delta.target
    write_held(partial, version)
    complete_directory(partial, target)
    return version


def write_held(directory: Path, version: Version) -> None:
    """Note in a copy which version it is."""
    write_atomically(directory / HELD, msgspec.json.encode(version))


def held_in(directory: Path) -> Version | None:
    """Which version a copy says it is; none: it is not there, or nobody noted it."""
    try:
        return msgspec.json.decode((directory / HELD).read_bytes(), type=Version)
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


class _Link(NamedTuple):
    """A delta of a chain."""

    directory: Path
    delta: Delta
    tensors: Mapping[str, TensorDelta]


def _chain(directories: Sequence[Path]) -> list[_Link]:
    chain: list[_Link] = []
    for directory in directories:
        delta = read_index(directory)
        if chain and delta.base != chain[-1].delta.target:
            before = chain[-1].delta.target
            raise DeltaError(f"{directory}: a delta against {_said(delta.base)}, not against {_said(before)}")
        chain.append(_Link(directory, delta, {tensor.name: tensor for tensor in delta.tensors}))
    if not chain:
        raise DeltaError("no delta to apply")
    return chain


def _said(version: Version) -> str:
    return f"version {version.number} ({version.checksum})"


def _check_names(copy: Path, files: Iterable[StoredFile], chain: Iterable[_Link]) -> None:
    names = {tensor.name for file in files for tensor in file.tensors}
    for link in chain:
        if differing := sorted(names ^ link.tensors.keys()):
            only = "copy" if differing[0] in names else "delta"
            raise DeltaError(
                f"{link.directory}: has other tensors than {copy}: {differing[0]} is in the {only} alone, "
                f"one of {len(differing)}"
            )


def _write_file(file: StoredFile, path: Path, chain: Sequence[_Link]) -> None:
    """What a file says of its tensors does not change."""
    with path.open("wb") as written:
        with file.path.open("rb") as old:
            written.write(old.read(file.start))
        for tensor in file.tensors:
            written.write(_changed(tensor, chain))


def _changed(tensor: StoredTensor, chain: Sequence[_Link]) -> memoryview:
    """A tensor after all deltas. Looked at is the last checksum; the others where that one is wrong, to say why."""
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
            f"{tensor.file}: {tensor.name} is {tensor.dtype} {list(tensor.shape)}, in {link.directory} it is "
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
        raise DeltaError(f"{link.directory / own.file}: the changes of {own.name}: {error}") from error


def _payload(own: TensorDelta, link: _Link) -> memoryview:
    path = link.directory / own.file
    if own.begin + own.size_bytes > path.stat().st_size:
        raise DeltaError(f"{path}: cut off before the end of {own.name}")
    payload = np.memmap(path, dtype=np.uint8, mode="r", offset=own.begin, shape=(own.size_bytes,)).data
    if zlib.crc32(payload) != own.crc32:
        raise DeltaError(f"{path}: damaged: {own.name} has another CRC than {INDEX} says")
    return payload


def _why(tensor: StoredTensor, chain: Sequence[_Link]) -> str:
    """Payloads are as they were written, so the copy is not what the first delta was made against, or a delta lies."""
    data = tensor.data()
    for link in chain:
        expected, found = link.tensors[tensor.name].base, _checksum(tensor, data)
        if found != expected:
            where = tensor.file if link is chain[0] else link.directory
            return (
                f"{where}: {tensor.name} is not that of {_said(link.delta.base)}: its checksum is {found}, the delta's "
                f"base has {expected}"
            )
        data = _after(tensor, data, link)
    last = chain[-1]
    return f"{last.directory}: {tensor.name} becomes other than {_said(last.delta.target)}, from the right base"


def _checksum(tensor: StoredTensor, data: memoryview) -> str:
    return tensor_checksum(tensor.name, tensor.dtype, tensor.shape, data)


def _copy_others(copy: Path, partial: Path, names: set[str]) -> None:
    for file in copy.iterdir():
        if file.is_file() and file.name not in {*names, HELD, INDEX, NOTE} and not file.name.startswith(_PAYLOADS):
            shutil.copyfile(file, partial / file.name)


def _total(tensors: Iterable[TensorDelta], which: Literal["base", "target"]) -> str:
    return combined({tensor.name: getattr(tensor, which) for tensor in tensors}).total
