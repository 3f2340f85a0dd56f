"""One-dimensional arrays packed as msgpack extensions: one extension type per dtype, numpy views at both ends."""

from array import array as native_array
from collections.abc import Iterable
from typing import Any, ClassVar, Self

import msgspec
import numpy as np
from numpy.typing import NDArray


class PackedArray(np.ndarray[Any, Any]):
    """A 1-D little-endian array of one dtype. A decoded array is read-only and keeps its whole message alive."""

    wire_dtype: ClassVar[np.dtype[Any]]
    native_code: ClassVar[str]  # of the same numbers in an array of the standard library
    extension_code: ClassVar[int]

    def __new__(cls, values: Iterable[float] | NDArray[Any] = ()) -> Self:
        """Pack values once, where they enter the system.

        Raises:
            ValueError: the values are not one-dimensional or not numeric, or an integer dtype cannot hold them.
        """
        if type(values) is list:
            native = _native(cls.native_code, values)  # pyright: ignore[reportUnknownArgumentType] - checked there
            if native is not None:  # the usual case; takes a fifth of the time
                return np.ndarray.__new__(cls, len(native), cls.wire_dtype, native)
        array: NDArray[Any] = _plain(values)
        if (array.dtype is cls.wire_dtype or array.dtype == cls.wire_dtype) and array.ndim == 1:
            return array.view(cls)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"{cls.__name__} takes numbers of at most 64 bits, got {array.dtype.name}")
        if array.dtype.kind == "f":  # only float casts warn; setting numpy's error state costs more than the rest
            with np.errstate(over="ignore", invalid="ignore"):  # infinite on overflow; integers are compared below
                packed = array.astype(cls.wire_dtype, copy=False)
        else:
            packed = array.astype(cls.wire_dtype, copy=False)
        if packed.ndim != 1:
            raise ValueError(f"{cls.__name__} takes one dimension, got shape {packed.shape}")
        if cls.wire_dtype.kind in "iu" and packed is not array and (packed != array).any():
            raise ValueError(f"{cls.__name__} cannot hold {array.dtype} values outside its range")
        return packed.view(cls)

    def __array_wrap__(self, array: NDArray[Any], context: Any = None, return_scalar: bool = False) -> Any:
        """Return a plain array or scalar: the result of arithmetic may have another dtype or shape."""
        plain = np.asarray(array)
        return plain[()] if return_scalar else plain


class Int32Array(PackedArray):
    """Token ids and positions."""

    wire_dtype = np.dtype("<i4")
    native_code = "i"
    extension_code = 1


class Float32Array(PackedArray):
    """Log-probs and other per-token numbers."""

    wire_dtype = np.dtype("<f4")
    native_code = "f"
    extension_code = 2


class UInt8Array(PackedArray):
    """Masks."""

    wire_dtype = np.dtype("u1")
    native_code = "B"
    extension_code = 3


def _plain(values: Any) -> NDArray[Any]:
    if type(values) is np.ndarray:
        return values  # pyright: ignore[reportUnknownVariableType] - of any dtype
    return np.asarray(values) if isinstance(values, np.ndarray) else np.asarray(list(values))  # pyright: ignore[reportUnknownArgumentType]


def _native(code: str, values: list[Any]) -> "native_array[Any] | None":
    """The values as an array of the standard library; None if they are not all numbers in its range."""
    try:
        return native_array(code, values)
    except (TypeError, OverflowError):
        return None


ARRAY_TYPES: tuple[type[PackedArray], ...] = (Int32Array, Float32Array, UInt8Array)
_by_code: dict[int, type[PackedArray]] = {array_type.extension_code: array_type for array_type in ARRAY_TYPES}


def to_extension(value: Any) -> msgspec.msgpack.Ext:
    """Encoding hook of msgpack: pack an array as an extension."""
    if isinstance(value, PackedArray) and value.dtype == value.wire_dtype and value.ndim == 1:
        packed = value if value.flags.c_contiguous else np.ascontiguousarray(value)
        return msgspec.msgpack.Ext(value.extension_code, packed.data.cast("B"))
    raise NotImplementedError(f"cannot send {type(value).__name__}")


def from_extension(code: int, data: memoryview) -> PackedArray:
    """Extension hook of msgpack: return a view on the message, not a copy."""
    array_type = _by_code.get(code)
    if array_type is None:
        raise msgspec.ValidationError(f"unknown extension code {code}")
    if len(data) % array_type.wire_dtype.itemsize:
        raise msgspec.ValidationError(f"{len(data)} bytes do not hold whole {array_type.wire_dtype.name} values")
    dtype = array_type.wire_dtype
    return np.ndarray.__new__(array_type, len(data) // dtype.itemsize, dtype, data)


def to_list(value: Any) -> list[float]:
    """Encoding hook of JSON: write an array as a list of numbers."""
    if isinstance(value, PackedArray):
        return value.tolist()
    raise NotImplementedError(f"cannot send {type(value).__name__}")


def from_list(expected: type[Any], value: Any) -> Any:
    """Decoding hook: turn a list of numbers into a packed array. msgpack calls it for unpacked arrays too."""
    if isinstance(value, expected):
        return value
    if issubclass(expected, PackedArray) and isinstance(value, list):
        try:
            return expected(value)  # pyright: ignore[reportUnknownArgumentType] - checked by the constructor
        except ValueError as error:
            raise msgspec.ValidationError(str(error)) from None
    raise msgspec.ValidationError(f"expected {expected.__name__}, got {type(value).__name__}")


def array_schema(expected: type[Any]) -> dict[str, Any]:
    """JSON Schema of an array type."""
    if not issubclass(expected, PackedArray):
        raise NotImplementedError(expected)
    kind = "number" if expected.wire_dtype.kind == "f" else "integer"
    packed = f"packed as msgpack extension {expected.extension_code} ({expected.wire_dtype.name}, little-endian)"
    return {"type": "array", "items": {"type": kind}, "description": packed}
