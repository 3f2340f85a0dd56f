"""Changes of a tensor: any bits come back, and few changes are few bytes."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.models.tensor_delta import apply, changed_places, pack

NUMBERS = np.array(
    [0x7FC0, 0x7FC1, 0xFF80, 0x8000, 0x0000, 0x3F80, 0x0001], dtype="<u2"
)  # two NaNs, -inf, -0, 0, 1, tiny


def round_trip(old: bytes, new: bytes, item_bytes: int) -> tuple[bytes, int]:
    """The changes, and how many; that they lead from one to the other is asserted."""
    places = changed_places(memoryview(old), memoryview(new), item_bytes)
    packed, count = pack(places, memoryview(new), item_bytes), int(places.sum())
    assert bytes(apply(memoryview(packed), count, memoryview(old), item_bytes)) == new
    return packed, count


@given(
    item_bytes=st.sampled_from([1, 2, 4, 8]),
    number=st.integers(1, 600),
    share=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_bits_come_back(item_bytes: int, number: int, share: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    old = generator.integers(0, 256, (number, item_bytes), dtype=np.uint8)
    new = np.where(generator.random((number, 1)) < share, generator.integers(0, 256, old.shape, dtype=np.uint8), old)
    round_trip(old.tobytes(), new.tobytes(), item_bytes)


@given(st.lists(st.tuples(st.sampled_from(NUMBERS.tolist()), st.sampled_from(NUMBERS.tolist())), min_size=1))
def test_numbers_that_are_not_themselves_or_equal_others_come_back(pairs: list[tuple[int, int]]) -> None:
    old, new = (np.array(column, dtype="<u2").tobytes() for column in zip(*pairs, strict=True))
    _, count = round_trip(old, new, 2)
    assert count == sum(before != after for before, after in pairs)


def test_changes_by_hand() -> None:
    old = np.zeros(300, dtype="<u2")
    new = old.copy()
    new[[0, 1, 299]] = [0x0102, 0x0304, 0x0506]
    packed, count = round_trip(old.tobytes(), new.tobytes(), 2)
    gaps = bytes([0, 0, 297 - 256]) + bytes([0, 0, 1]) + bytes(6)  # 0, 0 and 297 unchanged numbers before each
    assert (count, zlib.decompress(packed)) == (3, gaps + bytes([2, 4, 6, 1, 3, 5]))


@pytest.mark.parametrize(
    ("raw", "count", "message"),
    [
        (bytes([9, 0, 0, 0, 1, 1]), 1, "outside the tensor, which has 8 elements"),
        (bytes([5, 5, 0, 0, 0, 0, 0, 0, 1, 2, 1, 2]), 2, "outside the tensor, which has 8 elements"),
        (bytes([255] * 4 + [1, 1]), 1, "outside the tensor, which has 8 elements"),
        (bytes(5), 1, "has 5 bytes or more when decompressed, expected 6"),
        (bytes(1000), 1, "has 7 bytes or more when decompressed, expected 6"),
    ],
)
def test_what_is_no_change_of_the_tensor_is_refused(raw: bytes, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply(memoryview(zlib.compress(raw)), count, memoryview(bytes(16)), 2)


def test_what_is_not_compressed_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be decompressed"):
        apply(memoryview(b"no"), 1, memoryview(bytes(16)), 2)
