"""The delta of one tensor: packs the positions and new values of changed numbers.

Numbers are compared by their bits: minus zero differs from zero, and NaN equals itself. A change is the gap of
unchanged numbers before it, and the new number. Gaps are unsigned integers of 4 bytes (8 for larger tensors). All gaps
and then all numbers are written byte plane by byte plane, lowest byte first, and compressed with zlib.

Measured on 12.5e6 bfloat16 numbers with 2 % changed: 2.4 % of their bytes, and per change 0.93 bytes for the gap and
1.45 for the number. Gaps of variable length take 0.94; without planes it is 1.47 and 1.60. Higher zlib levels save 1 %
in four times the time; lzma and bz2 save no more.
"""

import zlib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_LEVEL: Final = 1
_MAX_OF_SHORT: Final = 2**32  # maximum numbers in a tensor with 4-byte gaps
_UNSIGNED: Final[dict[int, str]] = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}


def changed_places(old: memoryview, new: memoryview, item_bytes: int) -> NDArray[np.bool_]:
    """Return which numbers of a tensor have changed bits.

    Args:
        old: bytes of the tensor.
        new: bytes of the new tensor, as many.
        item_bytes: size of one element.
    """
    return _numbers(old, item_bytes) != _numbers(new, item_bytes)


def pack(places: NDArray[np.bool_], new: memoryview, item_bytes: int) -> bytes:
    """Pack the changes of a tensor.

    Args:
        places: result of `changed_places`.
        new: bytes of the new tensor.
        item_bytes: size of one element.
    """
    where = np.flatnonzero(places)
    gaps = np.diff(where, prepend=-1) - 1
    compressor = zlib.compressobj(_LEVEL)
    packed = compressor.compress(_planes(gaps.astype(_gap_type(len(places)))))
    packed += compressor.compress(_planes(_numbers(new, item_bytes)[where]))
    return packed + compressor.flush()


def apply(packed: memoryview, count: int, old: memoryview, item_bytes: int) -> memoryview:
    """Apply packed changes to a tensor, and return the new bytes.

    Args:
        packed: result of `pack`.
        count: number of changes.
        old: bytes of the base tensor; not modified.
        item_bytes: size of one element.

    Raises:
        ValueError: the changes do not fit this tensor.
    """
    new = np.frombuffer(bytearray(old), dtype=_UNSIGNED[item_bytes])
    gap_type = np.dtype(_gap_type(len(new)))
    unpacked = _unpacked(packed, count * (gap_type.itemsize + item_bytes))
    gaps = _from_planes(unpacked[: count * gap_type.itemsize], gap_type)
    where = np.cumsum(gaps.astype(np.uint64) + 1) - 1
    if count and (int(gaps.max()) >= len(new) or int(where[-1]) >= len(new)):
        raise ValueError(f"an index is outside the tensor, which has {len(new)} elements")
    new[where] = _from_planes(unpacked[count * gap_type.itemsize :], new.dtype)
    return new.view(np.uint8).data


def _numbers(data: memoryview, item_bytes: int) -> NDArray[Any]:
    return np.frombuffer(data, dtype=_UNSIGNED[item_bytes])


def _gap_type(num_numbers: int) -> str:
    return "<u4" if num_numbers <= _MAX_OF_SHORT else "<u8"


def _planes(numbers: NDArray[Any]) -> bytes:
    return numbers.view(np.uint8).reshape(len(numbers), numbers.itemsize).T.tobytes()


def _from_planes(planes: bytes, dtype: "np.dtype[Any]") -> NDArray[Any]:
    by_plane = np.frombuffer(planes, dtype=np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(by_plane.T).view(dtype).reshape(-1)


def _unpacked(packed: memoryview, size: int) -> bytes:
    decompressor = zlib.decompressobj()
    try:
        unpacked = decompressor.decompress(packed, size + 1)  # bounded, even if the data claims to be larger
    except zlib.error as error:
        raise ValueError(f"cannot be decompressed: {error}") from error
    if len(unpacked) != size or not decompressor.eof or decompressor.unused_data:
        raise ValueError(f"has {len(unpacked)} bytes or more when decompressed, expected {size}")
    return unpacked
