"""Sessions on a rollout actor's side: calls of the trainer meet tasks of engines."""

import asyncio
from collections.abc import Callable

import anyio
import msgspec
import pytest

from actors.rollout.engines.target import FleetTarget
from actors.rollout.engines.weights import sync as sync_module
from actors.rollout.engines.weights.sync import MemberShape, SyncClosed, SyncMember, WeightSyncs
from messages import BucketSent, WeightSyncAnswered, WeightSyncDecided, WeightSyncPrepared
from tests.support.rollout import announcement

pytestmark = pytest.mark.anyio

BUCKET = BucketSent(session="1.1", stage=0, index=0, names=("a",), dtypes=("float32",), shapes=((1,),))
ABORT = WeightSyncDecided(session="1.1", is_commit=False, reason="the trainer ended it")
COMMIT = WeightSyncDecided(session="1.1", is_commit=True, checksum="c", num_buckets=1)


def prepare(
    session: str = "1.1",
    *,
    incarnation: int = 1,
    version: int = 1,
    deadline_s: float = 5.0,
    part: int = 0,
    parts: int = 1,
) -> WeightSyncPrepared:
    return WeightSyncPrepared(
        session=session, incarnation=incarnation, version=version, deadline_s=deadline_s, part=part, num_parts=parts
    )


async def call(of: WeightSyncs, step: WeightSyncPrepared | BucketSent | WeightSyncDecided) -> WeightSyncAnswered:
    """As the bus does."""
    if isinstance(step, WeightSyncPrepared):
        return await of.prepared(step)
    return await (of.decided(step) if isinstance(step, WeightSyncDecided) else of.step(step))


def syncs(*lacking: str) -> WeightSyncs:
    """Engines are to take version 1; those named may be asked, and lack it."""
    target = FleetTarget()
    target.weights = announcement(1)
    return WeightSyncs(target, lambda: lacking)


PLACE = MemberShape(num_ranks=2, is_compared=False)


class Engine:
    """Takes part once, and does what it is asked."""

    def __init__(self, of: WeightSyncs, name: str, *, fails_at: type | None = None, version: int = 1) -> None:
        self._of = of
        self._name = name
        self._fails_at = fails_at
        self._version = version
        self.did: list[type] = []
        self.error = ""

    async def run(self) -> None:
        try:
            async with self._of.member(self._name, f"{self._name}.x", PLACE, self._version) as member:
                await self._take(member)
                member.finish()
        except (SyncClosed, RuntimeError) as error:
            self.error = str(error)

    async def _take(self, member: SyncMember) -> None:
        while not member.session:  # noqa: ASYNC110 - as the engine's target tells it
            await anyio.sleep(0.001)
        while not self.did or self.did[-1] is not WeightSyncDecided:
            step = type(await member.next())
            if step is self._fails_at:
                raise RuntimeError(f"{self._name} cannot")
            self.did.append(step)


async def test_each_step_is_answered_when_all_members_did_it() -> None:
    of = syncs("a", "b")
    a, b = Engine(of, "a"), Engine(of, "b")
    with anyio.fail_after(200):
        async with anyio.create_task_group() as group:
            group.start_soon(a.run)
            group.start_soon(b.run)
            for _ in range(2):  # the second time its answer was lost
                answer = await of.prepared(prepare())
                members = [(each.engine, each.key, each.num_ranks) for each in answer.members]
                assert (members, answer.failed) == ([("a", "a.x", 2), ("b", "b.x", 2)], {})
            assert (await of.step(BUCKET)).failed == {}
            for _ in range(2):
                assert (await of.decided(COMMIT)).failed == {}
    assert a.did == b.did == [WeightSyncPrepared, BucketSent, WeightSyncDecided]


@pytest.mark.parametrize("fails_at", [WeightSyncPrepared, BucketSent, WeightSyncDecided])
async def test_one_that_fails_says_why_and_goes_on_saying_so(fails_at: type) -> None:
    of = syncs("a", "b")
    a, b = Engine(of, "a", fails_at=fails_at), Engine(of, "b")
    with anyio.fail_after(200):
        async with anyio.create_task_group() as group:
            group.start_soon(a.run)
            group.start_soon(b.run)
            said = [(await call(of, step)).failed for step in (prepare(), BUCKET, COMMIT)]
    failed = [WeightSyncPrepared, BucketSent, WeightSyncDecided].index(fails_at)
    assert said == [{}] * failed + [{"a": "a cannot"}] * (3 - failed)
    assert b.error == ""


async def test_a_long_step_is_answered_while_its_engine_works_and_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_module, "ANSWER_S", 0.02)
    may_go_on, target = anyio.Event(), FleetTarget()
    target.weights = announcement(1)
    of = WeightSyncs(target, lambda: ("a",), doing=lambda engine: f"{engine} works")
    taken: list[type] = []

    async def run() -> None:
        async with of.member("a", "a.x", PLACE, 1) as member:
            while not member.session:  # noqa: ASYNC110 - as the engine's target tells it
                await anyio.sleep(0.001)
            taken.append(type(await member.next()))
            await may_go_on.wait()
            taken.append(type(await member.next()))
            member.finish()

    with anyio.fail_after(200):
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            assert [(await of.prepared(prepare())).pending for _ in range(3)] == [{"a": "a works"}] * 3
            may_go_on.set()
            for _ in range(2):  # the second time its answer was lost
                while (answer := await of.prepared(prepare())).pending:
                    pass
                assert (answer.failed, [each.engine for each in answer.members]) == ({}, ["a"])
            assert (await of.decided(COMMIT)) == WeightSyncAnswered()
    assert taken == [WeightSyncPrepared, WeightSyncDecided]


