"""Which labels are proven, and who waits for it."""

import anyio
import pytest

from actors.rollout.engines.weights.updates import UpdateStatus, UpdateTracker
from actors.rollout.sglang.labels import label_of, version_of

pytestmark = pytest.mark.anyio


def test_a_label_is_read_back_as_its_version() -> None:
    assert version_of(label_of(7, "engine-0.a.1")) == 7
    assert version_of("7") == 7
    assert [version_of(label) for label in ("default", "", "-1@e", "@e", "x@7")] == [0] * 5


def test_a_load_is_open_until_it_is_proven_or_refused() -> None:
    tracker = UpdateTracker()
    verified, refused = tracker.begin("e", 7), tracker.begin("e", 7)
    assert verified != refused
    assert tracker.status(verified) is tracker.status(refused) is UpdateStatus.OPEN
    tracker.accept(verified)
    tracker.refuse(verified)  # too late
    tracker.refuse(refused)
    assert (tracker.status(verified), tracker.status(refused)) == (UpdateStatus.VERIFIED, UpdateStatus.REFUSED)


def test_a_label_that_was_not_given_out_here_is_not_proven() -> None:
    tracker, other = UpdateTracker(), UpdateTracker()
    ours, foreign = tracker.begin("e", 1), other.begin("e", 1)
    tracker.accept(ours)
    other.accept(foreign)
    session = ours.split(".")[1]
    for label in ("default", "", "1", "1@", foreign, f"1@e.{session}.2", f"1@e.{session}.0", f"1@e.{session}.x"):
        assert tracker.status(label) is UpdateStatus.REFUSED, label
        assert tracker.engine_of(label) == "", label
    assert tracker.engine_of(ours) == "e"


def test_a_request_trusts_no_label_once_a_load_was_refused_beside_it() -> None:
    tracker = UpdateTracker()
    before = tracker.begin("e", 1)
    tracker.accept(before)
    trusts = tracker.trust_from_now_on()
    assert trusts(before)
    tracker.refuse(tracker.begin("e", 2))
    assert not trusts(before)
    assert tracker.is_verified(before)
    assert tracker.trust_from_now_on()(before)


def test_refusals_without_end_are_not_kept_and_change_nothing_for_others() -> None:
    """As of an engine that refuses the same weights once a second for hours."""
    tracker = UpdateTracker()
    verified = tracker.begin("e", 1)
    tracker.accept(verified)
    for _ in range(20_000):
        tracker.refuse(label := tracker.begin("lazy", 2))
    assert tracker.is_verified(verified)
    assert tracker.status(label) is UpdateStatus.REFUSED
    assert sum(len(value) for value in vars(tracker).values() if isinstance(value, set | dict | list)) <= 1


@pytest.mark.parametrize("verified", [True, False])
async def test_who_waits_is_told(verified: bool) -> None:
    tracker, told = UpdateTracker(), list[bool]()
    first, second = tracker.begin("a", 1), tracker.begin("b", 1)

    async def wait() -> None:
        told.append(await tracker.settled({first, second}))

    with anyio.fail_after(200):
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            tracker.accept(first)
            await anyio.wait_all_tasks_blocked()
            assert not told
            (tracker.accept if verified else tracker.refuse)(second)
    assert told == [verified]
    assert await tracker.settled([])


async def test_the_wait_for_a_proof_ends() -> None:
    tracker = UpdateTracker(settle_timeout_s=0.01)
    assert not await tracker.settled([tracker.begin("e", 1)])
