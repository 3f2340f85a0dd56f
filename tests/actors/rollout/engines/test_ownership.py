"""The keys that fence rollout actors: the newest process drives an engine, whatever an earlier one has on its way."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler
from anyio.abc import Process

from actors.rollout.engines.ownership import Ownership, has_certainly_ended, own_identity
from actors.rollout.sglang.errors import EngineUnavailable
from messages import GroupCompleted, SegmentsPublished
from runtime.bus.addresses import BUS_URL_VARIABLE, Address, address_key
from runtime.bus.bus import Bus
from runtime.bus.errors import BusUnavailable, Fenced
from runtime.bus.kv import KeyValues
from runtime.node.claims.rundir import TOPOLOGY_FILE
from runtime.settings.topology import Topology, encode_topology
from runtime.util.exit_codes import EXIT_FENCED
from tests.build.topology import topology_with
from tests.fixtures.nats import NatsServer, eventually
from tests.support.rollout import announcement, completed_groups, grade, rollout_actor, task, until_applied
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[4]
URL = "http://e"
SHORT_S = 1.0  # lifetime of a key
PROGRAM = f"""
import sys
from actors.host import end, main
from actors.rollout.engines.ownership import Ownership
Ownership.__init__.__kwdefaults__["lifetime_s"] = {SHORT_S}
end(main(sys.argv[1:]))
"""
STAGES = {  # what the first actor has on its way when it stands still
    "pause": "/pause_generation",
    "update": "/update_weights_from_disk",
    "continue": "/continue_generation",
}


async def begun(bus: Bus, instance: str, *, lifetime_s: float = 0.0) -> Ownership:
    own = Ownership(bus.kv, "policy", instance, lifetime_s=lifetime_s)
    await own.begin()
    return own


async def test_the_later_process_has_the_engine_and_the_earlier_one_may_call_it_no_more(bus: Bus) -> None:
    first, second = await begun(bus, "rollout.0"), await begun(bus, "rollout.0")
    await first.claim("engine.policy.0", URL)
    await first.claim("engine.policy.1", "http://f")
    await first.check(URL)
    await second.claim("engine.policy.0", URL)
    await second.check(URL)
    with pytest.raises(Fenced, match=r"drives engine\.policy\.0 now"):
        await first.check(URL)
    with pytest.raises(Fenced):
        await first.check("http://f")  # a process is fenced as a whole


async def test_an_earlier_process_does_not_take_an_engine_back(bus: Bus) -> None:
    first, second = await begun(bus, "rollout.0"), await begun(bus, "rollout.1")
    await second.claim("engine.policy.0", URL)
    with pytest.raises(Fenced):
        await first.claim("engine.policy.0", URL)


async def test_who_starts_later_is_later_whatever_its_name(bus: Bus) -> None:
    """Another number of rollout actors may drive the engines after a resume."""
    first, second = await begun(bus, "rollout"), await begun(bus, "rollout.1")
    await first.claim("engine.policy.0", URL)
    await second.claim("engine.policy.0", URL)
    with pytest.raises(Fenced):
        await first.confirm()


async def test_the_successor_of_one_that_ended_in_order_need_not_wait(bus: Bus) -> None:
    first, second = await begun(bus, "rollout"), await begun(bus, "rollout", lifetime_s=1000.0)
    async with anyio.create_task_group() as group:
        group.start_soon(first.run)
        await first.claim("engine.policy.0", URL)
        group.cancel_scope.cancel()
    with anyio.fail_after(200):
        await second.claim("engine.policy.0", URL)


async def test_a_key_that_is_gone_is_written_again(bus: Bus) -> None:
    own, later = await begun(bus, "rollout"), await begun(bus, "rollout")
    await own.claim("engine.policy.0", URL)
    await bus.kv.delete("owner.policy.engine.policy.0")
    await own.check(URL)
    await later.claim("engine.policy.0", URL)
    with pytest.raises(Fenced):
        await own.check(URL)


async def test_an_engine_is_not_called_while_its_owner_cannot_be_read(bus: Bus) -> None:
    class Bucket:
        """The run's bucket, which can be away."""

        def __init__(self) -> None:
            self.away = False

        def __getattr__(self, name: str) -> Any:
            if self.away:
                raise BusUnavailable("no server")
            return getattr(bus.kv, name)

    bucket = Bucket()
    own, fresh = (
        Ownership(cast(KeyValues, bucket), "policy", "rollout", lifetime_s=lifetime_s) for lifetime_s in (0.0, 1000.0)
    )
    for number, each in enumerate((own, fresh)):
        await each.begin()
        await each.claim(f"engine.policy.{number}", URL)
    bucket.away = True
    with pytest.raises(EngineUnavailable, match="its owner cannot be read"):
        await own.check(URL)
    await own.check("http://nobody-owns-it")
    await fresh.check(URL)  # it was read a moment ago


