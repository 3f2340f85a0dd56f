"""Files of a version compared with what was announced of them."""

import threading
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from messages import FileSum
from runtime.models.file_sums import RunningSum, SharedLooks, damage_in, sum_of
from tests.fixtures.nats import eventually
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


pytestmark = pytest.mark.anyio


class Reads:
    """Counts reads, and holds them."""

    def __init__(self) -> None:
        self.begun = 0
        self.open = threading.Event()

    def read(self) -> str:
        self.begun += 1
        number = self.begun
        assert self.open.wait(10)
        return str(number)


async def test_who_asks_while_a_look_is_under_way_shares_the_next_one() -> None:
    looks, reads, found = SharedLooks(), Reads(), list[str]()

    async def ask() -> None:
        found.append(await looks.look("v1", reads.read))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await eventually(lambda: reads.begun == 1)
        for _ in range(3):
            group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        reads.open.set()
    assert sorted(found) == ["1", "2", "2", "2"]


async def test_a_look_that_is_cut_off_is_led_by_another_one() -> None:
    looks, reads = SharedLooks(), Reads()
    async with anyio.create_task_group() as group:
        cut_off = anyio.CancelScope()

        async def lead() -> None:
            with cut_off:
                await looks.look("v1", reads.read)

        group.start_soon(lead)
        await eventually(lambda: reads.begun == 1)
        found: list[str] = []

        async def follow() -> None:
            found.append(await looks.look("v1", reads.read))

        async def follow_on() -> None:
            found.append(await looks.look("v1", reads.read))

        group.start_soon(follow)
        group.start_soon(follow_on)
        await anyio.wait_all_tasks_blocked()
        cut_off.cancel()
        await eventually(lambda: reads.begun == 2)
        reads.open.set()
    assert found == ["2", "2"]
