"""What changed of a rank's tensors since the last published version, written bucket by bucket as they are exported.

The base is read from the files of that version, one tensor at a time. `runtime/weights/delta.py` says what the files
hold and applies them; `runtime/weights/route.py` when a version has to be whole.
"""

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from actors.trainer.models.gathering import Bucket
from actors.trainer.models.shards import Entry, bytes_of, entry_of
from runtime.checksums import tensor_checksum
from runtime.weights.changes import changed_places, pack
from runtime.weights.delta import DeltaError, TensorDelta, payload_file
from runtime.weights.stored import ITEM_BYTES, StoredTensor, read_tensors

WHOLE_ABOVE: Final = 0.3  # of a tensor's numbers: what changed more goes whole


class DeltaWriter:
    """Writes one file of payloads. What all ranks' writers say of their tensors is the index, for the first rank."""

    def __init__(
        self,
        directory: Path,
        base: Path,
        base_checksums: Mapping[str, str],
        *,
        number: int = 1,
        total: int = 1,
        whole_above: float = WHOLE_ABOVE,
        check_base: bool = True,
    ) -> None:
        """Open the file.

        Args:
            directory: exists.
            base: has the safetensors files of the version before.
            base_checksums: of each of its tensors, as they were when it was written (`runtime.checksums.checksums_of`
                reckons them from files).
            number: of this rank among those that write, from 1.
            total: of ranks that write.
            whole_above: a share of a tensor's numbers.
            check_base: hash what is read of the base. Unchecked, a damaged base is found by who applies the delta.

        Raises:
            FileNotFoundError: a file of the base is missing.
            ValueError: a file of the base is not in the safetensors format.
        """
        self._base = base
        self._stored = read_tensors(base)
        self._checksums = base_checksums
        self._name = payload_file(number, total)
        self._whole_above = whole_above
        self._check_base = check_base
        self._size = 0
        self.tensors: list[TensorDelta] = []
        self._file = (directory / self._name).open("wb")

    def add(self, bucket: Bucket) -> None:
        """Write what changed of a bucket; raises as `write` does."""
        for name, tensor in bucket:
            self.write(entry_of(name, tensor), bytes_of(tensor))

    def write(self, entry: Entry, data: memoryview, checksum: str | None = None) -> None:
        """Write what changed of a tensor.

        Args:
            entry: which one.
            data: its bytes.
            checksum: of it, where somebody has reckoned it already.

        Raises:
            DeltaError: the base has no such tensor, one of another shape or type, or a damaged one: the version has
                to go whole.
        """
        stored = self._before(entry)
        checksum = checksum or tensor_checksum(entry.name, entry.dtype, entry.shape, data)
        before = self._checksums[entry.name]
        rest: dict[str, Any] = {"form": "unchanged"} if checksum == before else self._payload(stored, data)
        self.tensors.append(
            TensorDelta(
                name=entry.name, dtype=entry.dtype, shape=tuple(entry.shape), base=before, target=checksum, **rest
            )
        )

    def close(self) -> list[TensorDelta]:
        """Put the file on the disk and say what it has; again does nothing more."""
        if not self._file.closed:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
        return self.tensors

    def _before(self, entry: Entry) -> StoredTensor:
        stored = self._stored.get(entry.name)
        if stored is None or entry.name not in self._checksums:
            raise DeltaError(f"{self._base}: has no {entry.name}, so there is nothing to compare it with")
        if (stored.dtype, stored.shape) != (entry.dtype, tuple(entry.shape)):
            raise DeltaError(
                f"{self._base}: {entry.name} is {stored.dtype} {list(stored.shape)}, now it is {entry.dtype} "
                f"{list(entry.shape)}"
            )
        return stored

    def _payload(self, stored: StoredTensor, data: memoryview) -> dict[str, Any]:
        """Write it, and say where and how."""
        item_bytes, old = ITEM_BYTES[stored.dtype], stored.data()
        if self._check_base:
            self._check(stored, old)
        places = changed_places(old, data, item_bytes)
        count = int(np.count_nonzero(places))
        whole = count > self._whole_above * len(places)
        payload = data if whole else pack(places, data, item_bytes)
        place = {"file": self._name, "begin": self._size, "size_bytes": len(payload), "crc32": zlib.crc32(payload)}
        self._file.write(payload)
        self._size += len(payload)
        return {"form": "whole", **place} if whole else {"form": "changes", "count": count, **place}

    def _check(self, stored: StoredTensor, old: memoryview) -> None:
        expected = self._checksums[stored.name]
        found = tensor_checksum(stored.name, stored.dtype, stored.shape, old)
        if found != expected:
            raise DeltaError(f"{stored.file}: {stored.name} is damaged: its checksum is {found}, it was {expected}")
