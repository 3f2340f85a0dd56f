"""A checkpoint counts once each file lies on two nodes; a node without its disk gets it back, and damage is mended."""

import hashlib
import shutil
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import pytest

from actors.trainer import checkpoint_copies
from actors.trainer.checkpoint_copies import CheckpointCopies, NotCopied, Placement, newest_complete
from actors.trainer.file_checksums import damage_of
from messages import CheckpointCopiesRequested, CheckpointFile, CheckpointRecord, HeldCheckpoint
from runtime.bus.bus import Bus
from runtime.models.checkpoint_files import CHECKPOINTS, checksum_of
from runtime.node.node_plan import NodePlan
from runtime.node.node_room import NodeRoom
from runtime.settings.topology import Topology
from runtime.util.files import hidden_name
from tests.build.topology import topology_with
from tests.support.published import flip

pytestmark = pytest.mark.anyio

NODES = ("home", "n1", "n2", "n3")
FIRST, SECOND = "0001/step-00000002", "0001/step-00000004"


def topology(*trainers: str, copies: int = 2) -> Topology:
    return topology_with(
        nodes={name: {"address": "127.0.0.1"} for name in NODES},
        bus={"node": "home"},
        trainer={"device": "cpu", "num_processes": len(trainers), "nodes": list(trainers)},
        train={"checkpoint_copies": copies},
    )


@asynccontextmanager
async def daemon(bus: Bus, directory: Path, node: str) -> AsyncGenerator[None]:
    """What a node's daemon does for checkpoints."""
    plan = NodePlan(
        run="r",
        node=node,
        run_dir=directory / node,
        incarnation=1,
        num_steps=1,
        started=0.0,
        processes=(),
        owns_streams=node == "home",
        copies_checkpoints=True,
    )
    room = NodeRoom(plan, print)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(room.run, bus)
        async with bus.serve({CheckpointCopiesRequested: room.copies.answer}, instance=f"daemon-{node}"):
            yield
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def daemons(bus: Bus, directory: Path, *nodes: str) -> AsyncGenerator[None]:
    async with AsyncExitStack() as stack:
        for node in nodes:
            await stack.enter_async_context(daemon(bus, directory, node))
        yield


