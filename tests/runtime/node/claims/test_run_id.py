"""A run directory and the streams on the bus are of one run, or the start is refused."""

import itertools
from pathlib import Path

import pytest

from runtime.bus.bus import Bus
from runtime.bus.nats.store import api_call
from runtime.node.claims.run_id import (
    Decision,
    IdInDirectory,
    IdOnBus,
    RunMismatch,
    check_run_id,
    decide,
    id_in,
    settle_run_id,
)
from tests.fixtures.nats import TEST_LIMITS, NatsServer, group_failed

PROPOSED, JOINED = (IdInDirectory(id="a", joined=joined) for joined in (False, True))
OURS, OTHERS = (IdOnBus(id=name, owned=True, made_in="/there on h") for name in "ab")
JOINERS = IdOnBus(id="b", owned=False, made_in="/there on h")


@pytest.mark.parametrize(
    ("directory", "bus", "decision"),
    [
        (None, None, Decision.TAKE),
        (PROPOSED, None, Decision.TAKE),  # killed before the bus had it
        (JOINED, None, Decision.GONE),
        (None, OTHERS, Decision.FOREIGN),
        (PROPOSED, OTHERS, Decision.FOREIGN),
        (JOINED, OTHERS, Decision.FOREIGN),
        (PROPOSED, OURS, Decision.GO_ON),  # killed after the bus had it
        (JOINED, OURS, Decision.GO_ON),
        (None, JOINERS, Decision.ADOPT),  # another node was first
        (PROPOSED, JOINERS, Decision.ADOPT),
        (JOINED, JOINERS, Decision.FOREIGN),
    ],
)
def test_both_ids_decide(directory: IdInDirectory | None, bus: IdOnBus | None, decision: Decision) -> None:
    assert decide(directory, bus, owns=True) is decision


def test_another_node_joins_with_a_new_directory_and_never_with_that_of_another_run() -> None:
    for directory, bus in itertools.product((None, PROPOSED), (OTHERS, JOINERS)):
        assert decide(directory, bus, owns=False) is Decision.ADOPT
    assert decide(JOINED, OTHERS, owns=False) is Decision.FOREIGN
    assert decide(JOINED, None, owns=False) is Decision.GONE


def test_streams_that_lost_a_part_or_whose_discarding_was_interrupted_are_not_gone_on_with() -> None:
    assert decide(JOINED, OURS, owns=True, whole=False) is Decision.GONE
    assert decide(None, None, owns=True, used=True) is Decision.FOREIGN


@pytest.mark.anyio
async def test_an_id_is_made_once_and_found_in_both_by_later_starts(bus: Bus, tmp_path: Path) -> None:
    first = await settle_run_id(bus, tmp_path, owns=True)
    await bus.publish(group_failed(1))
    await check_run_id(bus, tmp_path, owns=True)
    assert await settle_run_id(bus, tmp_path, owns=True) == first
    assert id_in(tmp_path) == IdInDirectory(id=first, joined=True)
    found = await bus.kv.get("run", IdOnBus)
    assert found is not None
    assert found.value is not None
    assert (found.value.id, found.value.owned) == (first, True)
    assert found.value.made_in.startswith(f"{tmp_path} on ")


@pytest.mark.anyio
async def test_nothing_is_made_on_a_bus_before_the_ids_are_compared(
    nats_server: NatsServer, run_name: str, tmp_path: Path
) -> None:
    (tmp_path / "run-id.json").write_text('{"id": "a", "joined": true}')
    async with Bus.connect(nats_server.url, run_name, name="test", limits=TEST_LIMITS) as bus:
        with pytest.raises(RunMismatch, match=f"{tmp_path} holds a run whose streams are not on this bus.*--fresh "):
            await check_run_id(bus, tmp_path, owns=True)
        held = await bus.holdings()
    assert (held.has_bucket, held.whole, held.used) == (False, False, False)


@pytest.mark.anyio
async def test_streams_of_another_directory_are_refused_and_their_home_is_told(bus: Bus, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    await settle_run_id(bus, tmp_path / "one", owns=True)
    with pytest.raises(RunMismatch) as refused:
        await check_run_id(bus, tmp_path / "two", owns=True)
    assert f"belong to {tmp_path / 'one'} on " in str(refused.value)
    assert f"choose another run.name, or start over with --fresh {bus.run}" in str(refused.value)
    with pytest.raises(RunMismatch):
        await settle_run_id(bus, tmp_path / "two", owns=True)


@pytest.mark.anyio
async def test_nodes_with_directories_of_their_own_share_the_id_whoever_is_first(bus: Bus, tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    joined = await settle_run_id(bus, tmp_path / "second", owns=False)
    assert await settle_run_id(bus, tmp_path / "first", owns=True) == joined
    assert await settle_run_id(bus, tmp_path / "second", owns=False) == joined
    (tmp_path / "other").mkdir()
    with pytest.raises(RunMismatch):  # now it has its owner
        await settle_run_id(bus, tmp_path / "other", owns=True)


@pytest.mark.anyio
async def test_a_start_that_was_killed_between_both_ids_goes_on(bus: Bus, tmp_path: Path) -> None:
    (tmp_path / "run-id.json").write_text('{"id": "a", "joined": false}')
    await check_run_id(bus, tmp_path, owns=True)
    assert await settle_run_id(bus, tmp_path, owns=True) == "a"
    (tmp_path / "run-id.json").write_text('{"id": "a", "joined": false}')
    await check_run_id(bus, tmp_path, owns=True)
    assert await settle_run_id(bus, tmp_path, owns=True) == "a"
    assert id_in(tmp_path) == IdInDirectory(id="a", joined=True)


@pytest.mark.anyio
async def test_a_deleted_stream_is_missed(bus: Bus, tmp_path: Path) -> None:
    await settle_run_id(bus, tmp_path, owns=True)
    await api_call(bus._connection, f"STREAM.DELETE.phy-{bus.run}-event")
    with pytest.raises(RunMismatch, match="or not all of them"):
        await check_run_id(bus, tmp_path, owns=True)


def test_an_edited_id_is_refused_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "run-id.json").write_text("{")
    with pytest.raises(RunMismatch, match=r"run-id\.json cannot be read"):
        id_in(tmp_path)
