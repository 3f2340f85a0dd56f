"""Files of a version compared with what was announced of them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messages import FileSum
from runtime.models.file_sums import RunningSum, damage_in, sum_of
from tests.support.published import flip

CHECK: bytes = b"123456789"
CHECK_SUM = FileSum(size_bytes=9, crc32=0xCBF43926)  # the check value of CRC-32/ISO-HDLC


@pytest.fixture
def version(tmp_path: Path) -> Path:
    (tmp_path / "a.safetensors").write_bytes(CHECK)
    (tmp_path / "b.safetensors").write_bytes(bytes(3 << 20))
    return tmp_path


def sums(version: Path) -> dict[str, FileSum]:
    return {file.name: sum_of(file) for file in version.iterdir()}


def test_a_file_has_the_check_value_of_the_algorithm(version: Path) -> None:
    assert sum_of(version / "a.safetensors") == CHECK_SUM


@given(st.lists(st.binary(max_size=5), max_size=6))
def test_pieces_have_the_sum_of_the_whole(pieces: list[bytes]) -> None:
    running, whole = RunningSum(), RunningSum()
    for piece in pieces:
        running.add(memoryview(piece))
    whole.add(b"".join(pieces))
    assert running.sum == whole.sum


def test_what_lies_there_as_announced_has_no_damage_whatever_lies_beside(version: Path) -> None:
    announced = sums(version)
    (version / "published.json").write_text("{}")
    assert damage_in(version, announced) == ""


def test_each_kind_of_damage_names_its_file(version: Path) -> None:
    announced = sums(version)
    flip(version / "b.safetensors", 2 << 20)
    (version / "a.safetensors").write_bytes(CHECK[:-1])
    assert damage_in(version, announced) == (
        f"{version}/a.safetensors: has 8 bytes, 9 were announced; "
        f"{version}/b.safetensors: damaged: its CRC-32 is {sum_of(version / 'b.safetensors').crc32:08x}, "
        f"{announced['b.safetensors'].crc32:08x} was announced"
    )
    (version / "a.safetensors").unlink()
    assert damage_in(version, {"a.safetensors": CHECK_SUM}) == (
        f"{version}/a.safetensors: cannot be read: No such file or directory"
    )
