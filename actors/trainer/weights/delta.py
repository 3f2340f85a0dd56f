"""Delta of a rank's tensors to the last published version, written bucket by bucket during the export.

The base is read from the files of that version, one tensor at a time. `runtime/models/delta.py` defines the file
format and applies deltas. `runtime/models/versions.py` decides when a version has to be full.
"""

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from actors.trainer.models.shards import Entry, bytes_of, entry_of
from actors.trainer.weights.gathering import Bucket
from runtime.models.checksums import tensor_checksum
from runtime.models.delta import DeltaError, TensorDelta, payload_file
from runtime.models.safetensors import ITEM_BYTES, StoredTensor, read_tensors
from runtime.models.tensor_delta import changed_places, pack

WHOLE_ABOVE: Final = 0.3  # share of changed values above which a tensor is written in full


class DeltaWriter:
    """Writes one file of delta payloads. The first rank builds the index from the tensor lists of all writers."""

    def __init__(
        self,
        directory: Path,
        base: Path,
        base_checksums: Mapping[str, str],
        *,
        number: int = 1,
        total: int = 1,
    ) -> None:
        """Open the file.

        Args:
            directory: existing directory.
            base: directory with the safetensors files of the previous version.
            base_checksums: checksum of each base tensor when it was written (see `checksums_of` in
                `runtime.models.checksums`).
            number: number of this rank among those that write, from 1.
            total: number of ranks that write.

        Raises:
            FileNotFoundError: a file of the base is missing.
            ValueError: a file of the base is not in the safetensors format.
        """
        self._base = base
        self._stored = read_tensors(base)
        self._checksums = base_checksums
        self._name = payload_file(number, total)
        self._size = 0
        self.tensors: list[TensorDelta] = []
        self._file = (directory / self._name).open("wb")

    def add(self, bucket: Bucket) -> None:
        """Write the delta of a bucket. Raises the errors of `write`."""
        for name, tensor in bucket:
            self.write(entry_of(name, tensor), bytes_of(tensor))

    def write(self, entry: Entry, data: memoryview, checksum: str | None = None) -> None:
        """Write the delta of a tensor.

        Args:
            entry: metadata of the tensor.
            data: its bytes.
            checksum: its checksum, if it is already computed.

        Raises:
            DeltaError: the base tensor is missing or damaged, or has another shape or dtype. The version has to be
                full.
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
        """Sync the file to disk, and return its tensors. A second call only returns them."""
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
        """Write the payload, and return its form and its place in the file."""
        item_bytes, old = ITEM_BYTES[stored.dtype], stored.data()
        self._check(stored, old)
        places = changed_places(old, data, item_bytes)
        count = int(np.count_nonzero(places))
        whole = count > WHOLE_ABOVE * len(places)
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
