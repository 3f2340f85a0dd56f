"""The filter actor on a real bus."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from actors.filter.actor import FilterActor
from actors.filter.filters import Verdict, answering, summary_of
from actors.registry import hosted
from messages import SegmentsPublished
from messages.events import GroupCompleted, Outcome, UserFunctionRaised, VerdictGiven
from messages.samples import SampleStatus, SampleSummary, SegmentRef
from runtime.bus.bus import Bus
from runtime.bus.errors import BusUnavailable
from runtime.bus.events import Events
from runtime.functions.table import FILTER
from runtime.process.actor import InputError
from runtime.process.hosting import host
from runtime.util.errors import flatten
from tests.build.samples import segment
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def running(
    bus: Bus, dynamic_filter: str | None, *, timeout_s: float = FILTER.timeout_s, **rollout: Any
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
    received = await events.next(timeout_s=50)
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
import os
import time
def all_sorts(group):
    match group.group_id:
        case 1: raise RuntimeError("group 1")
        case 2: return "maybe"
        case 3: os.kill(os.getpid(), 9)
        case 4: return bool(bytearray(1 << 50))
        case 5: return "PHYSARUM_SECRET" in os.environ, "no secret"
        case _: return group.rewards[0] == 1, "first is wrong"
def dies_once(group):
    place = os.path.join(os.path.dirname(__file__), "once")
    if not os.path.exists(place):
        open(place, "w").close()
        os.kill(os.getpid(), 9)
    return False, "in another process"
async def later(group): return len(group.response_lens) == 2
def hangs(group): time.sleep(60)
def hangs_first(group):
    if group.group_id == 1: time.sleep(60)
    return False, "after that"
def reads(group):
    seen = (group.tokens, group.log_probs, group.prompt, group.label, group.responses)
    return False, repr(seen)
"""
VERDICTS: list[tuple[list[float | None], Outcome, str | None]] = [
    ([1.0], Outcome.FAILED, "RuntimeError('group 1')"),
    ([1.0], Outcome.FAILED, "FilterError(\"the filter returned 'maybe'; expected a bool, or (keep, reason)\")"),
    ([1.0], Outcome.FAILED, "its process was killed by SIGKILL"),
    ([1.0], Outcome.FAILED, "MemoryError()"),
    ([1.0], Outcome.DROP, "no secret"),
    ([1.0, 0.0], Outcome.KEEP, None),
    ([0.0, 1.0], Outcome.DROP, "first is wrong"),
    ([None], Outcome.FAILED, "samples [0] have no reward"),
]