def written(directory: Path, name: str, node: str, size: int = 300_000) -> dict[str, CheckpointFile]:
    """Write what the ranks of a node write of a checkpoint."""
    place = hidden_name(directory / node / CHECKPOINTS / name)
    place.mkdir(parents=True)
    names = [f"__{node}_0.distcp", f"__{node}_1.distcp"] + ([".metadata", "metadata.json"] if node == "n1" else [])
    for each in names:
        seed = hashlib.sha256(f"{name}{node}{each}".encode()).digest()
        (place / each).write_bytes(seed * (size // 32))
    sums = {each: checksum_of(place / each) for each in names}
    return {
        each: CheckpointFile(size_bytes=found.size_bytes, sha256=found.sha256, node=node)
        for each, found in sums.items()
    }


def files_at(directory: Path, node: str, name: str) -> set[str]:
    place = directory / node / CHECKPOINTS / name
    return {path.name for path in place.iterdir() if path.suffix == ".distcp"} if place.is_dir() else set()


def found(directory: Path, pattern: str) -> list[Path]:
    return [*directory.glob(pattern)]


async def spread(lead: CheckpointCopies, directory: Path, name: str, *nodes: str) -> None:
    files = {key: each for node in nodes for key, each in written(directory, name, node).items()}
    await lead.spread(name, files)


async def test_each_file_lies_on_two_nodes_and_a_replaced_one_gets_all(bus: Bus, tmp_path: Path) -> None:
    trainers = ("n1", "n2", "n3")
    lead = CheckpointCopies(topology(*trainers), bus)
    async with daemons(bus, tmp_path, *NODES):
        await spread(lead, tmp_path, FIRST, *trainers)
        await spread(lead, tmp_path, SECOND, *trainers)
        await lead.forget((SECOND,))
    of = {node: {f"__{node}_0.distcp", f"__{node}_1.distcp"} for node in trainers}
    assert files_at(tmp_path, "n1", FIRST) == set()
    assert files_at(tmp_path, "n1", SECOND) == of["n1"] | of["n3"]
    assert files_at(tmp_path, "n2", SECOND) == of["n2"] | of["n1"]
    assert files_at(tmp_path, "home", SECOND) == set()
    assert damage_of(tmp_path / "n3" / CHECKPOINTS / SECOND, thorough=True) is None
    shutil.rmtree(tmp_path / "n1")  # the machine of the first rank
    flip(tmp_path / "n2" / CHECKPOINTS / SECOND / "__n2_1.distcp", 9)  # its copy is on n3
    async with daemons(bus, tmp_path, *NODES):
        await CheckpointCopies(topology(*trainers), bus).bring()
    for node in trainers:
        assert files_at(tmp_path, node, SECOND) == of["n1"] | of["n2"] | of["n3"]
        assert damage_of(tmp_path / node / CHECKPOINTS / SECOND, thorough=True) is None
        assert found(tmp_path, f"{node}/{CHECKPOINTS}/{SECOND}/metadata.json")
    assert not found(tmp_path, "*/fetched/*/parts/*")


async def test_a_checkpoint_without_its_copies_has_no_name_and_says_whose_copy_is_missing(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TRIES_S", "AGAIN_S"):
        monkeypatch.setattr(checkpoint_copies, name, 0.1)
    lead = CheckpointCopies(topology("n1", "n2"), bus)
    async with daemons(bus, tmp_path, "n1"):
        with pytest.raises(NotCopied, match=r"\(sum_up 0001/step-00000002\), node n2: "):
            await spread(lead, tmp_path, FIRST, "n1", "n2")
    assert not found(tmp_path, "*/checkpoints/*/step-*")
    async with daemons(bus, tmp_path, "n1", "n2"):
        await lead.forget(None)  # as a start does
        files = written(tmp_path, SECOND, "n1") | written(tmp_path, SECOND, "n2")
        flip(hidden_name(tmp_path / "n2" / CHECKPOINTS / SECOND) / "__n2_0.distcp", 5)
        with pytest.raises(NotCopied, match=r"node n2: .*__n2_0.distcp has 300000 bytes with the sha256 "):
            await lead.spread(SECOND, files)
    assert not found(tmp_path, "*/checkpoints/*/step-*")


def test_parts_lie_on_the_next_nodes_of_the_trainer_and_on_others_if_these_are_too_few() -> None:
    placed = Placement.of(topology("n1", "n2", "n3"))
    assert [placed.holders(node) for node in placed.trainers] == [("n1", "n2"), ("n2", "n3"), ("n3", "n1")]
    assert placed.parts_on("n1") == ("n1", "n3")
    alone = Placement.of(topology("n2"))
    assert alone.holders("n2") == ("n2", "home")
    assert Placement.of(topology("n2", "n1", copies=3)).holders("n1") == ("n1", "home", "n2")


def test_the_newest_checkpoint_of_which_all_parts_are_left_is_taken() -> None:
    def held(name: str, *nodes: str) -> HeldCheckpoint:
        return HeldCheckpoint(record=CheckpointRecord(name=name, parts={"n1": "a", "n2": "b"}), nodes=nodes)

    assert newest_complete([]) is None
    found = newest_complete([held(FIRST, "n1", "n2"), held(SECOND, "n2")])
    assert found is not None
    assert found.name == FIRST
    found = newest_complete([held(FIRST, "n1", "n2"), held(SECOND, "n2"), held(SECOND, "n1")])
    assert found is not None
    assert found.name == SECOND
    found = newest_complete([held("0002/step-00000004", "n1", "n2"), held(SECOND, "n1", "n2")])
    assert found is not None
    assert found.name == "0002/step-00000004"
