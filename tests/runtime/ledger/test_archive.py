"""The history of a run is read once and in order, wherever its events lie, and while they are moved."""

import base64
import gzip
from pathlib import Path

import anyio
import msgspec
import pytest

from messages import Plane
from runtime.bus.bus import Bus
from runtime.ledger.archive import (
    ArchiveDamaged,
    ArchivedBefore,
    archive,
    archived_events,
    archived_files,
    first_archived,
    history,
    start_state,
)
from tests.fixtures.nats import group_failed
from tests.support.raw_nats import publish_raw

pytestmark = pytest.mark.anyio


async def publish(bus: Bus, number: int) -> None:
    async with anyio.create_task_group() as group:
        for index in range(number):
            group.start_soon(bus.publish, group_failed(index))


async def move(bus: Bus, run_dir: Path, *, below_seq: int) -> None:
    await archive(bus, run_dir, below_seq=below_seq)
    await bus.purge(Plane.EVENT, below_seq=below_seq)


async def test_a_follower_that_lags_behind_finds_what_was_moved_meanwhile(bus: Bus, tmp_path: Path) -> None:
    await publish(bus, 1500)  # more than a reader asks for ahead
    seqs: list[int] = []
    with anyio.fail_after(200):
        past = ArchivedBefore(tmp_path)
        async with bus.read() as events:
            async for received in events:
                seqs += [event.seq async for event in past.events(received.seq)]
                seqs.append(received.seq)
                if received.seq == 1:
                    await move(bus, tmp_path, below_seq=1400)
                    await bus.publish(group_failed(1501))
                if received.seq == 1501:
                    break
    assert seqs == list(range(1, 1502))


@pytest.mark.parametrize("harm", ["torn line", "torn file", "no text"])
async def test_a_damaged_file_is_named_with_the_line(bus: Bus, tmp_path: Path, harm: str) -> None:
    await publish(bus, 5)
    await move(bus, tmp_path, below_seq=5)
    (file,) = archived_files(tmp_path)
    lines = gzip.decompress(file.path.read_bytes()).splitlines(keepends=True)
    lines[2] = {"torn line": lines[2][:20] + b"\n", "torn file": lines[2], "no text": b"\xff\xfe\n"}[harm]
    content = gzip.compress(b"".join(lines))
    file.path.write_bytes(content[:-12] if harm == "torn file" else content)
    with pytest.raises(ArchiveDamaged, match=rf"{file.path.name}, at line [2-4]: "):
        list(archived_events(tmp_path))
    past = ArchivedBefore(tmp_path)
    with pytest.raises(ArchiveDamaged):
        [event async for event in past.events(5)]
    assert [event async for event in past.events(6)] == []


async def test_files_follow_each_other_and_a_stretch_is_read_from_those_that_hold_it(bus: Bus, tmp_path: Path) -> None:
    await publish(bus, 30)
    for below_seq in (11, 21):
        await move(bus, tmp_path, below_seq=below_seq)
    assert [(file.first_seq, file.last_seq) for file in archived_files(tmp_path)] == [(1, 10), (11, 20)]
    assert [received.seq for received in first_archived(tmp_path)] == list(range(1, 11))
    assert [received.seq for received in archived_events(tmp_path, from_seq=8, below_seq=15)] == list(range(8, 15))
    async with history(bus, tmp_path) as events:
        told = [(received.seq, received.message) async for received in events.so_far()]
    assert [seq for seq, _ in told] == list(range(1, 31))
    assert {type(message) for _, message in told} == {type(group_failed(1))}


async def test_times_are_those_of_the_log(bus: Bus, tmp_path: Path) -> None:
    await publish(bus, 3)
    async with bus.read() as events:
        times = [(received.time, received.unix_time) async for received in events.so_far()]
    await move(bus, tmp_path, below_seq=3)
    assert [(received.time, received.unix_time) for received in archived_events(tmp_path)] == times[:2]


async def test_a_run_without_an_archive_is_its_log(bus: Bus, tmp_path: Path) -> None:
    await publish(bus, 3)
    assert await start_state(bus, tmp_path) is None
    assert archived_files(tmp_path) == []
    async with history(bus, tmp_path) as events:
        assert [received.seq async for received in events.so_far()] == [1, 2, 3]


async def test_what_is_stored_is_read_undecoded_up_to_a_sequence(bus: Bus) -> None:
    await publish(bus, 5)
    stored = [message async for message in bus.stored(Plane.EVENT, below_seq=4)]
    assert [message.seq for message in stored] == [1, 2, 3]
    assert all(b'"group_failed"' in message.payload for message in stored)
    assert [message async for message in bus.stored(Plane.DATA, below_seq=4)] == []


async def test_an_event_that_is_nested_without_end_is_archived_as_it_was(bus: Bus, tmp_path: Path, url: str) -> None:
    """It could neither be archived nor, beside others, be read again."""
    deep = b"[" * 6000
    await publish_raw(url, f"phy.{bus.run}.event.group.failed.1.1", deep, b"Physarum-Type: \xff\xfe")
    nested = b"[" * 900 + b"]" * 900
    await publish_raw(url, f"phy.{bus.run}.event.group.failed.1.1", nested, b"Physarum-Type: group_failed")
    await publish(bus, 1)
    await move(bus, tmp_path, below_seq=4)
    assert [received.message for received in archived_events(tmp_path)] == [group_failed(0)]
    (file,) = archived_files(tmp_path)
    lines = gzip.decompress(file.path.read_bytes()).splitlines()
    raw = [base64.b64decode(msgspec.json.decode(line)["raw"]) for line in lines[:2]]
    assert raw == [deep, nested]