async def test_a_users_filter_decides_or_fails_its_group(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(USER_FILTERS)
    monkeypatch.setenv("PHYSARUM_SECRET", "token")
    async with running(bus, f"{tmp_path}/mine.py:all_sorts") as actor, bus.read(VerdictGiven) as verdicts:
        for group_id, (rewards, outcome, reason) in enumerate(VERDICTS, 1):
            await complete(bus, group_id, rewards)
            verdict = await next_verdict(verdicts)
            assert (verdict.outcome, verdict.reason) == (outcome, reason)
        assert actor.stats() == {"num_keep": 1, "num_drop": 2, "num_failed": 5, "num_spare": 0}


@pytest.mark.parametrize(("rewards", "outcome"), [([0.0, 1.0], Outcome.KEEP), ([0.0], Outcome.DROP)])
def test_an_async_filter_is_awaited(tmp_path: Path, rewards: list[float], outcome: Outcome) -> None:
    (tmp_path / "mine.py").write_text(USER_FILTERS)
    samples = [
        SampleSummary(index=index, status=SampleStatus.COMPLETED, reward=reward) for index, reward in enumerate(rewards)
    ]
    summary = summary_of(
        GroupCompleted(
            group_id=1, attempt=1, lease="l", round=0, instance="rollout.0", data="d", samples=tuple(samples)
        )
    )
    answer = answering("k", f"{tmp_path}/mine.py:later")(msgspec.msgpack.encode(summary))
    assert msgspec.msgpack.decode(answer, type=Verdict).outcome is outcome


async def test_a_filter_that_hangs_costs_its_group_alone(bus: Bus, tmp_path: Path) -> None:
    """Its process is killed, and another one judges the next group."""
    (tmp_path / "mine.py").write_text(USER_FILTERS)
    async with (
        running(bus, f"{tmp_path}/mine.py:hangs_first", timeout_s=1.0) as actor,
        bus.read(VerdictGiven) as verdicts,
    ):
        for group_id, expected in ((1, (Outcome.FAILED, "no verdict within 1 s")), (2, (Outcome.DROP, "after that"))):
            await complete(bus, group_id, [1.0])
            verdict = await next_verdict(verdicts)
            assert (verdict.outcome, verdict.reason) == expected
            actor._timeout_s = 50.0  # the next group is not late on a busy machine


async def test_what_a_filter_raises_fails_its_group_and_its_traceback_is_published_once(
    bus: Bus, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("import sys\ndef judge(group):\n    sys.exit(group.group_id)\n")
    async with (
        running(bus, f"{tmp_path}/mine.py:judge"),
        bus.read(VerdictGiven, UserFunctionRaised) as events,
    ):
        for group_id in (1, 2):
            await complete(bus, group_id, [1.0])
        received = [await events.next(timeout_s=40) for _ in range(3)]
    raised, *verdicts = [each.message for each in received if each is not None]
    assert isinstance(raised, UserFunctionRaised)
    assert raised.function == "rollout.dynamic_filter"
    assert raised.traceback.splitlines()[1:] == [
        f'  File "{tmp_path}/mine.py", line 3, in judge',
        "    sys.exit(group.group_id)",
        "SystemExit: 1",
    ]
    assert [each.reason for each in verdicts if isinstance(each, VerdictGiven)] == ["SystemExit(1)", "SystemExit(2)"]


async def test_a_filter_whose_process_is_killed_is_called_once_more(bus: Bus, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USER_FILTERS)
    async with running(bus, f"{tmp_path}/mine.py:dies_once"), bus.read(VerdictGiven) as verdicts:
        await complete(bus, 1, [1.0])
        verdict = await next_verdict(verdicts)
    assert (verdict.outcome, verdict.reason) == (Outcome.DROP, "in another process")


async def test_a_filter_whose_process_does_not_start_for_a_while_fails_no_group(bus: Bus, tmp_path: Path) -> None:
    """The import ends the process three times, after a call that killed it."""
    (tmp_path / "mine.py").write_text(
        "import os\nplace = os.path.join(os.path.dirname(__file__), 'left')\n"
        "left = int(open(place).read()) if os.path.exists(place) else 0\n"
        "if left:\n    open(place, 'w').write(str(left - 1))\n    os._exit(3)\n"
        "def judge(group):\n    if not os.path.exists(place):\n        open(place, 'w').write('3')\n"
        "        os.kill(os.getpid(), 9)\n    return True\n"
    )
    async with running(bus, f"{tmp_path}/mine.py:judge"), bus.read(VerdictGiven) as verdicts:
        await complete(bus, 1, [1.0])
        assert (await next_verdict(verdicts)).outcome is Outcome.KEEP


async def test_a_filter_that_ends_its_process_while_it_is_imported_is_wrong_input(bus: Bus, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\nos._exit(3)")
    topology = topology_with(rollout={"dynamic_filter": f"{tmp_path}/mine.py:judge"})
    with pytest.raises(ExceptionGroup) as caught:
        await host(bus, [hosted("filter", topology, tmp_path)])
    (error,) = flatten(caught.value)
    assert isinstance(error, InputError)
    assert "its process exited with code 3, 2 times" in str(error)


async def test_a_filter_that_cannot_be_used_ends_its_actor_before_it_has_started(bus: Bus, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def other(group): return True")
    with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="there is no 'filter' in it")):
        async with running(bus, f"{tmp_path}/mine.py:filter"):
            pass


async def test_a_filter_reads_tokens_and_texts_on_request(bus: Bus, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USER_FILTERS)
    segments = (segment([6, 7], prompt=[5]), segment([9], prompt=[8]))
    segments = tuple(msgspec.structs.replace(each, text="ab") for each in segments)
    stored = SegmentsPublished(group_id=1, attempt=1, lease="l", segments=segments, prompt="p", label="4")
    seq = await bus.publish(stored)
    refs = tuple(SegmentRef(seq=seq, position=position) for position in range(2))
    sample = SampleSummary(index=0, status=SampleStatus.COMPLETED, reward=1.0, segments=refs)
    event = GroupCompleted(group_id=1, attempt=1, lease="l", round=0, instance="rollout.0", data="d", samples=(sample,))
    fields = ("tokens", "log_probs", "texts")
    async with (
        running(bus, f"{tmp_path}/mine.py:reads", filter_fields=fields),
        bus.read(VerdictGiven) as verdicts,
    ):
        await bus.publish(event)
        verdict = await next_verdict(verdicts)
    assert verdict.reason == "([[6, 7, 8, 9]], [[-1.0, -1.0, 0.0, -1.0]], 'p', '4', ['abab'])"


async def test_an_outage_while_the_data_of_a_group_is_fetched_fails_no_group(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first fetch finds no server, the second one takes longer than a filter may, the third finds no payload."""
    (tmp_path / "mine.py").write_text("def judge(group): return False, str(group.tokens)")
    stored = SegmentsPublished(group_id=1, attempt=1, lease="l", segments=(segment([6], prompt=[5]),), prompt="p")
    seq, fetch, fetches = await bus.publish(stored), Bus.fetch, 0

    async def fetched(self: Bus, *arguments: Any) -> Any:
        nonlocal fetches
        fetches += 1
        if fetches == 1:
            raise BusUnavailable("no server for 30 s")
        await anyio.sleep(2.5)
        return await fetch(self, *arguments)

    monkeypatch.setattr(Bus, "fetch", fetched)
    async with (
        running(bus, f"{tmp_path}/mine.py:judge", timeout_s=2.0, filter_fields=("tokens",)),
        bus.read(VerdictGiven) as verdicts,
    ):
        for place, expected in ((seq, (Outcome.DROP, "[[6]]")), (seq + 1, (Outcome.FAILED, "has no message 2"))):
            refs = (SegmentRef(seq=place, position=0),)
            sample = SampleSummary(index=0, status=SampleStatus.COMPLETED, reward=1.0, segments=refs)
            event = GroupCompleted(
                group_id=place, attempt=1, lease="l", round=0, instance="rollout.0", data="d", samples=(sample,)
            )
            await bus.publish(event)
            verdict = await next_verdict(verdicts)
            assert (verdict.outcome, (verdict.reason or "")[-len(expected[1]) :]) == expected
    assert fetches == 3


async def test_a_filter_that_takes_its_time_is_named(bus: Bus, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USER_FILTERS)
    async with running(bus, f"{tmp_path}/mine.py:hangs") as actor:
        assert actor.waits_for() == "completed groups"
        await complete(bus, 7, [1.0])
        await eventually(lambda: actor.waits_for() != "completed groups")
        assert actor.waits_for().startswith(f"the filter {tmp_path}/mine.py:hangs, judging group 7 for ")


async def test_a_filter_that_always_takes_too_long_ends_the_run_and_says_where(bus: Bus, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USER_FILTERS)

    async def run() -> None:
        async with running(bus, f"{tmp_path}/mine.py:hangs", timeout_s=0.2):
            for number in range(9):
                await complete(bus, number, [1.0])
            await anyio.sleep(50)

    with pytest.raises(ExceptionGroup) as caught:
        await run()
    (error,) = flatten(caught.value)
    assert isinstance(error, InputError)
    assert "the first 8 calls of the filter in this run, for 8 prompt groups, all failed" in str(error)
    assert "no verdict within 0.2 s" in str(error)
    assert "mine.py:" in str(error)
    assert "in hangs)" in str(error)
