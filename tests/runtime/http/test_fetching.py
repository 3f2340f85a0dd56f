"""A node fetches a version from the rooms of others: each byte is compared, and neither a death nor a lie costs it."""

import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
import pytest

from actors.trainer.weights.publish import Published as Version_
from actors.trainer.weights.publish import Versions
from runtime.http import asking, planning
from runtime.http.fetching import Fetcher, Published
from runtime.http.room import Offered, Room, RoomAddress, open_room
from runtime.models.checksums import checksums_of
from runtime.models.copies import make_copy
from runtime.models.delta import Version
from runtime.models.manifest import FetchFailed, ManifestFile, read_manifest, write_manifest
from runtime.models.versions import OnDisk, name_of, write_note
from runtime.util.files import hidden_name
from tests.fixtures.nats import eventually
from tests.support.published import changed, drawn, flip, publish

pytestmark = pytest.mark.anyio

PIECE = 1 << 16
SIZE = 40 * PIECE + 5
SERVER = """
import sys, anyio, msgspec
from pathlib import Path
from runtime.http.fetching import Published
from runtime.http.room import Room, open_room

async def main():
    room = Room(Published([Path(sys.argv[1])]).look)
    async with open_room(room, sys.argv[2], "127.0.0.1", "127.0.0.1", is_home=True) as address:
        print(msgspec.json.encode(address).decode(), flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""
PEER = """
import sys, anyio, msgspec
from pathlib import Path
from runtime.http.fetching import Fetcher
from runtime.http.room import Room, open_room

async def main():
    room = Room()
    Fetcher(Path(sys.argv[1]), sys.argv[2], room, list, print)
    async with open_room(room, sys.argv[2], "127.0.0.1", "127.0.0.1", is_home=False) as address:
        print(msgspec.json.encode(address).decode(), flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""
CLIENT = """
import sys, msgspec
from pathlib import Path
from runtime.http.fetching import Fetcher
from runtime.http.room import Room, RoomAddress

address = msgspec.json.decode(sys.stdin.readline(), type=RoomAddress)
Fetcher(Path(sys.argv[1]), "n1", Room(), lambda: [address], print).fetch(sys.argv[2])
"""


def published(root: Path, number: int = 1, size: int = SIZE) -> str:
    """Publish a version with two files; return the digest of its manifest."""
    (place := root / name_of(number)).mkdir(parents=True)
    (place / "model.safetensors").write_bytes(Random(number).randbytes(size))
    (place / "config.json").write_text("{}")
    (place / "empty.txt").touch()
    version = Version(number, f"sum of {number}")
    write_note(place, OnDisk(version, whole_bytes=size))
    return write_manifest(place, version, piece_bytes=PIECE)


@asynccontextmanager
async def home(root: Path) -> AsyncGenerator[RoomAddress]:
    async with open_room(Room(Published([root]).look), "home", "127.0.0.1", "127.0.0.1", is_home=True) as address:
        yield address


class Node:
    """A node that fetches, with a room of its own."""

    def __init__(self, root: Path, known: Sequence[RoomAddress] = ()) -> None:
        self.known = list(known)
        self.shown: list[str] = []
        self.room = Room()
        self.root = root
        self.fetcher = Fetcher(root, root.name, self.room, lambda: self.known, self.shown.append)

    async def fetch(self, digest: str, *, verifies: bool = False) -> Path:
        return await anyio.to_thread.run_sync(lambda: self.fetcher.fetch(digest, verifies=verifies))

    @asynccontextmanager
    async def open(self, name: str) -> AsyncGenerator[RoomAddress]:
        async with open_room(self.room, name, "127.0.0.1", "127.0.0.1", is_home=False) as address:
            yield address


def is_same(one: Path, other: Path) -> bool:
    """Whether two directories have the same files."""
    names = sorted(file.name for file in one.iterdir())
    same = names == sorted(file.name for file in other.iterdir())
    return same and all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


async def test_a_node_fetches_a_version_and_seeds_it_when_home_is_gone(tmp_path: Path) -> None:
    digest = published(tmp_path / "weights")
    first, second = Node(tmp_path / "n1"), Node(tmp_path / "n2")
    async with home(tmp_path / "weights") as address:
        first.known = [address]
        place = await first.fetch(digest)
    assert is_same(place, tmp_path / "weights" / "v000001")
    async with first.open("n1") as address:
        second.known = [address]
        assert is_same(await second.fetch(digest), place)
    again = Node(tmp_path / "n2")  # its daemon was started again: nothing is asked for what is there
    assert is_same(await again.fetch(digest), place)
    async with again.open("n2") as address:
        assert is_same(await Node(tmp_path / "n3", [address]).fetch(digest), place)


async def test_a_peer_that_sends_wrong_bytes_is_named_and_left_out(tmp_path: Path) -> None:
    digest = published(tmp_path / "weights")
    shutil.copytree(tmp_path / "weights", tmp_path / "n1")
    liar = Node(tmp_path / "n1")
    for piece in range(40):
        flip(tmp_path / "n1" / "v000001" / "model.safetensors", piece * PIECE + 7)
    async with home(tmp_path / "weights") as right, liar.open("n1") as wrong:
        node = Node(tmp_path / "n2", [right, wrong])
        assert is_same(await node.fetch(digest), tmp_path / "weights" / "v000001")
    assert len(node.shown) == 1
    assert node.shown[0].startswith(f"node n1 (127.0.0.1:{wrong.port}) sent wrong bytes and is left out: piece ")
    assert " of model.safetensors of version 1: its sha256 is " in node.shown[0]


async def test_a_version_that_home_itself_does_not_have_as_announced_is_unusable(tmp_path: Path) -> None:
    digest = published(tmp_path / "weights")
    flip(tmp_path / "weights" / "v000001" / "model.safetensors", 3)
    async with home(tmp_path / "weights") as address:
        with pytest.raises(FetchFailed, match=r"piece 0 of model.safetensors of version 1") as failed:
            await Node(tmp_path / "n1", [address]).fetch(digest)
    assert failed.value.unusable
    assert "node home (127.0.0.1:" in str(failed.value)
    assert not (tmp_path / "n1" / "v000001").exists()


async def test_a_node_without_a_source_ends_its_wait_and_names_who_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "STALL_S", 0.3)
    monkeypatch.setattr(asking, "GONE_S", 0.3)
    digest = published(tmp_path / "weights")
    async with home(tmp_path / "weights") as address:
        other = await _another_room()
        impostor = msgspec.structs.replace(other, port=address.port)  # at its port there is another room now
        shutil.rmtree(tmp_path / "weights")
        with pytest.raises(FetchFailed) as failed:
            await Node(tmp_path / "n1", [address, impostor]).fetch(digest)
    assert not failed.value.unusable
    assert "node home (127.0.0.1:" in str(failed.value)
    assert "): it answered 404: This run announced no such digest here." in str(failed.value)
    assert "): SSLCertVerificationError: " in str(failed.value)
    with pytest.raises(FetchFailed, match="no node has a room"):
        await Node(tmp_path / "n1").fetch(digest)


