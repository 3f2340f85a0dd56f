"""What a router is asked: it does things late and in no order, so each is asked of it once."""

import pytest

from actors.rollout.engines import router as router_module
from actors.rollout.engines.dispatch import Direct
from actors.rollout.engines.router import ThroughRouter
from actors.rollout.engines.weights.updates import UpdateTracker
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.control_answers import RouterWorker
from actors.rollout.sglang.errors import EngineUnavailable

pytestmark = pytest.mark.anyio

ROUTER = "http://router"
ENGINE = "http://engine"


class LateRouter(SglangClient):
    """Notes what it is asked; the list of its engines changes when the test says so."""

    def __init__(self) -> None:
        self.listed: list[RouterWorker] = []
        self.asked: list[str] = []
        self.is_away = False

    async def workers(self, router: str) -> list[RouterWorker]:
        return self.listed

    async def add_worker(self, router: str, engine: str) -> None:
        self.asked.append(f"add {engine}")
        if self.is_away:
            raise EngineUnavailable("no router")

    async def remove_worker(self, router: str, worker: RouterWorker) -> None:
        self.asked.append(f"remove {worker.id}")


async def test_an_engine_is_removed_once_however_late_the_router_is() -> None:
    """Else the second removal, done after the engine came back, removes it then: seen once in 400 with 0.3.2."""
    late = LateRouter()
    late.listed = [RouterWorker(id="1", url=ENGINE, is_healthy=True)]
    workers = ThroughRouter(late)
    assert [await workers.free_of(ROUTER, ENGINE) for _ in range(3)] == [False, False, False]
    assert late.asked == ["remove 1"]
    late.listed = []
    assert await workers.free_of(ROUTER, None)


async def test_an_engine_that_comes_back_is_added_and_removed_again() -> None:
    late = LateRouter()
    workers = ThroughRouter(late)
    for id in "12":
        assert [await workers.has(ROUTER, ENGINE) for _ in range(2)] == [False, False]
        late.listed = [RouterWorker(id=id, url=ENGINE, is_healthy=True)]
        assert await workers.has(ROUTER, ENGINE)
        assert not await workers.free_of(ROUTER, ENGINE)
        late.listed = []
    assert late.asked == [f"add {ENGINE}", "remove 1", f"add {ENGINE}", "remove 2"]


async def test_what_a_router_forgot_to_do_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    late = LateRouter()
    workers = ThroughRouter(late)
    monkeypatch.setattr(router_module, "ASK_AGAIN_S", 0.0)
    assert [await workers.has(ROUTER, ENGINE) for _ in range(2)] == [False, False]
    assert late.asked == [f"add {ENGINE}"] * 2


async def test_what_a_router_did_not_take_is_asked_again_at_once() -> None:
    late = LateRouter()
    workers = ThroughRouter(late)
    for late.is_away in (True, False, False):
        assert not await workers.has(ROUTER, ENGINE)
    assert late.asked == [f"add {ENGINE}"] * 2


def test_the_engine_of_a_request_is_found_by_its_label_behind_a_router_alone() -> None:
    updates = UpdateTracker()
    label, router, direct = updates.begin("b", 1), ThroughRouter(LateRouter(), updates.engine_of), Direct()
    assert [router.engine_of("", ""), router.engine_of("", label), router.engine_of("a", "")] == ["", "b", "a"]
    assert [direct.engine_of("a", ""), direct.engine_of("a", label)] == ["a", "a"]
