"""Node daemons share weights: a room's address is in the run's bucket, and a node's copy is made of what it fetched."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

from actors.rollout.engines.weights.adapters import base_announcement
from actors.rollout.engines.weights.files import CopyDamaged, NodeCopies
from actors.trainer.weights.publish import Published, Versions
from messages import LocalCopyGiven, LocalCopyRequested
from runtime.bus.bus import Bus
from runtime.http.room import RoomAddress
from runtime.models.checksums import checksums_of
from runtime.models.delta import Version
from runtime.models.file_sums import sum_of
from runtime.models.manifest import write_manifest
from runtime.models.safetensors import ADAPTER_FILE
from runtime.models.versions import name_of
from runtime.node.copying import LocalCopies
from runtime.node.sharing import Sharing
from runtime.settings.placement import UpdateLimits
from tests.support.published import changed, drawn, flip, publish
from tests.support.rollout import announcement

pytestmark = pytest.mark.anyio


def publishing(directory: Path) -> list[Published]:
    """A whole version and a delta to it, as the trainer at home publishes them."""
    (model := directory / "model").mkdir()
    (model / "config.json").write_text("{}")
    versions = Versions(directory / "weights", model, every=4, is_fetched=True)
    return [publish(versions, 1, drawn()), publish(versions, 2, changed(drawn(), 1))]


def request(published: Published, number: int, *, doubted: bool = False) -> LocalCopyRequested:
    """What a rollout actor asks, wherever it is: the path is home's."""
    return LocalCopyRequested(
        version=number,
        checksum=published.checksum,
        path=f"/not/here/v{number:06d}",
        timeout_s=30.0,
        doubted=doubted,
        files=dict(published.files),
        manifest=published.manifest,
    )


def node(name: str, directory: Path, *, is_home: bool = False) -> Sharing:
    return Sharing(directory, name, None, is_home=is_home, show=print)


def published_adapter(root: Path, number: int) -> Published:
    """A version as the trainer publishes an adapter."""
    (path := root / name_of(number)).mkdir(parents=True)
    save_file({"base_model.model.q_proj.lora_A.weight": torch.full((4, 8), float(number))}, path / ADAPTER_FILE)
    (path / "adapter_config.json").write_text(f'{{"r": {number}}}')
    files, checksum = {each.name: sum_of(each) for each in path.iterdir()}, checksums_of(path).total
    manifest = write_manifest(path, Version(number, checksum))
    return Published(path, checksum, 0, 0.0, files=files, manifest=manifest)


@asynccontextmanager
async def running(bus: Bus, *nodes: Sharing) -> AsyncGenerator[None]:
    async with anyio.create_task_group() as tasks:
        for each in nodes:
            tasks.start_soon(each.run, bus)
        yield
        tasks.cancel_scope.cancel()


async def check(given: LocalCopyGiven, published: Published) -> Path:
    assert given.path, given.reason
    found = await anyio.to_thread.run_sync(checksums_of, Path(given.path))
    assert found.total == published.checksum
    return Path(given.path)


async def test_a_node_makes_its_copies_of_what_it_fetched_and_mends_a_damaged_one(bus: Bus, tmp_path: Path) -> None:
    (at_home := tmp_path / "home").mkdir()
    versions = publishing(at_home)
    away = tmp_path / "n1"
    sharing = node("n1", away)
    copies = LocalCopies(away / "copies", sharing)
    async with running(bus, node("local", at_home, is_home=True), sharing):
        whole = await check(await copies.answer(request(versions[0], 1)), versions[0])
        assert whole.is_relative_to(away / "copies")
        delta = await check(await copies.answer(request(versions[1], 2)), versions[1])
        assert sorted(each.name for each in (away / "fetched" / "n1").iterdir()) == ["v000001", "v000002"]
        for copy in (whole, delta):  # a whole one shares its file with what was fetched
            flip(copy / "model.safetensors", -1)
        await check(await copies.answer(request(versions[0], 1, doubted=True)), versions[0])
        await check(await copies.answer(request(versions[1], 2, doubted=True)), versions[1])


async def test_adapters_and_their_base_are_fetched_and_kept_side_by_side(bus: Bus, tmp_path: Path) -> None:
    """A base and adapters have the same numbers, and the base stays however many adapters come after it."""
    (at_home := tmp_path / "home").mkdir()
    (model := at_home / "model").mkdir()
    (model / "config.json").write_text("{}")
    bases = Versions(at_home / "weights" / "adapters" / "base", model, is_fetched=True)
    base = publish(bases, 1, drawn())
    versions = [published_adapter(at_home / "weights" / "adapters", number) for number in range(1, 5)]
    told = [
        announcement(
            number,
            kind="lora",
            path="/not/here",
            checksum=each.checksum,
            files=dict(each.files),
            manifest=each.manifest,
            base=base.as_base,
        )
        for number, each in enumerate(versions, 1)
    ]
    sharing = node("n1", tmp_path / "n1")
    copies = LocalCopies(tmp_path / "n1" / "copies", sharing)
    files = NodeCopies(bus, "agent.n1", UpdateLimits(stall_s=30.0))  # as a rollout actor asks the node daemon
    answering = bus.serve({LocalCopyRequested: copies.answer}, instance="agent.n1")
    async with running(bus, node("local", at_home, is_home=True), sharing), answering:
        whole = await files.provide(base_announcement(told[0], base.as_base), doubted=False)
        newest = [await files.provide(each, doubted=False) for each in told][-1]
        await files.check_read(newest)
        place = Path(newest.path)
        assert (place / "adapter_config.json").read_text() == '{"r": 4}'
        flip(place / ADAPTER_FILE, -1)
        with pytest.raises(CopyDamaged):
            await files.check_read(newest)
        assert await files.provide(told[-1], doubted=True) == newest
        await check(LocalCopyGiven(path=newest.path), versions[-1])
        await check(LocalCopyGiven(path=whole.path), base)


async def test_a_third_node_fetches_from_the_second_once_home_has_left(bus: Bus, tmp_path: Path) -> None:
    (at_home := tmp_path / "home").mkdir()
    versions = publishing(at_home)
    second, third = node("n1", tmp_path / "n1"), node("n2", tmp_path / "n2")
    async with running(bus, second):
        async with running(bus, node("local", at_home, is_home=True)):
            await check(
                await LocalCopies(tmp_path / "n1" / "copies", second).answer(request(versions[0], 1)), versions[0]
            )
        rooms = await bus.kv.entries("room.*", RoomAddress)
        assert [room.value.node for room in rooms if room.value is not None] == ["n1"]
        async with running(bus, third):
            await check(
                await LocalCopies(tmp_path / "n2" / "copies", third).answer(request(versions[0], 1)), versions[0]
            )