async def _another_room() -> RoomAddress:
    async with open_room(Room(), "n9", "127.0.0.1", "127.0.0.1", is_home=False) as address:
        return address


@asynccontextmanager
async def serving(
    root: Path, name: str, program: str = SERVER
) -> AsyncGenerator[tuple[anyio.abc.Process, RoomAddress]]:
    """A room in a process of its own."""
    command = [sys.executable, "-c", program, str(root), name]
    async with await anyio.open_process(command, stderr=None) as process:
        assert process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            line += await process.stdout.receive()
        try:
            yield process, msgspec.json.decode(line, type=RoomAddress)
        finally:
            if process.returncode is None:
                process.kill()


async def test_a_source_that_is_killed_in_the_middle_costs_what_was_on_its_way(tmp_path: Path) -> None:
    digest = published(tmp_path / "weights", size=800 * PIECE)
    node, fetched = Node(tmp_path / "n1"), list[Path]()
    partial = hidden_name(tmp_path / "n1" / "v000001") / "model.safetensors"

    async def fetch() -> None:
        fetched.append(await node.fetch(digest))

    def has_begun() -> bool:
        return partial.exists() and partial.stat().st_blocks > 0

    async with serving(tmp_path / "weights", "home") as (process, address), anyio.create_task_group() as tasks:
        node.known = [address]
        tasks.start_soon(fetch)
        await eventually(has_begun)
        process.kill()
        await process.wait()
        assert not fetched
        async with home(tmp_path / "weights") as back:
            node.known = [back]
            await eventually(lambda: bool(fetched))
    assert is_same(fetched[0], tmp_path / "weights" / "v000001")


