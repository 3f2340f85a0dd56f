"""An engine's place at a router that knows the engines that it is told of."""

import anyio
import pytest

from actors.rollout.engines import router as module
from actors.rollout.engines.router import Registration, ThroughRouter
from actors.rollout.engines.target import FleetTarget
from actors.rollout.sglang.errors import EngineUnavailable
from tests.support.one_router import OneRouter

pytestmark = pytest.mark.anyio

URL = "http://one"


class Asked:
    """Whether requests may be sent to the engine."""

    def __init__(self) -> None:
        self.now = True

    def __call__(self) -> bool:
        return self.now


def at(router: OneRouter, accepts_requests: Asked) -> Registration:
    target = FleetTarget()
    target.router = "http://router"
    return Registration(URL, ThroughRouter(router), target, accepts_requests)


async def entered(router: OneRouter, accepts_requests: Asked) -> Registration:
    place = at(router, accepts_requests)
    async with place.moving:
        await place.enter(unless=lambda: False)
    return place


async def test_one_that_was_apart_is_the_routers_again() -> None:
    router = OneRouter()
    place = await entered(router, Asked())
    assert router.known == {URL}
    await place.set_apart()
    assert (router.known, place.is_apart, place.is_known) == (set(), True, False)
    await place.join()
    assert (router.known, place.is_apart, place.is_known) == ({URL}, False, True)


async def test_one_that_is_apart_for_two_reasons_is_so_until_both_have_ended() -> None:
    router = OneRouter()
    place = await entered(router, Asked())
    await place.set_apart()
    await place.set_apart()
    await place.join()
    assert (router.known, place.is_apart) == (set(), True)
    await place.join()
    assert (router.known, place.is_apart) == ({URL}, False)


@pytest.mark.slow
async def test_one_that_fails_while_it_is_apart_stays_out() -> None:
    router = OneRouter()
    place = await entered(router, Asked())
    async with place.apart():
        assert (router.known, place.is_apart) == (set(), True)
    assert (router.known, place.is_apart) == ({URL}, False)
    with pytest.raises(EngineUnavailable):
        async with place.apart():
            raise EngineUnavailable("it refused")
    assert (router.known, place.is_apart, place.is_known) == (set(), False, False)


@pytest.mark.slow
async def test_one_that_is_lost_while_the_router_takes_it_in_again_is_taken_out() -> None:
    router, asked = OneRouter(), Asked()
    place = await entered(router, asked)
    await place.set_apart()

    async def lose() -> None:
        asked.now = False

    router.asked = lose
    await place.join()
    assert (router.known, place.is_known) == (set(), False)


async def test_one_that_may_be_asked_again_by_then_is_not_taken_out() -> None:
    router, asked = OneRouter(), Asked()
    place = await entered(router, asked)
    await place.leave_unless_accepting()
    assert router.known == {URL}
    asked.now = False
    await place.leave_unless_accepting()
    assert router.known == set()


async def test_one_that_is_set_apart_is_not_missing() -> None:
    router = OneRouter()
    place = await entered(router, Asked())
    assert not await place.is_missing()
    router.known.clear()
    assert await place.is_missing()
    router.asked = place.set_apart
    assert not await place.is_missing()


async def test_a_router_that_does_not_take_it_is_waited_for_so_long_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REGISTER_TIMEOUT_S", 0.2)
    router = OneRouter()

    async def refuse(router: str, engine: str) -> None:
        pass

    monkeypatch.setattr(router, "add_worker", refuse)
    with anyio.fail_after(200), pytest.raises(EngineUnavailable, match="did not take http://one"):
        await entered(router, Asked())
