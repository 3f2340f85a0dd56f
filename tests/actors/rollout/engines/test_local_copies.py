"""Engines read weights from their node's copy, which is made while they generate; who gets none is told of."""

from collections.abc import Callable

import anyio
import pytest

from messages import FileSum, LocalCopyGiven, LocalCopyRequested, WeightsRefused
from runtime.bus.bus import Bus
from runtime.settings.topology import Topology
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.rollout import announcement, completed, grade, next_event, rollout_actor, task, until_applied
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio


class Daemon:
    """Answers requests for local copies as a node daemon does."""

    def __init__(self) -> None:
        self.asked: list[LocalCopyRequested] = []
        self.open = anyio.Event()
        self.open.set()
        self.answer: Callable[[LocalCopyRequested], LocalCopyGiven] = lambda request: LocalCopyGiven(
            path=f"/copies/v{request.version}"
        )

    async def copy(self, request: LocalCopyRequested) -> LocalCopyGiven:
        self.asked.append(request)
        await self.open.wait()
        return self.answer(request)


def with_changes(**pool: object) -> Topology:
    policy = {"kind": "tiny", "concurrency": 8, **pool}
    return topology_with(trainer={"full_export_interval": 4}, engines={"policy": policy})


async def test_an_engine_generates_while_its_node_copies_and_then_reads_the_copy(bus: Bus, router_url: str) -> None:
    daemon = Daemon()
    async with (
        bus.serve({LocalCopyRequested: daemon.copy}),
        serving(ScriptedEngine()) as engine,
        anyio.create_task_group() as group,
    ):
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], with_changes(), daemon=bus.name):
            await bus.publish(announcement(1))
            await until_applied(bus, 1)
            daemon.open = anyio.Event()
            await bus.publish(announcement(2, kind="delta", base_version=1, delta_bytes=1))
            await eventually(lambda: len(daemon.asked) == 2)
            calls = list(engine.calls)
            await bus.publish(task(0))
            await completed(bus)  # under version 1
            assert engine.calls == calls  # neither paused nor updated
            daemon.open.set()
            await until_applied(bus, 2)
        group.cancel_scope.cancel()
    assert engine.updates == ["/copies/v1", "/copies/v2"]
    assert [(one.version, one.checksum, one.path) for one in daemon.asked] == [
        (1, "sum", "/weights/v1"),
        (2, "sum", "/weights/v2"),
    ]
    assert not any(one.doubted for one in daemon.asked)


async def test_whole_versions_are_copied_only_where_that_is_asked_for(bus: Bus, router_url: str) -> None:
    daemon = Daemon()
    for local_copy, path in ((False, "/weights/v1"), (True, "/copies/v1")):
        topology = topology_with(engines={"policy": {"kind": "tiny", "concurrency": 8, "local_copy": local_copy}})
        async with bus.serve({LocalCopyRequested: daemon.copy}), serving(ScriptedEngine()) as engine:
            async with rollout_actor(bus, router_url, [engine], topology, daemon=bus.name):
                await bus.publish(announcement(1))
                await eventually(lambda engine=engine: engine.held == 1)
        assert engine.updates == [path]


async def test_an_engine_without_a_copy_is_told_of_and_takes_the_next_version(bus: Bus, router_url: str) -> None:
    daemon = Daemon()
    async with bus.serve({LocalCopyRequested: daemon.copy}), serving(ScriptedEngine()) as engine:
        async with rollout_actor(bus, router_url, [engine], with_changes(), daemon=bus.name):
            await bus.publish(announcement(1))
            await until_applied(bus, 1)
            daemon.answer = lambda request: LocalCopyGiven(
                path="" if request.version == 2 else f"/copies/v{request.version}", reason="layers.1.w is damaged"
            )
            await bus.publish(announcement(2))
            refused, _ = await next_event(bus, WeightsRefused)
            await bus.publish(announcement(3))
            await until_applied(bus, 3)
    assert isinstance(refused, WeightsRefused)
    assert (refused.version, refused.reason) == (2, "no copy of version 2 on its node: layers.1.w is damaged")
    assert engine.updates == ["/copies/v1", "/copies/v3"]


async def test_an_engine_that_fails_with_its_copy_has_it_looked_at(bus: Bus, router_url: str) -> None:
    daemon = Daemon()
    async with bus.serve({LocalCopyRequested: daemon.copy}), serving(ScriptedEngine(refuses_weights=True)) as engine:
        async with rollout_actor(bus, router_url, [engine], with_changes(), daemon=bus.name):
            await bus.publish(announcement(1))
            await eventually(lambda: len(daemon.asked) >= 3)
            engine.refuses_weights = False
            await until_applied(bus, 1)
    assert [one.doubted for one in daemon.asked][:3] == [False, True, True]


async def test_a_copy_that_was_damaged_when_an_engine_had_read_it_is_made_again(bus: Bus, router_url: str) -> None:
    daemon = Daemon()
    right = daemon.answer

    def damaged_once(request: LocalCopyRequested) -> LocalCopyGiven:
        if not request.was_read:
            return right(request)
        daemon.answer = right
        return LocalCopyGiven(reason="/copies/v1/model.safetensors: damaged")

    daemon.answer = damaged_once
    files = {"model.safetensors": FileSum(size_bytes=9, crc32=7)}
    async with bus.serve({LocalCopyRequested: daemon.copy}), serving(ScriptedEngine()) as engine:
        async with rollout_actor(bus, router_url, [engine], with_changes(), daemon=bus.name):
            await bus.publish(announcement(1, files=files))
            refused, _ = await next_event(bus, WeightsRefused)
            await until_applied(bus, 1)
    assert isinstance(refused, WeightsRefused)
    assert refused.reason == "its node's copy of version 1: /copies/v1/model.safetensors: damaged"
    assert not refused.unusable  # the published files may be right
    asked = [(one.doubted, one.was_read, one.path) for one in daemon.asked]
    assert asked[:2] == [(False, False, "/weights/v1"), (False, True, "/copies/v1")]
    assert asked[-2:] == [(True, False, "/weights/v1"), (False, True, "/copies/v1")]
    assert all(one.files == files for one in daemon.asked)


async def test_what_no_agent_can_copy_is_unusable(bus: Bus, router_url: str) -> None:
    daemon = Daemon()
    daemon.answer = lambda _: LocalCopyGiven(reason="delta-00001.bin: damaged", unusable=True)
    async with bus.serve({LocalCopyRequested: daemon.copy}), serving(ScriptedEngine()) as engine:
        async with rollout_actor(bus, router_url, [engine], with_changes(), daemon=bus.name):
            await bus.publish(announcement(1))
            refused, _ = await next_event(bus, WeightsRefused)
    assert isinstance(refused, WeightsRefused)
    assert (refused.unusable, refused.reason) == (True, "no copy of version 1 on its node: delta-00001.bin: damaged")


async def test_an_agent_that_comes_late_is_asked_until_it_answers_and_not_longer_than_the_deadline(
    bus: Bus, router_url: str
) -> None:
    daemon = Daemon()
    async with (
        serving(ScriptedEngine()) as engine,
        rollout_actor(bus, router_url, [engine], with_changes(update_stall_s=1), daemon=bus.name),
    ):
        await bus.publish(announcement(1))
        refused, _ = await next_event(bus, WeightsRefused)
        assert isinstance(refused, WeightsRefused)
        assert refused.reason.endswith("did not answer within 1 s")
        async with bus.serve({LocalCopyRequested: daemon.copy}):
            await until_applied(bus, 1)