# Python 3.11 leaves a socket to the garbage collector if its peer goes between connecting and the handshake.
@pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")
@pytest.mark.parametrize("killed", ["home", "n1"])
async def test_a_fetch_from_two_goes_on_with_the_other_when_one_is_killed(tmp_path: Path, killed: str) -> None:
    digest = published(tmp_path / "weights", size=800 * PIECE)
    shutil.copytree(tmp_path / "weights", tmp_path / "n1")
    node, fetched = Node(tmp_path / "n2"), list[Path]()
    partial = hidden_name(tmp_path / "n2" / "v000001") / "model.safetensors"

    async def fetch() -> None:
        fetched.append(await node.fetch(digest))

    async with (
        serving(tmp_path / "weights", "home") as home_of_run,
        serving(tmp_path / "n1", "n1", PEER) as peer,
        anyio.create_task_group() as tasks,
    ):
        node.known = [home_of_run[1], peer[1]]
        tasks.start_soon(fetch)
        await eventually(lambda: partial.exists() and partial.stat().st_blocks > 0)
        process, _ = home_of_run if killed == "home" else peer
        process.kill()
        await process.wait()
        assert not fetched
        await eventually(lambda: bool(fetched))
    assert is_same(fetched[0], tmp_path / "weights" / "v000001")
    assert node.shown == []  # a death is no lie


async def test_a_fetch_whose_only_source_is_killed_fails_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "STALL_S", 0.5)
    digest = published(tmp_path / "weights", size=800 * PIECE)
    partial = hidden_name(tmp_path / "n1" / "v000001") / "model.safetensors"
    async with serving(tmp_path / "weights", "home") as (process, address), anyio.create_task_group() as tasks:

        async def fetch() -> None:
            with pytest.raises(
                FetchFailed,
                match=rf"piece .* of version 1 did not come from any .* node home \(127.0.0.1:{address.port}\): ",
            ):
                await Node(tmp_path / "n1", [address]).fetch(digest)

        tasks.start_soon(fetch)
        await eventually(lambda: partial.exists() and partial.stat().st_blocks > 0)
        process.kill()


async def test_a_peer_that_is_silent_is_named_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "CONNECT_S", 0.2)
    digest = published(tmp_path / "weights")
    async with home(tmp_path / "weights") as right, await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)  # connections are opened, and nothing is sent
        silent = msgspec.structs.replace(await _another_room(), port=port)
        node = Node(tmp_path / "n1", [right, silent])
        assert is_same(await node.fetch(digest), tmp_path / "weights" / "v000001")
    assert len(node.shown) == 1
    assert node.shown[0].startswith(f"node n9 (127.0.0.1:{port}) was silent and is left out: ")


async def test_a_peer_that_announces_what_it_does_not_send_is_named_and_left_out(tmp_path: Path) -> None:
    digest = published(tmp_path / "weights")
    content = (tmp_path / "weights" / "v000001" / "manifest.json").read_bytes()
    liar = Node(tmp_path / "n1")
    liar.room.offer({digest: Offered(tmp_path / "weights" / "v000001" / "manifest.json", len(content), held=_all)})
    async with home(tmp_path / "weights") as right, liar.open("n1") as wrong:
        node = Node(tmp_path / "n2", [right, wrong])
        assert is_same(await node.fetch(digest), tmp_path / "weights" / "v000001")
    assert len(node.shown) == 1
    assert node.shown[0].startswith(f"node n1 (127.0.0.1:{wrong.port}) announced pieces that it does not send and is ")


def _all() -> bytes:
    return b"\xff" * -(-(SIZE // PIECE + 2) // 8)  # a bit for each piece of both files with content


async def test_four_nodes_at_once_cost_home_less_than_two_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "STILL_S", 60.0)  # on a busy machine
    digest = published(tmp_path / "weights", size=120 * PIECE)
    nodes = [Node(tmp_path / f"n{number}") for number in range(1, 5)]
    room = Room(Published([tmp_path / "weights"]).look)
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(node.open(node.root.name)) for node in nodes]
        at_home = await stack.enter_async_context(open_room(room, "home", "127.0.0.1", "127.0.0.1", is_home=True))
        async with anyio.create_task_group() as tasks:
            for node, own in zip(nodes, addresses, strict=True):
                node.known = [at_home, *(each for each in addresses if each is not own)]
                tasks.start_soon(node.fetch, digest)
    for node in nodes:
        assert is_same(node.root / "v000001", tmp_path / "weights" / "v000001")
        assert node.shown == []
    assert room.sent_bytes < 2 * 120 * PIECE


