"""Which engines are asked: those that hold the announced weights and are behind the router, whatever was lost."""

import anyio
import msgspec
import pytest
from aiohttp import ClientSession
from structlog.testing import capture_logs

from actors.rollout.engines.failures import MAX_RESTARTS
from messages import (
    EngineState,
    EngineStateChanged,
    EvalCompleted,
    EvalRequested,
    GroupAborted,
    GroupFailed,
    Int32Array,
    KillAnswered,
    KillRequested,
    Plane,
    Prompt,
    RolloutRequested,
    RoundHalted,
    SamplingParams,
)
from messages.subjects import stream_of
from runtime.bus.addresses import Address, address_key
from runtime.bus.bus import Bus
from runtime.bus.nats.store import api_call
from runtime.bus.roster import Roster
from runtime.process.actor import InputError
from runtime.settings.topology import Topology
from runtime.util.errors import flatten
from runtime.util.retrying import Backoff
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.rollout import (
    PROBE,
    announcement,
    completed,
    completed_groups,
    grade,
    next_event,
    rollout_actor,
    running_router,
    task,
    until_applied,
)
from tests.support.scripted_engine import ScriptedEngine, serving
from tests.support.tiny_engine import wait_until_200

pytestmark = pytest.mark.anyio

DEAD = "http://127.0.0.1:9"  # nobody listens there


def routed() -> Topology:
    return topology_with(engines={"policy": {"kind": "tiny", "concurrency": 8, "router": "sglang-router"}})


def under(version: int, group_id: int) -> RolloutRequested:
    """A task for weights of a version or later."""
    return msgspec.structs.replace(task(group_id), min_version=version)


async def test_a_router_that_never_answers_gives_way_to_the_next_one(bus: Bus, router_url: str) -> None:
    async with serving(ScriptedEngine()) as engine, rollout_actor(bus, DEAD, [engine], routed()):
        await bus.publish(announcement(1))
        await eventually(lambda: _is_on_roster(bus))
        await bus.kv.put(address_key("router", "policy", 0), Address(url=router_url))
        await until_applied(bus, 1)


async def _is_on_roster(bus: Bus) -> bool:
    return bool((await Roster(bus).members("rollout")).members)


async def test_requests_wait_for_a_lost_router_and_do_not_knock(bus: Bus, router_url: str) -> None:
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        with capture_logs() as logged, running_router() as (router, own_url):
            await anyio.to_thread.run_sync(wait_until_200, f"{own_url}/workers", router)
            async with rollout_actor(bus, own_url, [engine], routed()):
                await bus.publish(announcement(1))
                await until_applied(bus, 1)
                router.kill()
                router.wait(10)
                await bus.publish(task(0))
                await eventually(lambda: "router_lost" in [entry["event"] for entry in logged])
                await bus.kv.put(address_key("router", "policy", 0), Address(url=router_url))
                await completed(bus)
        group.cancel_scope.cancel()
    assert [entry["event"] for entry in logged].count("request_lost") == 2  # each of the two once


@pytest.mark.parametrize("topology", [topology_with(), routed()], ids=["direct", "sglang-router"])
async def test_an_engine_that_refuses_new_weights_is_asked_no_more(
    bus: Bus, router_url: str, topology: Topology
) -> None:
    async with (
        serving(ScriptedEngine()) as stale,
        serving(ScriptedEngine()) as current,
        anyio.create_task_group() as group,
    ):
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [stale, current], topology):
            await bus.publish(announcement(1))
            current_engines = set[str]()
            async with bus.read(EngineStateChanged) as changes:
                while len(current_engines) < 2:
                    change = await changes.next(10)
                    assert change is not None
                    if change.message.new is EngineState.CURRENT:
                        current_engines.add(change.message.engine)
            for group_id in range(16):  # of two, one may end before the other begins: both on one engine
                await bus.publish(under(1, group_id))
            await completed_groups(bus, 16)
            stale.refuses_weights = True
            await bus.publish(announcement(2))
            await until_applied(bus, 2)
            asked = len(stale.requests)
            for group_id in range(16, 20):
                await bus.publish(under(2, group_id))
            groups = await completed_groups(bus, 20)
        group.cancel_scope.cancel()
    assert asked > 0
    assert len(stale.requests) == asked
    assert {sample.first_version for event in groups[16:] for sample in event.samples} == {2}


async def test_an_older_announcement_that_comes_late_is_ignored(bus: Bus, router_url: str) -> None:
    """As of a trainer that was replaced and did not know it yet."""
    async with serving(ScriptedEngine()) as engine, rollout_actor(bus, router_url, [engine], topology_with()):
        await bus.publish(announcement(2))
        await until_applied(bus, 2)
        await bus.publish(announcement(1))
        await bus.publish(announcement(3))
        await until_applied(bus, 3)
    assert engine.updates == ["/weights/v2", "/weights/v3"]


