"""Sessions on a rollout actor's side: calls of the trainer meet tasks of engines."""

from collections.abc import Callable

import anyio
import msgspec
import pytest

from actors.rollout.engines.target import FleetTarget
from actors.rollout.engines.weights import sync as sync_module
from actors.rollout.engines.weights.sync import MemberShape, SyncClosed, SyncMember, WeightSyncs
from messages import (
    BucketSent,
    EnginesAnswered,
    WeightSyncClosed,
    WeightSyncFinished,
    WeightSyncOffered,
    WeightSyncPrepared,
)
from tests.support.rollout import announcement

pytestmark = pytest.mark.anyio

BUCKET = BucketSent(session="1.1", stage=0, index=0, names=("a",), dtypes=("float32",), shapes=((1,),))
STEPS = (WeightSyncPrepared(session="1.1"), BUCKET, WeightSyncFinished(session="1.1", checksum="c", num_buckets=1))


def offer(
    session: str = "1.1", *, incarnation: int = 1, version: int = 1, deadline_s: float = 5.0
) -> WeightSyncOffered:
    return WeightSyncOffered(session=session, incarnation=incarnation, version=version, deadline_s=deadline_s)


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
        except (SyncClosed, RuntimeError) as error:
            self.error = str(error)

    async def _take(self, member: SyncMember) -> None:
        while not member.session:  # noqa: ASYNC110 - as the engine's target tells it
            await anyio.sleep(0.001)
        while not self.did or self.did[-1] is not WeightSyncFinished:
            step = type(await member.next())
            if step is self._fails_at:
                raise RuntimeError(f"{self._name} cannot")
            self.did.append(step)


async def test_each_step_is_answered_when_all_members_did_it() -> None:
    of = syncs("a", "b")
    a, b = Engine(of, "a"), Engine(of, "b")
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(a.run)
            group.start_soon(b.run)
            members = (await of.offered(offer())).members
            assert [(each.engine, each.key, each.num_ranks) for each in members] == [("a", "a.x", 2), ("b", "b.x", 2)]
            for step in STEPS:
                assert (await of.step(step)).failed == {}
            again = await of.step(STEPS[-1])  # its answer was lost
            assert again.failed == {}
    assert a.did == b.did == [WeightSyncPrepared, BucketSent, WeightSyncFinished]


@pytest.mark.parametrize("fails_at", [WeightSyncPrepared, BucketSent, WeightSyncFinished])
async def test_one_that_fails_says_why_and_goes_on_saying_so(fails_at: type) -> None:
    of = syncs("a", "b")
    a, b = Engine(of, "a", fails_at=fails_at), Engine(of, "b")
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(a.run)
            group.start_soon(b.run)
            await of.offered(offer())
            said = [(await of.step(step)).failed for step in STEPS]
    failed = [WeightSyncPrepared, BucketSent, WeightSyncFinished].index(fails_at)
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

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await of.offered(offer())
            assert [(await of.step(STEPS[0])).pending for _ in range(3)] == [{"a": "a works"}] * 3
            may_go_on.set()
            for _ in range(2):  # the second time its answer was lost
                while (answer := await of.step(STEPS[0])).pending:
                    pass
                assert answer == EnginesAnswered(failed={})
            assert (await of.step(STEPS[2])) == EnginesAnswered(failed={})
    assert taken == [WeightSyncPrepared, WeightSyncFinished]


async def test_an_engine_waits_for_its_next_step_as_long_as_the_trainer_calls() -> None:
    of = syncs("a")
    a = Engine(of, "a")
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(a.run)
            await of.offered(offer(deadline_s=0.5))
            for _ in range(5):  # another engine takes its time; each call is of the same step
                assert (await of.step(STEPS[0])).failed == {}
                await anyio.sleep(0.2)
            assert (await of.step(BUCKET)).failed == {}
    assert "no step of weight sync 1.1 arrived within 0.5 s" in a.error


async def test_engines_that_may_be_asked_and_are_not_ready_yet_are_waited_for() -> None:
    of, found = syncs("a"), []

    async def ask() -> None:
        found.extend((await of.offered(offer())).members)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            assert not found
            group.start_soon(Engine(of, "a").run)
            with anyio.fail_after(5):
                while not found:  # noqa: ASYNC110 - by the task above
                    await anyio.sleep(0.001)
            await of.closed(WeightSyncClosed(session="1.1", reason="enough"))


async def test_an_offer_to_a_part_of_the_engines_takes_and_waits_for_those_alone() -> None:
    target = FleetTarget()
    target.weights = announcement(1)
    of = WeightSyncs(target, lambda: ("a", "b"), lambda engine, _num_parts: "ab".index(engine))
    a, b = Engine(of, "a"), Engine(of, "b")
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(b.run)
            for part, engine in ((1, b), (0, a)):
                if part == 0:
                    group.start_soon(a.run)
                session = f"1.{part + 1}"
                asked = WeightSyncOffered(
                    session=session, incarnation=1, version=1, deadline_s=5.0, part=part, num_parts=2
                )
                members = (await of.offered(asked)).members
                assert [member.engine for member in members] == [engine._name]
                for step in STEPS:
                    assert (await of.step(msgspec.structs.replace(step, session=session))).failed == {}
    assert a.did == b.did == [WeightSyncPrepared, BucketSent, WeightSyncFinished]


async def test_without_them_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_module, "GATHER_S", 0.05)
    with anyio.fail_after(5):
        assert (await syncs("a").offered(offer())).members == ()


async def test_while_an_evaluation_holds_engines_back_nobody_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_module, "GATHER_S", 0.05)
    answer = await syncs().offered(offer(version=2))
    assert (answer.members, answer.held_back) == ((), "the target version is 1 now")


async def close_by_call(of: WeightSyncs) -> None:
    await of.closed(WeightSyncClosed(session="1.1", reason="the trainer ended it"))


async def close_by_another(of: WeightSyncs) -> None:
    assert (await of.offered(offer("2.1", incarnation=2))).members == ()


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
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(engine.run)
            await anyio.wait_all_tasks_blocked()
            await of.offered(offer())
            await of.step(WeightSyncPrepared(session="1.1"))
            await close(of)  # type: ignore[misc]
    assert engine.error == reason
    with pytest.raises(ValueError, match=r"weight sync 1\.1 is not open here"):
        await of.step(BUCKET)


async def test_a_trainer_that_died_leaves_nobody_waiting() -> None:
    of = syncs()
    engine = Engine(of, "a")
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(engine.run)
            await anyio.wait_all_tasks_blocked()
            await of.offered(offer(deadline_s=0.05))
    assert engine.error == "a: no step of weight sync 1.1 arrived within 0.05 s"


async def test_an_older_trainer_leads_nobody() -> None:
    of = syncs()
    await of.offered(offer("2.1", incarnation=2))
    with pytest.raises(ValueError, match="trainer 1 was replaced by trainer 2"):
        await of.offered(offer("1.9", incarnation=1))
