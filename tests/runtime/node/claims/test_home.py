"""One home at a time, also on several machines that share a directory."""

from pathlib import Path

import anyio
import msgspec
import pytest

from runtime.node.claims import home
from runtime.node.claims.home import (
    Decision,
    HomeClaimed,
    HomeLease,
    HomeMoved,
    Lease,
    LeaseUnreadable,
    decide,
    is_superseded,
)

pytestmark = pytest.mark.anyio

RENEW_EVERY_S = 0.05
LIFETIME_S = 1.0
HELD = Lease(node="n0", host="a", pid=7, daemon="one", place="boot-a:1:2", incarnation=3)


@pytest.mark.parametrize(
    ("first", "seen", "unchanged_s", "place", "take_over", "decision"),
    [
        (None, None, 0.0, "boot-b:1:2", False, Decision.TAKE),
        (HELD, HELD, 0.0, "boot-b:1:2", False, Decision.WAIT),
        (HELD, HELD, 1.0, "boot-b:1:2", False, Decision.TAKE),
        (HELD, HELD, 0.0, "boot-a:1:2", False, Decision.TAKE),  # its lock is ours
        (HELD, msgspec.structs.replace(HELD, renewals=1), 0.5, "boot-b:1:2", False, Decision.REFUSE),
        (HELD, msgspec.structs.replace(HELD, renewals=1), 0.5, "boot-b:1:2", True, Decision.TAKE),
        (HELD, msgspec.structs.replace(HELD, is_released=True), 0.5, "boot-b:1:2", False, Decision.TAKE),
        (None, HELD, 0.5, "boot-b:1:2", False, Decision.REFUSE),  # another one was faster
        (
            msgspec.structs.replace(HELD, place=""),
            msgspec.structs.replace(HELD, place=""),
            0.0,
            "",
            False,
            Decision.WAIT,
        ),
    ],
)
def test_who_becomes_home(
    first: Lease | None, seen: Lease | None, unchanged_s: float, place: str, take_over: bool, decision: Decision
) -> None:
    found = decide(first, seen, unchanged_s=unchanged_s, place=place, take_over=take_over, lifetime_s=LIFETIME_S)
    assert found is decision


def test_a_home_ends_for_a_later_one_alone() -> None:
    assert not is_superseded(HELD, None)
    assert not is_superseded(HELD, msgspec.structs.replace(HELD, renewals=9))
    assert not is_superseded(HELD, msgspec.structs.replace(HELD, daemon="two", incarnation=2))  # it wrote late
    assert is_superseded(HELD, msgspec.structs.replace(HELD, daemon="two", incarnation=3))  # both took it at once
    assert is_superseded(HELD, msgspec.structs.replace(HELD, daemon="two", incarnation=4))


async def test_a_second_home_is_refused_while_the_first_renews_its_lease(tmp_path: Path) -> None:
    first = await HomeLease.take(tmp_path, "n0", place="a")
    async with anyio.create_task_group() as group:
        group.start_soon(first.keep, RENEW_EVERY_S)
        with pytest.raises(HomeClaimed, match="as node n0; stop that first, or start with --take-over"):
            await HomeLease.take(tmp_path, "n0", place="b", lifetime_s=600.0)
        group.cancel_scope.cancel()
    await first.release()
    with anyio.fail_after(200):  # and not after the 600 s that it lives
        second = await HomeLease.take(tmp_path, "n0", place="b", lifetime_s=600.0)
    assert second.lease.incarnation == 2


async def test_the_lease_of_a_dead_home_ends_and_the_incarnation_rises(tmp_path: Path) -> None:
    first = await HomeLease.take(tmp_path, "n0", place="a")
    begun = anyio.current_time()
    second = await HomeLease.take(tmp_path, "n0", place="b", lifetime_s=LIFETIME_S)
    assert anyio.current_time() - begun >= 1.0
    assert second.lease.incarnation > first.lease.incarnation


async def test_an_old_home_whose_network_returns_ends_and_leaves_the_lease(tmp_path: Path) -> None:
    old = await HomeLease.take(tmp_path, "n0", place="a")
    new = await HomeLease.take(tmp_path, "n0", place="b", take_over=True)
    with pytest.raises(HomeMoved, match="is home now"), anyio.fail_after(200):
        await old.keep(RENEW_EVERY_S)
    await old.release()
    found = msgspec.json.decode((tmp_path / home.LEASE_FILE).read_bytes(), type=Lease)
    assert (found.daemon, found.is_released) == (new.lease.daemon, False)


async def test_a_home_writes_its_lease_again_over_an_older_one(tmp_path: Path) -> None:
    """An old home may have read the file before, and written it after, the new one did."""
    old = await HomeLease.take(tmp_path, "n0", place="a")
    before = (tmp_path / home.LEASE_FILE).read_bytes()
    new = await HomeLease.take(tmp_path, "n0", place="b", take_over=True)
    (tmp_path / home.LEASE_FILE).write_bytes(before)
    with anyio.move_on_after(0.3):
        await new.keep(RENEW_EVERY_S)
    with pytest.raises(HomeMoved), anyio.fail_after(200):
        await old.keep(RENEW_EVERY_S)


async def test_a_lease_that_cannot_be_read_is_refused_and_left(tmp_path: Path) -> None:
    """It may be the lease of a home that runs."""
    running = await HomeLease.take(tmp_path, "n0", place="a")
    (tmp_path / home.LEASE_FILE).write_text('{"node": ')
    with pytest.raises(
        LeaseUnreadable, match=r"home\.json cannot be read as the lease of a home node: .*; delete it if"
    ):
        await HomeLease.take(tmp_path, "n0", place="b", take_over=True)
    with anyio.move_on_after(0.3):
        await running.keep(RENEW_EVERY_S)
    await running.release()
    assert (tmp_path / home.LEASE_FILE).read_text() == '{"node": '