async def test_an_engine_that_an_earlier_actor_left_at_the_router_is_not_asked(bus: Bus, router_url: str) -> None:
    async with (
        serving(ScriptedEngine(version="1")) as leftover,
        serving(ScriptedEngine()) as engine,
        ClientSession() as session,
        anyio.create_task_group() as group,
    ):
        async with session.post(f"{router_url}/workers", json={"url": leftover.url}) as answer:
            assert answer.status == 202
        await eventually(lambda: _lists(session, router_url, leftover.url))
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], routed()):
            await bus.publish(announcement(1))
            for group_id in range(4):
                await bus.publish(task(group_id))
            await completed_groups(bus, 4)
        group.cancel_scope.cancel()
    assert len(engine.requests) == 8
    assert leftover.requests == []


async def _lists(session: ClientSession, router_url: str, url: str) -> bool:
    async with session.get(f"{router_url}/workers") as answer:
        return url in [worker["url"] for worker in (await answer.json())["workers"]]


async def test_an_engine_that_began_anew_at_its_address_is_brought_to_the_weights(bus: Bus, router_url: str) -> None:
    """As one that is not ours does: nobody tells that it was restarted."""
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology_with()):
            await bus.publish(announcement(1))
            await until_applied(bus, 1)
            engine.version = "default"
            await bus.publish(task(0))
            event = await completed(bus)
        group.cancel_scope.cancel()
    assert [sample.first_version for sample in event.samples] == [1, 1]
    assert engine.updates == ["/weights/v1", "/weights/v1"]


