"""A node's copies of checkpoint files that ranks of other nodes wrote (`train.checkpoint_copies`).

What the ranks of one node wrote is a part, with a manifest of its own. The daemon sums it up and serves it; other
daemons fetch it. The trainer's first rank leads: a checkpoint gets its name once each part lies on enough nodes.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread
import msgspec
import structlog

from messages import CheckpointCopiesGiven, CheckpointCopiesRequested, CheckpointRecord, HeldCheckpoint
from messages.plain import clipped
from runtime.models.checkpoint_files import CHECKPOINTS, CHECKSUMS_FILE, Checksums, FileChecksum, checksum_of
from runtime.models.manifest import (
    MANIFEST,
    FetchFailed,
    Manifest,
    files_of,
    manifest_in,
    manifest_of,
    verified_pieces,
)
from runtime.util.files import PRIVATE_DIRECTORY, complete_directory, hidden_name, path_inside, write_atomically

if TYPE_CHECKING:
    from runtime.http.room import Offered
    from runtime.node.sharing import Sharing

log = structlog.get_logger()

RECORD: Final = "copies.json"  # in a checkpoint: its record
PART: Final = "part-{}.json"  # in a checkpoint: manifest of a part that this node has, by its digest
PARTS: Final = "parts"  # in the directory of what a node has fetched
REASON_CHARS: Final = 500


class CheckpointCopies:
    """Answers the trainer's calls about checkpoint files on this node, one at a time.

    Args:
        run_dir: of the run, on this machine.
        node: this node.
        sharing: returns what this node shares. Raises FetchFailed: its room is not open yet.
    """

    def __init__(self, run_dir: Path, node: str, sharing: "Callable[[], Sharing]") -> None:
        self._root = run_dir / CHECKPOINTS
        self._node = node
        self._sharing = sharing
        self._working = anyio.Lock()

    async def answer(self, request: CheckpointCopiesRequested) -> CheckpointCopiesGiven:
        """Do what is requested; a failure is an answer with its reason. Each request may be repeated."""
        async with self._working:
            try:
                return await anyio.to_thread.run_sync(partial(self._done, request), abandon_on_cancel=True)
            except (FetchFailed, OSError, ValueError) as error:
                log.warning(
                    "checkpoint_copies_failed", act=request.act, checkpoint=request.record.name, error=str(error)
                )
                return CheckpointCopiesGiven(reason=clipped(f"node {self._node}: {error}", REASON_CHARS))

    def _done(self, request: CheckpointCopiesRequested) -> CheckpointCopiesGiven:
        record = request.record
        match request.act:
            case "list":
                return CheckpointCopiesGiven(held=tuple(held_in(self._root)))
            case "sum_up":
                return CheckpointCopiesGiven(digest=self._sum_up(record))
            case "hold":
                for node in request.nodes:
                    self._hold(record, node, thorough=request.thorough)
            case "name":
                self._name(record)
            case "forget":
                self._forget(request.keeps)
        return CheckpointCopiesGiven()

    def _sum_up(self, record: CheckpointRecord) -> str:
        """Compare this node's files with what its ranks wrote, and serve them. Return the digest of their manifest."""
        place = self._place_of(record)
        paths = {name: path_inside(place, name) for name, each in record.files.items() if each.node == self._node}
        for name, path in paths.items():
            found, written = checksum_of(path), record.files[name]
            if (found.size_bytes, found.sha256) != (written.size_bytes, written.sha256):
                wrote = f"its rank wrote {written.size_bytes} bytes with {written.sha256}"
                raise ValueError(f"{path} has {found.size_bytes} bytes with the sha256 {found.sha256}, and {wrote}")
        content, digest = manifest_of(
            Manifest(title=f"checkpoint {record.name} of {self._node}", files=files_of(paths))
        )
        write_atomically(place / PART.format(digest), content)
        self._sharing().offer(_offers(place))
        return digest

    def _hold(self, record: CheckpointRecord, node: str, *, thorough: bool) -> None:
        """Have the part of a node; fetch it if it is not here as it was written."""
        place, digest = self._place_of(record), record.parts[node]
        if (manifest := _part_in(place, digest)) is not None and not _lacks(place, manifest, thorough=thorough):
            self._sharing().offer(_offers(place))
            return
        fetched = self._sharing().fetch_files(digest, f"{PARTS}/{digest[:16]}")
        manifest = manifest_in((fetched / MANIFEST).read_bytes(), digest)
        for name, target in ((MANIFEST, PART.format(digest)), *((file.name, file.name) for file in manifest.files)):
            _link(fetched / name, path_inside(place, target))
        self._sharing().offer(_offers(place))
        shutil.rmtree(fetched)
        if place == self._final(record):
            _write_sums(place, record)

    def _name(self, record: CheckpointRecord) -> None:
        """Give the checkpoint its name on this node."""
        place, final = self._place_of(record), self._final(record)
        write_atomically(place / RECORD, msgspec.json.encode(record))
        _write_sums(place, record)
        if place != final:
            complete_directory(place, final)
        self._sharing().offer(_offers(final))

    def _forget(self, keeps: tuple[str, ...] | None) -> None:
        """Delete what a crash left, and checkpoints but those of these names; None keeps all."""
        left = [*self._root.glob("[0-9]*/.step-*")]
        if keeps is not None:
            kept = {self._root / name for name in keeps}
            left += [path.parent for path in self._root.glob(f"[0-9]*/step-*/{RECORD}") if path.parent not in kept]
        for path in left:
            self._sharing().withdraw(_offers(path))
            shutil.rmtree(path, ignore_errors=True)

    def _final(self, record: CheckpointRecord) -> Path:
        return path_inside(self._root, record.name)

    def _place_of(self, record: CheckpointRecord) -> Path:
        """Return where the files of a checkpoint lie: under its name, or else hidden."""
        self._root.mkdir(PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        final = self._final(record)
        place = final if final.is_dir() else hidden_name(final)
        place.mkdir(PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        return place


def held_in(root: Path) -> Iterator[HeldCheckpoint]:
    """Yield the checkpoints that have their names on this node, with the nodes whose parts are here."""
    for path in sorted(root.glob(f"[0-9]*/step-*/{RECORD}")):
        try:
            record = msgspec.json.decode(path.read_bytes(), type=CheckpointRecord)
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("checkpoint_unreadable", path=str(path), error=str(error))
            continue
        there = (node for node, digest in record.parts.items() if _part_in(path.parent, digest) is not None)
        yield HeldCheckpoint(record=record, nodes=tuple(there))


def offers_of_checkpoints(run_dir: Path) -> "Mapping[str, Offered]":
    """Return what a node's room offers of the checkpoints that have their names here."""
    places = (run_dir / CHECKPOINTS).glob(f"[0-9]*/step-*/{RECORD}")
    return {digest: offered for place in places for digest, offered in _offers(place.parent).items()}


def _offers(place: Path) -> "dict[str, Offered]":
    from runtime.http.fetching import offers_of  # with aiohttp, which nodes that share no files need not load

    found: dict[str, Offered] = {}
    for note in place.glob(PART.format("*")):
        digest = note.name.removeprefix("part-").removesuffix(".json")
        if (manifest := _part_in(place, digest)) is not None:
            found |= offers_of(place, digest, manifest, note.name)
    return found


def _part_in(place: Path, digest: str) -> Manifest | None:
    try:
        return manifest_in((place / PART.format(digest)).read_bytes(), digest)
    except (OSError, ValueError):
        return None


def _lacks(place: Path, manifest: Manifest, *, thorough: bool) -> bool:
    """Whether a file is missing or of another size; with `thorough`, or differs from its sums."""
    for file in manifest.files:
        try:
            if (place / file.name).stat().st_size != file.size_bytes:
                return True
        except OSError:
            return True
    if not thorough:
        return False
    there = verified_pieces(place, manifest)
    return any(len(there[file.name]) != len(file.pieces) for file in manifest.files)


def _link(source: Path, target: Path) -> None:
    """Give a file another name, in place of a damaged file of that name."""
    target.parent.mkdir(PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.link")
    beside.unlink(missing_ok=True)
    os.link(source, beside)
    beside.replace(target)


def _write_sums(place: Path, record: CheckpointRecord) -> None:
    """Write the checksums of the files that are here, which the trainer compares before it reads them."""
    parts = (_part_in(place, digest) for digest in record.parts.values())
    names = sorted(file.name for part in parts if part is not None for file in part.files)
    files = {name: FileChecksum(record.files[name].size_bytes, record.files[name].sha256) for name in names}
    write_atomically(place / CHECKSUMS_FILE, msgspec.json.format(msgspec.json.encode(Checksums(files))))
