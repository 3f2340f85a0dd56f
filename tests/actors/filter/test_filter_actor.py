"""The filter actor on a real bus."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from actors.filter.actor import FILTER_TIMEOUT_S, FilterActor
from messages.events import GroupCompleted, Outcome, VerdictGiven
from messages.samples import SampleStatus, SampleSummary
from runtime.bus.bus import Bus
from runtime.bus.events import Events
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def running(
    bus: Bus, dynamic_filter: str | None, *, timeout_s: float = FILTER_TIMEOUT_S, **rollout: bool
) -> AsyncGenerator[FilterActor]:
    topology = topology_with(rollout={"dynamic_filter": dynamic_filter, **rollout})
    actor = FilterActor(topology, bus, timeout_s=timeout_s)
    async with anyio.create_task_group() as group:
        await group.start(actor.run)
        yield actor
        group.cancel_scope.cancel()


async def complete(bus: Bus, group_id: int, rewards: Sequence[float | None]) -> int:
    samples = tuple(
        SampleSummary(index=index, status=SampleStatus.COMPLETED, reward=reward) for index, reward in enumerate(rewards)
    )
    event = GroupCompleted(
        group_id=group_id, attempt=1, lease="l", round=0, instance="rollout.0", data="d", samples=samples
    )
    return await bus.publish(event)


async def next_verdict(events: Events[VerdictGiven]) -> VerdictGiven:
    received = await events.next(timeout_s=15)
    assert received is not None
    return received.message


async def test_verdicts_cite_the_completion_they_judge(bus: Bus) -> None:
    async with running(bus, "nonzero_std"), bus.read(VerdictGiven) as verdicts:
        for group_id, rewards, outcome, reason in (
            (7, [0.0, 1.0], Outcome.KEEP, None),
            (8, [1.0, 1.0], Outcome.DROP, "zero_std_1.0"),
        ):
            seq = await complete(bus, group_id, rewards)
            expected = VerdictGiven(group_id=group_id, attempt=1, event_seq=seq, outcome=outcome, reason=reason)
            assert await next_verdict(verdicts) == expected


async def test_what_a_filter_drops_is_spare_where_batches_may_be_filled_with_it(bus: Bus) -> None:
    async with running(bus, "nonzero_std", keep_when_insufficient=True), bus.read(VerdictGiven) as verdicts:
        await complete(bus, 1, [1.0, 1.0])
        verdict = await next_verdict(verdicts)
        assert (verdict.outcome, verdict.reason) == (Outcome.SPARE, "zero_std_1.0")
        await complete(bus, 2, [None])
        assert (await next_verdict(verdicts)).outcome is Outcome.FAILED


async def test_groups_completed_before_the_filter_started_are_judged(bus: Bus) -> None:
    await complete(bus, 1, [1.0])
    async with running(bus, None), bus.read(VerdictGiven) as verdicts:
        assert (await next_verdict(verdicts)).group_id == 1


async def test_a_restarted_filter_reads_on(bus: Bus) -> None:
    async with bus.read(VerdictGiven) as verdicts:
        for group_id in (1, 2):
            async with running(bus, None):
                await complete(bus, group_id, [1.0])
                assert (await next_verdict(verdicts)).group_id == group_id


USER_FILTERS = """
import time
def raises(group): raise RuntimeError(f"group {group.group_id}")
def says_maybe(group): return "maybe"
def hangs(group): time.sleep(1.0)
def first_is_right(group): return group.rewards[0] == 1, "first is wrong"
async def later(group): return len(group.response_lens) == 2
"""


@pytest.mark.parametrize(
    ("name", "rewards", "outcome", "reason"),
    [
        ("raises", [1.0], Outcome.FAILED, "RuntimeError('group 1')"),
        ("says_maybe", [1.0], Outcome.FAILED, "the filter returned 'maybe'; expected a bool"),
        ("hangs", [1.0], Outcome.FAILED, "no verdict within 0.2 s"),
        ("first_is_right", [1.0, 0.0], Outcome.KEEP, None),
        ("first_is_right", [0.0, 1.0], Outcome.DROP, "first is wrong"),
        ("first_is_right", [None], Outcome.FAILED, "samples [0] have no reward"),
        ("later", [0.0, 1.0], Outcome.KEEP, None),
        ("later", [0.0], Outcome.DROP, "later"),
    ],
)
async def test_a_users_filter_decides_or_fails_its_group(
    bus: Bus,
    tmp_path: Path,
    name: str,
    rewards: list[float | None],
    outcome: Outcome,
    reason: str | None,
) -> None:
    (tmp_path / "mine.py").write_text(USER_FILTERS)
    async with running(bus, f"{tmp_path}/mine.py:{name}", timeout_s=0.2) as actor, bus.read(VerdictGiven) as verdicts:
        await complete(bus, 1, rewards)
        verdict = await next_verdict(verdicts)
        assert actor.stats()[f"num_{outcome}"] == 1
    assert verdict.outcome is outcome
    assert (reason in str(verdict.reason)) if reason else (verdict.reason is None)


async def test_a_filter_that_takes_its_time_is_named(bus: Bus, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USER_FILTERS)
    async with running(bus, f"{tmp_path}/mine.py:hangs") as actor:
        assert actor.waits_for() == "completed groups"
        await complete(bus, 7, [1.0])
        await eventually(lambda: actor.waits_for() != "completed groups")
        assert actor.waits_for().startswith(f"the filter {tmp_path}/mine.py:hangs, judging group 7 for ")