async def test_a_node_that_is_killed_in_the_middle_has_nothing_under_its_name_and_goes_on(tmp_path: Path) -> None:
    digest = published(tmp_path / "weights", size=800 * PIECE)
    place, room = tmp_path / "n1" / "v000001", Room(Published([tmp_path / "weights"]).look)
    partial = hidden_name(place) / "model.safetensors"
    async with open_room(room, "home", "127.0.0.1", "127.0.0.1", is_home=True) as address:
        command = [sys.executable, "-c", CLIENT, str(tmp_path / "n1"), digest]
        async with await anyio.open_process(command, stdin=subprocess.PIPE) as process:
            assert process.stdin is not None
            await process.stdin.send(msgspec.json.encode(address) + b"\n")
            await eventually(lambda: partial.exists() and partial.stat().st_blocks > 0)
            process.kill()
        assert not place.exists()
        before = room.sent_bytes
        assert is_same(await Node(tmp_path / "n1", [address]).fetch(digest), tmp_path / "weights" / "v000001")
    assert room.sent_bytes - before < 800 * PIECE  # what had come was not sent again


async def test_a_fetch_that_is_stopped_has_nothing_under_its_name(tmp_path: Path) -> None:
    digest = published(tmp_path / "weights", size=800 * PIECE)
    place = tmp_path / "n1" / "v000001"
    partial = hidden_name(place) / "model.safetensors"
    async with home(tmp_path / "weights") as address, anyio.create_task_group() as tasks:
        node, failed = Node(tmp_path / "n1", [address]), list[FetchFailed]()

        async def fetch() -> None:
            try:
                await node.fetch(digest)
            except FetchFailed as error:
                failed.append(error)

        tasks.start_soon(fetch)
        await eventually(lambda: partial.exists() and partial.stat().st_blocks > 0)
        node.fetcher.stop()
        await eventually(lambda: bool(failed))
    assert not place.exists()


async def test_what_was_fetched_before_the_node_was_killed_is_not_fetched_again(tmp_path: Path) -> None:
    digest = published(tmp_path / "weights")
    _, manifest = read_manifest(tmp_path / "weights" / "v000001")
    left = hidden_name(tmp_path / "n1" / "v000001")
    shutil.copytree(tmp_path / "weights" / "v000001", left)
    with (left / "model.safetensors").open("r+b") as opened:
        opened.write(bytes(3 * PIECE))
    room = Room(Published([tmp_path / "weights"]).look)
    async with open_room(room, "home", "127.0.0.1", "127.0.0.1", is_home=True) as address:
        place = await Node(tmp_path / "n1", [address]).fetch(digest)
    assert is_same(place, tmp_path / "weights" / "v000001")
    manifest_bytes = (place / "manifest.json").stat().st_size
    assert room.sent_bytes == 3 * PIECE + manifest_bytes, manifest


async def test_a_damaged_version_is_found_when_it_is_verified(tmp_path: Path) -> None:
    digest = published(tmp_path / "weights")
    async with home(tmp_path / "weights") as address:
        node = Node(tmp_path / "n1", [address])
        flip(await node.fetch(digest) / "model.safetensors", 9)
        assert is_same(await node.fetch(digest, verifies=True), tmp_path / "weights" / "v000001")


async def test_deltas_are_fetched_with_what_they_begin_from_and_no_more(tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text("{}")
    versions = Versions(tmp_path / "weights", model, every=4, is_fetched=True)
    weights = [drawn(), changed(drawn(), 1), changed(changed(drawn(), 1), 2)]
    made: list[Version_] = [publish(versions, number, each) for number, each in enumerate(weights, 1)]
    async with home(tmp_path / "weights") as address:
        late = Node(tmp_path / "n1", [address])
        place = await late.fetch(made[2].manifest)
        assert sorted(each.name for each in late.root.iterdir()) == ["v000001", "v000002", "v000003"]
        copy = make_copy(Version(3, made[2].checksum), place, tmp_path / "copies", links=True)
        assert checksums_of(copy).total == made[2].checksum
        early = Node(tmp_path / "n2", [address])
        held = [Version(2, made[1].checksum)]
        await anyio.to_thread.run_sync(lambda: early.fetcher.fetch(made[2].manifest, held=held))
        assert [each.name for each in early.root.iterdir()] == ["v000003"]


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "manifest.json", "x" * 300])
def test_a_manifest_names_plain_files_alone(tmp_path: Path, name: str) -> None:
    _ = published(tmp_path)
    _, manifest = read_manifest(tmp_path / "v000001")
    with pytest.raises(ValueError, match="files of wrong names"):
        msgspec.structs.replace(manifest, files=(ManifestFile(name=name, size_bytes=0, pieces=()),))
