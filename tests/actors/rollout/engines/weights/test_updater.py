"""How long an update may take: limits by progress, with a scripted engine."""

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from actors.rollout.engines.weights import updater as updater_module
from actors.rollout.engines.weights.updater import Updater, progress_text
from actors.rollout.sglang.control_answers import Load
from actors.rollout.sglang.errors import EngineSilent
from runtime.settings.placement import UpdateLimits
from tests.support.rollout import announcement

pytestmark = pytest.mark.anyio

URL = "http://engine"
LIMITS = UpdateLimits(stall_s=0.3, min_load_mb_per_s=1.0)


class ScriptedClient:
    """An engine with running requests: each look at its load sees one more token, for a number of looks."""

    def __init__(self, num_moves: int, *, ends: bool = True, load_s: float = 0.0) -> None:
        self._num_moves, self._ends, self._load_s = num_moves, ends, load_s
        self.has_loaded: Callable[[], bool] = lambda: True
        self.num_looks = 0

    async def loads(self, _url: str) -> Sequence[Load]:
        self.num_looks += 1
        await anyio.lowlevel.checkpoint()
        if self.num_looks > self._num_moves and self._ends:
            return (Load(),)
        return (Load(num_running_reqs=1, num_used_tokens=min(self.num_looks, self._num_moves)),)

    async def update_weights(self, *_args: Any, **_options: Any) -> None:
        await anyio.sleep(self._load_s)
        while not self.has_loaded():  # noqa: ASYNC110 - by the task that looks
            await anyio.sleep(0.001)


def updater_of(client: ScriptedClient, requests_s: float = 60.0) -> Updater:
    return Updater(client, "drain", limits=LIMITS, requests_s=requests_s)  # pyright: ignore[reportArgumentType]


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updater_module, "IDLE_POLL_S", 0.05)
    monkeypatch.setattr(updater_module, "SERVING_POLL_S", 0.05)


async def test_requests_that_move_are_waited_for_beyond_the_limit_of_a_stall() -> None:
    client = ScriptedClient(num_moves=16)  # 0.8 s
    await updater_of(client)._until_idle(URL)
    assert client.num_looks == 17


async def test_requests_that_stand_still_fail_the_update() -> None:
    with anyio.fail_after(200), pytest.raises(EngineSilent, match=r"none of them moved for 0.3 s \(update_stall_s\)"):
        await updater_of(ScriptedClient(num_moves=1, ends=False))._until_idle(URL)


async def test_requests_that_never_end_fail_the_update() -> None:
    with anyio.fail_after(200), pytest.raises(EngineSilent, match=r"the limit is 0.5 s"):
        await updater_of(ScriptedClient(num_moves=10**6), requests_s=0.5)._until_idle(URL)


async def test_a_load_fails_after_the_time_of_its_bytes() -> None:
    weights = announcement(1, size_bytes=200_000)  # 0.2 s at 1 MB/s
    begin = anyio.current_time()
    with anyio.fail_after(200), pytest.raises(EngineSilent, match=r"did not load 200000 bytes within 0.5 s"):
        await updater_of(ScriptedClient(num_moves=0, load_s=60.0))._load(URL, weights, "1@e")
    assert anyio.current_time() - begin >= 0.5


async def test_a_load_has_its_whole_time_after_the_requests_that_it_waits_for() -> None:
    weights = announcement(1, size_bytes=200_000)
    client = ScriptedClient(num_moves=12)  # 0.6 s of requests
    updater = updater_of(client)
    client.has_loaded = lambda: (of := updater.progress(URL)) is not None and progress_text(of, 0).startswith("loads")
    updater.note(URL, "begins")
    with anyio.fail_after(200):
        await updater._load(URL, weights, "1@e")
    progress = updater.progress(URL)
    assert progress is not None
    assert progress_text(progress, progress.since + 90) == "loads 0.0 GB (1m30s, limit 0.5s)"


def test_the_limit_of_a_load_follows_from_its_size() -> None:
    assert UpdateLimits(300.0, 100.0).load_s(140 * 10**9) == 300 + 1400