def test_a_process_has_certainly_ended_only_if_this_machine_can_tell() -> None:
    own = own_identity()
    boot, namespace, pid, begun = own.split(" ")
    with subprocess.Popen(["sleep", "1000"]) as process:
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        child = f"{boot} {namespace} {process.pid} {ticks}"
        assert not has_certainly_ended(own)
        assert not has_certainly_ended(child)
        process.kill()
    assert has_certainly_ended(child)
    assert has_certainly_ended(f"{boot} {namespace} {pid} {int(begun) - 1}")  # its number was given again
    assert not has_certainly_ended(f"other {namespace} {process.pid} {ticks}")
    assert not has_certainly_ended(f"{boot} pid:[1] {process.pid} {ticks}")  # of another container
    assert not has_certainly_ended("")


class HoldingEngine(ScriptedEngine):
    """Holds one call before it carries it out, and answers no request while it is paused."""

    path: str = ""  # of the next call to hold

    def app(self) -> web.Application:
        self.arrived, self.goes_on = anyio.Event(), anyio.Event()

        @web.middleware
        async def hold(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self.path and request.path == self.path:
                self.path = ""
                self.arrived.set()
                await self.goes_on.wait()
            return await handler(request)

        app = super().app()
        app.middlewares.append(hold)
        return app

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        await eventually(lambda: not self.paused)
        return await super()._generate(request)


@asynccontextmanager
async def other_process(
    url: str, directory: Path, topology: Topology, engines: Sequence[ScriptedEngine], bus: Bus
) -> AsyncGenerator[Process]:
    """Run a rollout actor in a process of its own."""
    (directory / TOPOLOGY_FILE).write_bytes(encode_topology(topology))
    for index, engine in enumerate(engines):
        await bus.kv.put(address_key("engine", "policy", index), Address(url=engine.url))
    env = {**os.environ, "PYTHONPATH": str(ROOT), BUS_URL_VARIABLE: url}
    command = [sys.executable, "-c", PROGRAM, str(directory), "rollout"]
    async with await anyio.open_process(command, env=env, stdin=None, stdout=None, stderr=None) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):  # it has ended
                process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage", ["update", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("pause", "continue"))]
)
async def test_a_call_of_an_actor_that_stood_still_changes_nothing_for_its_successor(
    bus: Bus, nats_server: NatsServer, tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call lands on the engine after the successor has verified its own weights there."""
    monkeypatch.setitem(cast(dict[str, Any], Ownership.__init__.__kwdefaults__), "lifetime_s", SHORT_S)
    pool = {"kind": "tiny", "concurrency": 8, "first_token_after_s": 2}
    topology = topology_with(
        run={"name": bus.run}, engines={"policy": pool}, rollout={"on_weight_update": "retract", "max_staleness": 1}
    )
    engine, events = HoldingEngine(), list[GroupCompleted]()
    async with (
        serving(engine),
        other_process(nats_server.url, tmp_path, topology, [engine], bus) as first,
        anyio.create_task_group() as group,
    ):
        group.start_soon(grade, bus)
        await bus.publish(announcement(1))
        await until_applied(bus, 1)
        engine.path = STAGES[stage]
        await bus.publish(announcement(2, step=1))
        await engine.arrived.wait()
        first.send_signal(signal.SIGSTOP)
        stale = engine.update_bodies[-1]["weight_version"]
        async with rollout_actor(bus, "", [engine], topology):
            await until_applied(bus, 2)
            assert engine.version != stale
            engine.goes_on.set()
            first.send_signal(signal.SIGCONT)
            with anyio.fail_after(200):
                assert await first.wait() == EXIT_FENCED
            for group_id in range(4):
                await bus.publish(task(group_id))
            events = await completed_groups(bus, 4)
            await eventually(lambda: engine.version != stale and not engine.paused)
        group.cancel_scope.cancel()
    refs = [ref for event in events for sample in event.samples for ref in sample.segments]
    segments = [(await bus.fetch(SegmentsPublished, ref.seq)).segments[ref.position] for ref in refs]
    assert len(segments) == 8
    assert {span.version for segment in segments for span in segment.weight_spans} == {2}
