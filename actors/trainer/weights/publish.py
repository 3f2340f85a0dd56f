"""Weight versions on disk for engines: `v000007`, either complete or absent.

A version holds full weights (`model.safetensors` and config.json) or a delta to the previous version (`delta.json` and
payloads, `runtime/models/delta.py`). The trainer writes full files of every version. If the version is a delta, its
full files are for the trainer alone, in `base`: the next version is compared with them. A trainer that starts has no
such base, so its first version is full.
"""

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

import structlog

from actors.trainer.models.files import copy_small_files, set_format
from messages import BaseWeights, EngineSums, FileSum, WeightProbe
from runtime.models.checksums import combined
from runtime.models.delta import DeltaError, TensorDelta, Version, write_index
from runtime.models.file_sums import sum_of
from runtime.models.manifest import write_manifest
from runtime.models.safetensors import INDEX_FILE, safetensors_files
from runtime.models.versions import OnDisk, goes_whole, name_of, needed_for, on_disk, versions_in, write_note
from runtime.settings.tables.engines import WeightFormat
from runtime.util.files import begin_directory, complete_directory, hidden_name

log = structlog.get_logger()

BASE: Final = "base"  # next to the versions: the trainer's own full files
KEEP_VERSIONS: Final = 2


@dataclass(frozen=True)
class Published:
    """A weight version on disk."""

    path: Path | None  # None: not written
    checksum: str
    size_bytes: int  # of the full safetensors files
    took_s: float  # seconds to gather, write and probe it
    probe: WeightProbe | None = None
    base_version: int = 0  # version that the delta applies to; 0: the version is full
    delta_bytes: int = 0  # of the delta
    files: Mapping[str, FileSum] = field(default_factory=dict[str, FileSum])  # files that an engine reads, by name
    sums: EngineSums | None = None  # of the tensors that an engine holds then; None: `no_sums` says why
    no_sums: str = ""
    manifest: str = ""  # digest by which nodes fetch the version; "": they read its directory
    base: BaseWeights | None = None  # of an adapter: the weights that it belongs to; None: these are full weights

    @property
    def as_base(self) -> BaseWeights:
        """Describe these full weights as the base of adapters."""
        return BaseWeights(
            path=str(self.path),
            checksum=self.checksum,
            size_bytes=self.size_bytes,
            files=dict(self.files),
            engine_sums=self.sums,
            no_sums=self.no_sums,
            manifest=self.manifest,
        )


NOT_WRITTEN: Final = Published(path=None, checksum="", size_bytes=0, took_s=0.0)


class Written(NamedTuple):
    """Checksums and delta forms of a version's tensors, from all ranks that wrote."""

    checksums: Mapping[str, str]  # by tensor
    tensors: Sequence[TensorDelta] = ()  # delta form of each; empty: no delta was requested, or it failed
    no_delta: str = ""  # why the delta failed
    files: Mapping[str, FileSum] = MappingProxyType({})  # by name; empty: file sums are not compared
    sums: EngineSums | None = None  # of the tensors that an engine holds then; None: `no_sums` says why
    no_sums: str = ""

    @property
    def checksum(self) -> str:
        """Checksum of all tensors."""
        return combined(self.checksums).total


@dataclass(frozen=True)
class PendingVersion:
    """A version that is being written, and its directories."""

    number: int
    whole: Path  # hidden directory of the full files
    delta: Path | None = None  # hidden directory of the delta; None: the version is full
    base: Path | None = None  # full files of the previous version
    before: Version | None = None  # previous version


