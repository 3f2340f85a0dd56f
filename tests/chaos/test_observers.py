"""Observers that hang, cannot write or are killed, in turn: the others go on, and the run does not notice."""

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import aiohttp
import anyio
import msgspec
import psutil
import pytest
from aiohttp import web

from actors.observer.otlp import SENT_FILE, sent_in
from runtime.settings.tables.observe import PAGE_FILE
from tests.chaos.audit import audit
from tests.chaos.harness import Command, Run
from tests.fixtures.nats import eventually
from tests.support.prometheus_text import free_address, scrape, value
from tests.support.small_disk import fill, small_disk
from tests.support.trackers import scalars, tracker_python

pytestmark = [pytest.mark.chaos, pytest.mark.anyio, pytest.mark.timeout(600)]

WITHOUT_END: Final = 100_000  # train steps
STEPS_EACH: Final = 4  # trained while an observer is not itself
OBSERVERS: Final = {"page": "actors.observer", "metrics": "actors.observer.exporter", "tensorboard": "actors.trackers"}
MORE: Final = {**OBSERVERS, "spans": "actors.observer.otlp"}
DISK: Final = 1 << 20  # bytes


async def page_step(run: Run) -> int:
    """Newest step that the page shows; -1 while it does not answer."""
    file = run.directory / PAGE_FILE
    if not file.exists():
        return -1
    place, _, secret = file.read_text().strip().partition("#token=")
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as client,
            client.get(f"{place}events", headers={"Authorization": f"Bearer {secret}"}) as answer,
        ):
            content = b""  # a line of a long run is longer than `readline` allows
            async for some in answer.content.iter_any():
                content += some
                event, end, _ = content.partition(b"\n\n")
                if end:
                    state: dict[str, Any] = msgspec.json.decode(event.removeprefix(b"data: "))
                    return state["now"]["step"]
    except (aiohttp.ClientError, TimeoutError):
        pass
    return -1


@asynccontextmanager
async def collector() -> AsyncGenerator[str, None]:
    """Accept spans for the duration of a block; yield the URL."""

    async def accept(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(content_type="application/x-protobuf")

    application = web.Application()
    application.router.add_post("/v1/traces", accept)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        with anyio.CancelScope(shield=True):
            await runner.cleanup()


class Shown:
    """What the observers of a run show."""

    def __init__(self, run: Run, address: str, command: Command) -> None:
        self._run, self._address, self._log = run, address, command.log

    async def step(self, observer: str) -> int:
        """Newest step that an observer shows; -1 while it does not answer."""
        if observer == "page":
            return await page_step(self._run)
        if observer == "metrics":
            try:
                return int(value(await scrape(self._address), "train_steps_total"))
            except (aiohttp.ClientError, TimeoutError, OSError, LookupError):
                return -1
        if observer == "spans":  # its place in the log
            sent = sent_in(self._run.directory / SENT_FILE)
            return self._log.trained if sent >= self._log.trained_seq else -1
        return max(scalars(self._run.directory).get("rollout/raw_reward", [-1])) + 1

    async def until(self, observer: str, step: int) -> None:
        """Wait until an observer shows a step."""

        async def holds() -> bool:
            return await self.step(observer) >= step

        await eventually(holds)


async def suffer(run: Run, address: str, observers: dict[str, str], stopped_s: float) -> None:
    """Stop each observer of a run in turn, then take its disk away, then kill it; then end the run and resume it."""
    async with run.started() as command:
        shown = Shown(run, address, command)
        for observer, module in observers.items():
            await shown.until(observer, 1)
            process = command.process_of(module)
            process.suspend()
            await command.log.read_for(stopped_s)
            trained = command.log.trained + STEPS_EACH
            await command.log.until_trained(trained)
            for other in observers.keys() - {observer}:
                await shown.until(other, trained)
            process.resume()
            await shown.until(observer, trained)
            process.rlimit(psutil.RLIMIT_FSIZE, (0, 0))  # as on a full disk: no write succeeds
            trained = command.log.trained + STEPS_EACH
            await command.log.until_trained(trained)
            with suppress(ProcessLookupError):  # a writer may end by itself, and is started again
                os.kill(process.pid, signal.SIGKILL)
            await shown.until(observer, trained)
        command.send(signal.SIGINT)
        assert await command.end() == 130
    steps = len(run.rows()) + 1
    run.plan_steps(steps)
    async with run.started() as command:
        assert await command.end() == 0
    await audit(run, killed=[])
    assert scalars(run.directory)["rollout/raw_reward"] == list(range(steps))


ON: Final = (
    "observe.page=127.0.0.1:0",
    "observe.tensorboard.enabled=true",
    "algorithm.entropy_coef_end=0.1",  # the decay would depend on the number of steps, which changes
)


async def test_what_observers_suffer_is_their_own(tmp_path: Path) -> None:
    """Each is stopped, then cannot write any file, then is killed; meanwhile the run trains and the others follow."""
    tracker_python("tensorboard")
    address = free_address()
    on = (*ON, f"observe.prometheus={address}")
    run = Run(tmp_path, num_steps=WITHOUT_END, eval_interval=None, overrides=on, paced=False)
    await suffer(run, address, OBSERVERS, 0.0)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
async def test_observers_that_are_stopped_for_a_minute_each(tmp_path: Path) -> None:
    """As above, for a minute each, with the sender of spans as well."""
    for name in ("tensorboard", "opentelemetry"):
        tracker_python(name)
    address = free_address()
    async with collector() as url:
        on = (*ON, f"observe.prometheus={address}", f"observe.otlp.endpoint={url}")
        run = Run(tmp_path, num_steps=WITHOUT_END, eval_interval=None, overrides=on, paced=False)
        await suffer(run, address, MORE, 60.0)


@pytest.mark.nightly
async def test_trackers_on_a_full_disk_cost_no_step_and_go_on_once_there_is_space(tmp_path: Path) -> None:
    tracker_python("tensorboard")
    with small_disk(tmp_path / "disk", DISK) as disk:
        filler = fill(disk)
        on = ("observe.tensorboard.enabled=true", f"observe.tensorboard.dir={disk}")
        run = Run(tmp_path, num_steps=12, eval_interval=None, overrides=on)
        async with run.started() as command:
            await command.log.until_trained(6)
            filler.unlink()
            assert await command.end() == 0
        assert "No space left on device" in (run.directory / "logs" / "tracker.tensorboard.jsonl").read_text()
        (events,) = [path for path in disk.iterdir() if path.is_dir()]
        assert scalars(events, pattern="")["rollout/raw_reward"] == list(range(12))
    await audit(run)
