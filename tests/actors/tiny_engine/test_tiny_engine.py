"""The torch thread: orders between steps, errors that stay with their caller, crashes that do not stay hidden."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from actors.tiny_engine.engine.core import Core, Settings
from actors.tiny_engine.engine.requests import Request, Sampling, Stopping
from actors.tiny_engine.engine.scheduler import TokenReport
from actors.tiny_engine.engine.thread import EngineStopped, EngineThread
from runtime.models.config import ModelError, read_model
from tests.support.tiny_engine import write_config
from tests.support.tiny_models import write_model

pytestmark = pytest.mark.anyio
SETTINGS = Settings(4, 512, None, 0, dummy=True, weight_version="0")


class Listener:
    """What the engine told the event loop."""

    def __init__(self) -> None:
        self.reports: list[TokenReport] = []
        self.error: BaseException | None = None
        self.ended = anyio.Event()
        self.crashed = anyio.Event()

    def deliver(self, reports: list[TokenReport]) -> None:
        self.reports.extend(reports)
        if any(report.finish for report in reports):
            self.ended.set()

    def crash(self, error: BaseException) -> None:
        self.error = error
        self.crashed.set()


@asynccontextmanager
async def running(build: Callable[[], Core]) -> AsyncIterator[tuple[EngineThread, Listener]]:
    listener = Listener()
    engine = EngineThread(build, listener.deliver, listener.crash)
    try:
        await engine.start()
        with anyio.fail_after(200):
            yield engine, listener
    finally:
        engine.stop()


@pytest.fixture
def build(tmp_path: Path) -> Callable[[], Core]:
    write_config(tmp_path)
    return lambda: Core(tmp_path, read_model(tmp_path), SETTINGS)


async def test_reports_reach_the_event_loop(build: Callable[[], Core]) -> None:
    async with running(build) as (engine, listener):
        engine.submit([Request("a", [3], Sampling(), Stopping(limit=5), seed=1, stream_interval=2)])
        await listener.ended.wait()
    assert [report.num_tokens for report in listener.reports] == [1, 2, 4, 5]


async def test_an_error_in_an_order_is_raised_to_its_caller_alone(build: Callable[[], Core]) -> None:
    async with running(build) as (engine, listener):
        with pytest.raises(ModelError, match="nowhere"):
            await engine.call(lambda core: core.update_weights(Path("/nowhere"), version="1", flush=True))
        assert await engine.call(lambda core: core.scheduler.version) == "0"
    assert listener.error is None


async def test_a_core_that_cannot_be_built_fails_the_start(tmp_path: Path) -> None:
    write_config(tmp_path)

    def build() -> Core:
        return Core(tmp_path, read_model(tmp_path), SETTINGS._replace(dummy=False))

    with pytest.raises(ModelError, match="neither model"):
        async with running(build):
            pass


async def test_new_weights_are_of_the_same_model_whatever_ignored_keys_their_config_has(tmp_path: Path) -> None:
    write_model(tmp_path / "new", is_causal=True)
    write_config(tmp_path / "old", is_causal=False)
    model = read_model(tmp_path / "old", ("is_causal",))
    async with running(lambda: Core(tmp_path / "old", model, SETTINGS)) as (engine, _):
        for is_causal in (True, False):
            write_config(tmp_path / "new", is_causal=is_causal)
            await engine.call(lambda core: core.update_weights(tmp_path / "new", version="1", flush=True))
        write_config(tmp_path / "new", is_causal=False, rms_norm_eps=1e-3)
        with pytest.raises(ModelError, match="another model"):
            await engine.call(lambda core: core.update_weights(tmp_path / "new", version="2", flush=True))


async def test_a_crash_of_the_thread_is_told_and_ends_all_calls(build: Callable[[], Core]) -> None:
    async with running(build) as (engine, listener):
        engine.post(lambda _: 1 // 0)
        await listener.crashed.wait()
        assert isinstance(listener.error, ZeroDivisionError)
        engine.stop()
        with pytest.raises(EngineStopped):
            await engine.call(lambda core: core.idle)


async def test_memory_of_released_weights_is_given_back(build: Callable[[], Core]) -> None:
    async with running(build) as (engine, _):
        num_bytes = await engine.call(lambda core: core.scheduler.slots.weights.embedding.nbytes)
        await engine.call(lambda core: core.release(["weights", "kv_cache"]))
        assert num_bytes > 0
        assert await engine.call(lambda core: core.scheduler.slots.weights.embedding.nbytes) == 0
        await engine.call(lambda core: core.restore([]))
        assert await engine.call(lambda core: core.scheduler.slots.weights.embedding.nbytes) == num_bytes