class Versions:
    """Weight versions that a trainer writes to disk, managed by its first rank."""

    def __init__(
        self,
        root: Path,
        model_directory: Path,
        *,
        every: int = 1,
        weight_format: WeightFormat = "as_trained",
        shapes: Mapping[str, Sequence[int]] = MappingProxyType({}),
        ignored: Collection[str] = (),
        is_fetched: bool = False,
    ) -> None:
        """Start without a version of this process.

        Args:
            root: directory of versions.
            model_directory: directory to copy config.json from.
            every: interval between full versions, counted in versions; those in between are deltas.
            weight_format: dtype or quantization of the files; config.json records it.
            shapes: shapes of all tensors by name.
            ignored: keys to leave out of config.json.
            is_fetched: write a manifest into each version, by which nodes fetch it.
        """
        self._root = root
        self._model_directory = model_directory
        self._every = every
        self._weight_format: WeightFormat = weight_format
        self._shapes = shapes
        self._ignored = ignored
        self._is_fetched = is_fetched
        self._manifest: tuple[str, Version] | None = None  # digest of that of the newest version
        self._newest: tuple[Version, Path] | None = None  # with its full files; None: this process has completed none

    def begin(self, number: int, *, whole: bool = False) -> PendingVersion:
        """Create the directories of a version. Deletes what a crash before its announcement left under its name.

        Args:
            number: a number that was never announced.
            whole: write full weights, not a delta.
        """
        path = self._root / name_of(number)
        delta = self._root / f"delta-{path.name}"
        for leftover in (hidden_name(delta), path):
            shutil.rmtree(leftover, ignore_errors=True)
        hidden = begin_directory(path)
        if whole or self._newest is None or goes_whole(self._newest[0], on_disk(self._root), every=self._every):
            return PendingVersion(number, hidden)
        before, base = self._newest
        return PendingVersion(number, hidden, begin_directory(delta), base, before)

    def complete(self, pending: PendingVersion, written: Written) -> Published:
        """Rename a fully written version to its final name."""
        copy_small_files(self._model_directory, pending.whole, tokenizer=False, ignored=self._ignored)
        set_format(pending.whole / "config.json", self._weight_format, self._shapes)
        size_bytes = sum(file.stat().st_size for file in safetensors_files(pending.whole))
        files = _with_small_files(pending.whole, written.files)
        version = Version(pending.number, written.checksum)
        path = self._root / name_of(pending.number)
        changes = self._with_index(pending, written)
        if changes is None or pending.before is None:
            write_note(pending.whole, OnDisk(version, whole_bytes=size_bytes))
            manifest = self._write_manifest(pending.whole, version)
            complete_directory(pending.whole, path)
            own = path
        else:
            own = self._root / BASE / path.name
            own.parent.mkdir(exist_ok=True)
            shutil.rmtree(own, ignore_errors=True)
            pending.whole.replace(own)
            write_note(changes, OnDisk(version, base=pending.before, delta_bytes=_size_of(changes)))
            manifest = self._write_manifest(changes, version, base=self._manifest)
            complete_directory(changes, path)
        self._newest = version, own
        self._manifest = (manifest, version) if manifest else None
        self._forget_bases()
        base_version = 0 if own == path or pending.before is None else pending.before.number
        delta_bytes = _size_of(path) if base_version else 0
        return Published(
            path.resolve(),
            version.checksum,
            size_bytes,
            0.0,
            base_version=base_version,
            delta_bytes=delta_bytes,
            files=files,
            sums=written.sums,
            no_sums=written.no_sums,
            manifest=manifest,
        )

    def _write_manifest(self, directory: Path, version: Version, base: tuple[str, Version] | None = None) -> str:
        return write_manifest(directory, version, base=base) if self._is_fetched else ""

    def prune(self, *, confirmed: int) -> None:
        """Delete versions that no engine needs.

        The newest versions stay, and those not older than `confirmed`. All files stay that an engine without weights
        needs to load one of them.

        Args:
            confirmed: newest version that an engine holds; 0: none.
        """
        versions = versions_in(self._root)
        kept = {number for number, _ in versions if number >= confirmed} | {
            number for number, _ in versions[-KEEP_VERSIONS:]
        }
        stored = on_disk(self._root)
        for each in stored:
            if each.version.number in kept:
                try:
                    kept |= needed_for(each.version, stored)
                except ValueError as error:  # engines cannot load it any more; the log says why
                    log.warning("version_cannot_be_reached", weight_version=each.version.number, reason=str(error))
        for number, path in versions:
            if number not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _with_index(self, pending: PendingVersion, written: Written) -> Path | None:
        """Write the index of the delta. Returns the delta's directory; None: the version is published in full."""
        if pending.delta is None or pending.before is None:
            return None
        reason = written.no_delta
        if not reason:
            try:
                write_index(pending.delta, pending.before, pending.number, written.tensors)
            except DeltaError as error:
                reason = str(error)
        if not reason:
            return pending.delta
        log.warning("version_goes_whole", weight_version=pending.number, reason=reason)
        shutil.rmtree(pending.delta, ignore_errors=True)
        return None

    def _forget_bases(self) -> None:
        """Delete base files of earlier versions and of earlier trainers."""
        for _, path in versions_in(self._root / BASE):
            if self._newest is None or path != self._newest[1]:
                shutil.rmtree(path, ignore_errors=True)


def newest_whole(root: Path) -> tuple[int, Path] | None:
    """Find the newest version with full files in a directory of versions, including the trainer's own base files."""
    found = [(number, path) for place in (root, root / BASE) for number, path in versions_in(place)]
    return max((each for each in found if list(each[1].glob("*.safetensors"))), default=None)


def _with_small_files(directory: Path, files: Mapping[str, FileSum]) -> dict[str, FileSum]:
    """Add the sums of the index and of config.json, which an engine reads too."""
    if not files:
        return {}
    small = [file for name in (INDEX_FILE, "config.json") if (file := directory / name).is_file()]
    return {**files, **{file.name: sum_of(file) for file in small}}


def _size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())