@pytest.mark.slow
async def test_an_engine_that_the_router_lost_is_registered_again(bus: Bus, router_url: str) -> None:
    async with serving(ScriptedEngine()) as engine, ClientSession() as session, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], routed()):
            await bus.publish(announcement(1))
            await until_applied(bus, 1)
            async with session.get(f"{router_url}/workers") as answer:
                (worker,) = (await answer.json())["workers"]
            async with session.delete(f"{router_url}/workers/{worker['id']}"):
                pass
            await bus.publish(task(0))
            await completed(bus)
        group.cancel_scope.cancel()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals have their consequences soon."""
    monkeypatch.setattr("actors.rollout.engines.failures.REFUSED_PATIENCE_S", 0.4)
    monkeypatch.setattr("actors.rollout.engines.failures.RESTART_AFTER_S", 0.2)
    monkeypatch.setattr("actors.rollout.engines.fleet.RETRY", Backoff(first_s=0.05))


class Daemon:
    """Restarts engines one after the other, each at a new address, as a node daemon does."""

    def __init__(self, bus: Bus, *others: ScriptedEngine) -> None:
        self.asked: list[KillRequested] = []
        self._bus = bus
        self._others = list(others)

    async def kill(self, request: KillRequested) -> KillAnswered:
        self.asked.append(request)
        pid = 17 + len(self.asked)
        again = self._others.pop(0)
        await self._bus.kv.put(
            address_key("engine", "policy", 0), Address(url=again.url, agent=self._bus.name, pid=pid)
        )
        return KillAnswered(killed=True)


@pytest.mark.usefixtures("impatient")
async def test_weights_that_no_engine_takes_end_the_actor_with_the_reason(bus: Bus, router_url: str) -> None:
    """Tried again for ever, they would hold up the run without a word. It was started again as often as that helps."""
    errors: list[BaseException] = []
    engines = [ScriptedEngine(prompt_log_prob=-0.6) for _ in range(3)]
    async with serving(engines[0]), serving(engines[1]), serving(engines[2]):
        daemon = Daemon(bus, *engines[1:])
        try:
            async with (
                bus.serve({KillRequested: daemon.kill}),
                rollout_actor(bus, router_url, engines[:1], topology_with(), daemon=bus.name),
            ):
                await bus.publish(announcement(1, probe=PROBE))
                await anyio.sleep(20)
        except ExceptionGroup as group:
            errors = flatten(group)
    (error,) = errors
    assert isinstance(error, InputError), "no restart of the actor follows"
    assert str(error).startswith("no engine takes weights v1: engine.policy.0: its log-probs of the probe differ")
    assert "by 0.1 nats on average; allowed: 0.001, for float32" in str(error)
    assert "engines.policy.verify" in str(error)
    assert [request.gives_up for request in daemon.asked] == [False] * MAX_RESTARTS


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (ScriptedEngine(prompt_log_prob=-0.6), "engine.policy.0: its log-probs of the probe"),
        (ScriptedEngine(raw_answers={"/weights_checker": b"<html>"}), "http://"),
    ],
)
async def test_the_only_engine_is_started_again_when_it_goes_on_refusing(
    bus: Bus, router_url: str, wrong: ScriptedEngine, reason: str
) -> None:
    """What is wrong with it may be its process, as where one of its children was killed."""
    again = ScriptedEngine()
    async with serving(wrong), serving(again):
        daemon = Daemon(bus, again)
        async with (
            bus.serve({KillRequested: daemon.kill}),
            rollout_actor(bus, router_url, [wrong], topology_with(), daemon=bus.name),
        ):
            await bus.publish(announcement(1, probe=PROBE))
            await until_applied(bus, 1)
    assert [request.process for request in daemon.asked] == ["engine.policy.0"]
    assert daemon.asked[0].reason.startswith(f"it kept refusing weights 1: {reason}")


@pytest.mark.usefixtures("impatient")
async def test_an_engine_that_refuses_what_another_took_is_started_again(bus: Bus, router_url: str) -> None:
    wrong, right, again = ScriptedEngine(prompt_log_prob=-0.6), ScriptedEngine(), ScriptedEngine()
    async with serving(wrong), serving(right), serving(again):
        daemon = Daemon(bus, again)
        async with (
            bus.serve({KillRequested: daemon.kill}),
            rollout_actor(bus, router_url, [wrong, right], topology_with(), daemon=bus.name),
        ):
            await bus.publish(announcement(1, probe=PROBE))
            await eventually(lambda: again.updates != [])
    assert [request.process for request in daemon.asked] == ["engine.policy.0"]


@pytest.mark.usefixtures("impatient")
async def test_the_third_process_that_refuses_what_another_engine_took_is_given_up(bus: Bus, router_url: str) -> None:
    wrong, right, other = (ScriptedEngine(prompt_log_prob=price) for price in (-0.6, -0.5, -0.6))
    async with serving(wrong), serving(right), serving(other):
        daemon = Daemon(bus, other, wrong, other)
        async with (
            bus.serve({KillRequested: daemon.kill}),
            rollout_actor(bus, router_url, [wrong, right], topology_with(), daemon=bus.name),
        ):
            await bus.publish(announcement(1, probe=PROBE))
            await eventually(lambda: len(daemon.asked) == 3)
    assert [request.gives_up for request in daemon.asked] == [False, False, True]
    assert daemon.asked[-1].reason.startswith(
        "3 of its processes refused weights 1, which other engines hold: engine.policy.0: its log-probs of the probe"
    )


@pytest.mark.parametrize("path", ["/weights_checker", "/model_info"])
async def test_an_engine_that_answers_nonsense_does_not_end_the_actor(bus: Bus, router_url: str, path: str) -> None:
    engine = ScriptedEngine(raw_answers={path: b"<html>"})
    async with serving(engine), serving(ScriptedEngine()) as right, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine, right], topology_with()):
            await bus.publish(announcement(1))
            await until_applied(bus, 1)
            await bus.publish(task(0))
            await completed(bus)
        group.cancel_scope.cancel()


async def test_a_prompt_on_which_the_engine_keeps_failing_fails_its_group(
    bus: Bus, router_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.rollout.requests.sending.RESEND", Backoff(first_s=0.001))
    engine = ScriptedEngine(raw_answers={"/generate": b'{"text": 3}'})
    async with serving(engine), rollout_actor(bus, router_url, [engine], topology_with()):
        await bus.publish(announcement(1))
        await bus.publish(task(0))
        failed, _ = await next_event(bus, GroupFailed)
    assert isinstance(failed, GroupFailed)
    assert "unreadable answer" in failed.reason


def evaluation() -> EvalRequested:
    prompt = Prompt(data="e", row=0, text="p", prompt_ids=Int32Array([7]), label="1", rm_type="exact_match")
    return EvalRequested(
        step=0, set="test", item=0, version=1, prompt=prompt, num_samples=1, sampling=SamplingParams(max_new_tokens=8)
    )


async def test_a_halt_beside_an_evaluation_reaches_every_engine(bus: Bus, router_url: str) -> None:
    engines = [ScriptedEngine(hold=True), ScriptedEngine(hold=True)]
    async with serving(engines[0]), serving(engines[1]), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, engines, topology_with()):
            await bus.publish(announcement(1))
            await eventually(lambda: all(engine.updates for engine in engines))
            await bus.publish(evaluation())
            for group_id in range(2):
                await bus.publish(task(group_id))
            await eventually(lambda: sum(len(engine.requests) for engine in engines) == 5)
            await bus.publish(RoundHalted(incarnation=1, round=0))
            async with bus.read(GroupAborted) as events:
                assert all([await events.next(10) for _ in range(2)])
            for engine in engines:
                engine.release()
            ended, _ = await next_event(bus, EvalCompleted)
        group.cancel_scope.cancel()
    assert isinstance(ended, EvalCompleted)
    assert ended.samples[0].reward == 1.0


async def test_an_abort_of_everything_meets_no_request_of_the_next_round(bus: Bus, router_url: str) -> None:
    engine = ScriptedEngine(hold=True)
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology_with()):
            await bus.publish(announcement(1))
            await bus.publish(task(0))
            await engine.wait_for_requests(2)
            engine.abort_at = anyio.Event()
            await bus.publish(RoundHalted(incarnation=1, round=0))
            await bus.publish(task(1, round=1))
            await eventually(lambda: _has_taken(bus, 2))
            engine.abort_at.set()
            await next_event(bus, GroupAborted)
            await engine.wait_for_requests(4)
            engine.release()
            event = await completed(bus)
        group.cancel_scope.cancel()
    assert event.group_id == 1


async def _has_taken(bus: Bus, number: int) -> bool:
    consumer = f"{stream_of(bus.run, Plane.WORK)}.rollout-policy"
    info = await api_call(bus._connection, f"CONSUMER.INFO.{consumer}")
    return info["num_ack_pending"] == number