async def test_an_engine_waits_for_its_next_step_as_long_as_the_trainer_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, later_s = asyncio.get_running_loop(), 0.0
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + later_s)
    of = syncs("a")
    a = Engine(of, "a")
    with anyio.fail_after(10_000):
        async with anyio.create_task_group() as group:
            group.start_soon(a.run)
            for _ in range(5):  # another engine takes its time; each call is of the same step
                assert (await of.prepared(prepare(deadline_s=500.0))).failed == {}
                later_s += 400.0
                await anyio.sleep(0.01)
            assert (await of.step(BUCKET)).failed == {}
            later_s += 501.0
    assert "no step of weight sync 1.1 arrived within 500 s" in a.error


async def test_engines_that_may_be_asked_and_are_not_ready_yet_are_waited_for() -> None:
    of, found = syncs("a"), []

    async def ask() -> None:
        found.extend((await of.prepared(prepare())).members)

    with anyio.fail_after(200):
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            assert not found
            group.start_soon(Engine(of, "a").run)
            with anyio.fail_after(200):
                while not found:  # noqa: ASYNC110 - by the task above
                    await anyio.sleep(0.001)
            await of.decided(ABORT)


async def test_an_offer_to_a_part_of_the_engines_takes_and_waits_for_those_alone() -> None:
    target = FleetTarget()
    target.weights = announcement(1)
    of = WeightSyncs(target, lambda: ("a", "b"), lambda engine, _num_parts: "ab".index(engine))
    a, b = Engine(of, "a"), Engine(of, "b")
    with anyio.fail_after(200):
        async with anyio.create_task_group() as group:
            group.start_soon(b.run)
            for part, engine in ((1, b), (0, a)):
                if part == 0:
                    group.start_soon(a.run)
                session = f"1.{part + 1}"
                members = (await of.prepared(prepare(session, part=part, parts=2))).members
                assert [member.engine for member in members] == [engine._name]
                for step in (BUCKET, COMMIT):
                    assert (await call(of, msgspec.structs.replace(step, session=session))).failed == {}
    assert a.did == b.did == [WeightSyncPrepared, BucketSent, WeightSyncDecided]


async def test_without_them_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_module, "GATHER_S", 0.05)
    with anyio.fail_after(200):
        assert (await syncs("a").prepared(prepare())).members == ()


async def test_while_an_evaluation_holds_engines_back_nobody_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_module, "GATHER_S", 0.05)
    assert await syncs().prepared(prepare(version=2)) == WeightSyncAnswered()


async def close_by_call(of: WeightSyncs) -> None:
    await of.decided(ABORT)


async def close_by_another(of: WeightSyncs) -> None:
    assert (await of.prepared(prepare("2.1", incarnation=2))).members == ()


async def close_for_the_trainer_s_turn(of: WeightSyncs) -> None:
    of.end("the trainer took the GPU memory back")


@pytest.mark.parametrize(
    ("close", "reason"),
    [
        (close_for_the_trainer_s_turn, "a: weight sync 1.1 was closed: the trainer took the GPU memory back"),
        (close_by_call, "a: weight sync 1.1 was closed: the trainer ended it"),
        (close_by_another, "a: weight sync 1.1 was closed: another weight sync began"),
    ],
)
async def test_a_session_that_is_closed_ends_for_its_members(
    close: Callable[..., object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_module, "GATHER_S", 0.05)
    of = syncs()
    engine = Engine(of, "a")
    with anyio.fail_after(200):
        async with anyio.create_task_group() as group:
            group.start_soon(engine.run)
            await anyio.wait_all_tasks_blocked()
            await of.prepared(prepare())
            await close(of)  # type: ignore[misc]
    assert engine.error == reason
    for step in (BUCKET, COMMIT):
        with pytest.raises(ValueError, match=r"weight sync 1\.1 is not open here"):
            await call(of, step)


async def test_a_weight_sync_that_was_closed_is_not_opened_by_a_repeated_call() -> None:
    of = syncs()
    await of.prepared(prepare())
    await of.decided(ABORT)
    with pytest.raises(ValueError, match=r"weight sync 1\.1 is not open here"):
        await of.prepared(prepare())


async def test_a_trainer_that_died_leaves_nobody_waiting() -> None:
    of = syncs()
    engine = Engine(of, "a")
    with anyio.fail_after(200):
        async with anyio.create_task_group() as group:
            group.start_soon(engine.run)
            await anyio.wait_all_tasks_blocked()
            await of.prepared(prepare(deadline_s=0.05))
    assert engine.error == "a: no step of weight sync 1.1 arrived within 0.05 s"


async def test_an_older_trainer_leads_nobody() -> None:
    of = syncs()
    await of.prepared(prepare("2.1", incarnation=2))
    with pytest.raises(ValueError, match="trainer 1 was replaced by trainer 2"):
        await of.prepared(prepare("1.9", incarnation=1))
