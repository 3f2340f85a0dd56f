"""What changed between two tensors of one shape, as bytes: where, and the numbers that are there now.

Numbers are compared by their bits: minus zero is not zero, and no number equals itself. A change is the gap of
unchanged numbers before it and the new number. All gaps, as unsigned integers of 4 bytes (8 where the tensor has more
numbers than those can count), and then all numbers are written byte plane by byte plane, that is first the lowest
byte of each, and compressed with zlib. Measured on 12.5e6 bfloat16 numbers of which 2 % changed: 2.4 % of their bytes
(0.93 for a gap, 1.45 for a number); gaps of variable length 0.94, without planes 1.47 and 1.60. Higher levels of zlib
take 1 % less in four times the time, lzma and bz2 no less.
"""

import zlib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_LEVEL: Final = 1
_MAX_OF_SHORT: Final = 2**32  # numbers in a tensor whose gaps have 4 bytes
_UNSIGNED: Final[dict[int, str]] = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}


def changed_places(old: memoryview, new: memoryview, item_bytes: int) -> NDArray[np.bool_]:
    """Which numbers of a tensor are other bits than before.

    Args:
        old: bytes of the tensor.
        new: as many bytes.
        item_bytes: of a number.
    """
    return _numbers(old, item_bytes) != _numbers(new, item_bytes)


def pack(places: NDArray[np.bool_], new: memoryview, item_bytes: int) -> bytes:
    """The changes of a tensor.

    Args:
        places: as `changed_places` found them.
        new: bytes of the tensor.
        item_bytes: of a number.
    """
    where = np.flatnonzero(places)
    gaps = np.diff(where, prepend=-1) - 1
    compressor = zlib.compressobj(_LEVEL)
    packed = compressor.compress(_planes(gaps.astype(_gap_type(len(places)))))
    packed += compressor.compress(_planes(_numbers(new, item_bytes)[where]))
    return packed + compressor.flush()


def apply(packed: memoryview, count: int, old: memoryview, item_bytes: int) -> memoryview:
    """A tensor with its changes.

    Args:
        packed: what `pack` made.
        count: of changes.
        old: bytes of the tensor they were made against; stays as it is.
        item_bytes: of a number.

    Raises:
        ValueError: these are no such changes of such a tensor.
    """
    new = np.frombuffer(bytearray(old), dtype=_UNSIGNED[item_bytes])
    gap_type = np.dtype(_gap_type(len(new)))
    unpacked = _unpacked(packed, count * (gap_type.itemsize + item_bytes))
    gaps = _from_planes(unpacked[: count * gap_type.itemsize], gap_type)
    where = np.cumsum(gaps.astype(np.uint64) + 1) - 1
    if count and (int(gaps.max()) >= len(new) or int(where[-1]) >= len(new)):
        raise ValueError(f"a change beyond the {len(new)} numbers of the tensor")
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
        unpacked = decompressor.decompress(packed, size + 1)  # not more of what says that it is larger
    except zlib.error as error:
        raise ValueError(f"cannot be decompressed: {error}") from error
    if len(unpacked) != size or not decompressor.eof or decompressor.unused_data:
        raise ValueError(f"{len(unpacked)} bytes or more when decompressed, not {size}")
    return unpacked
