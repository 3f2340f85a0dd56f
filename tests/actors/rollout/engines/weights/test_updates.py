"""Which labels are proven, and who waits for it."""

import anyio
import pytest

from actors.rollout.engines.weights.updates import Loads, LoadStanding
from actors.rollout.sglang.labels import label_of, version_of

pytestmark = pytest.mark.anyio


def test_a_label_is_read_back_as_its_version() -> None:
    assert version_of(label_of(7, "engine-0.a.1")) == 7
    assert version_of("7") == 7
    assert [version_of(label) for label in ("default", "", "-1@e", "@e", "x@7")] == [0] * 5


def test_a_load_is_open_until_it_is_proven_or_refused() -> None:
    loads = Loads()
    proven, refused = loads.begin("e", 7), loads.begin("e", 7)
    assert proven != refused
    assert loads.standing(proven) is loads.standing(refused) is LoadStanding.OPEN
    loads.prove(proven)
    loads.refuse(proven)  # too late
    loads.refuse(refused)
    assert (loads.standing(proven), loads.standing(refused)) == (LoadStanding.PROVEN, LoadStanding.REFUSED)


def test_a_label_that_was_not_given_out_here_is_not_proven() -> None:
    loads, other = Loads(), Loads()
    ours, foreign = loads.begin("e", 1), other.begin("e", 1)
    loads.prove(ours)
    other.prove(foreign)
    session = ours.split(".")[1]
    for label in ("default", "", "1", "1@", foreign, f"1@e.{session}.2", f"1@e.{session}.0", f"1@e.{session}.x"):
        assert loads.standing(label) is LoadStanding.REFUSED, label


def test_a_request_trusts_no_label_once_a_load_was_refused_beside_it() -> None:
    loads = Loads()
    before = loads.begin("e", 1)
    loads.prove(before)
    trusts = loads.trust_from_now_on()
    assert trusts(before)
    loads.refuse(loads.begin("e", 2))
    assert not trusts(before)
    assert loads.is_proven(before)
    assert loads.trust_from_now_on()(before)


def test_refusals_without_end_are_not_kept_and_change_nothing_for_others() -> None:
    """As of an engine that refuses the same weights once a second for hours."""
    loads = Loads()
    proven = loads.begin("e", 1)
    loads.prove(proven)
    for _ in range(20_000):
        loads.refuse(label := loads.begin("lazy", 2))
    assert loads.is_proven(proven)
    assert loads.standing(label) is LoadStanding.REFUSED
    assert sum(len(value) for value in vars(loads).values() if isinstance(value, set | dict | list)) <= 1


@pytest.mark.parametrize("proven", [True, False])
async def test_who_waits_is_told(proven: bool) -> None:
    loads, told = Loads(), list[bool]()
    first, second = loads.begin("a", 1), loads.begin("b", 1)

    async def wait() -> None:
        told.append(await loads.settled({first, second}))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            loads.prove(first)
            await anyio.wait_all_tasks_blocked()
            assert not told
            (loads.prove if proven else loads.refuse)(second)
    assert told == [proven]
    assert await loads.settled([])


async def test_the_wait_for_a_proof_ends() -> None:
    loads = Loads(settle_timeout_s=0.01)
    assert not await loads.settled([loads.begin("e", 1)])
