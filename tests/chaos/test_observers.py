"""Observers that hang, cannot write or are killed, in turn: the others go on, and the run does not notice."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import aiohttp
import msgspec
import psutil
import pytest

from actors.observer.page import Page
from runtime.report.observed import Observed
from runtime.settings.observe import PAGE_FILE
from tests.chaos.audit import audit
from tests.chaos.harness import Run
from tests.fixtures.nats import eventually
from tests.support.prometheus_text import free_address, scrape, value
from tests.support.trackers import scalars, tracker_python

pytestmark = [pytest.mark.chaos, pytest.mark.anyio, pytest.mark.timeout(600)]

WITHOUT_END: Final = 100_000  # train steps
STEPS_EACH: Final = 4  # trained while an observer is not itself
OBSERVERS: Final = {"page": "actors.observer", "metrics": "actors.observer.exporter", "tensorboard": "actors.trackers"}


async def page_step(run: Run) -> int:
    """Newest step that the page shows; -1 while it does not answer."""
    file = run.directory / PAGE_FILE
    if not file.exists():
        return -1
    url = urlsplit(file.read_text().strip())
    (token,) = parse_qs(url.query)["token"]
    cookie = {"Cookie": f"{Page(Observed('r'), token).cookie}={token}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as client,
            client.get(f"{url.scheme}://{url.netloc}/events", headers=cookie) as answer,
        ):
            while line := await answer.content.readline():
                if line.startswith(b"data: "):
                    state: dict[str, Any] = msgspec.json.decode(line.removeprefix(b"data: "))
                    return state["now"]["step"]
    except (aiohttp.ClientError, TimeoutError):
        pass
    return -1


class Shown:
    """What the observers of a run show."""

    def __init__(self, run: Run, address: str) -> None:
        self._run, self._address = run, address

    async def step(self, observer: str) -> int:
        """Newest step that an observer shows; -1 while it does not answer."""
        if observer == "page":
            return await page_step(self._run)
        if observer == "metrics":
            try:
                return int(value(await scrape(self._address), "train_steps_total"))
            except (aiohttp.ClientError, TimeoutError, OSError, LookupError):
                return -1
        return max(scalars(self._run.directory).get("rollout/raw_reward", [-1])) + 1

    async def until(self, observer: str, step: int) -> None:
        """Wait until an observer shows a step."""

        async def holds() -> bool:
            return await self.step(observer) >= step

        await eventually(holds, timeout_s=90)


async def test_what_observers_suffer_is_their_own(tmp_path: Path) -> None:
    """Each is stopped, then cannot write any file, then is killed; meanwhile the run trains and the others follow."""
    tracker_python("tensorboard")
    address = free_address()
    on = ["observe.page=127.0.0.1:0", f"observe.prometheus={address}", "observe.tensorboard.enabled=true"]
    on += ["algorithm.entropy_coef_end=0.1"]  # the decay would depend on the number of steps, which changes
    run = Run(tmp_path, num_steps=WITHOUT_END, eval_interval=None, overrides=on)
    shown = Shown(run, address)
    async with run.started() as command:
        for observer, module in OBSERVERS.items():
            await shown.until(observer, 1)
            process = command.process_of(module)
            process.suspend()
            trained = command.log.trained + STEPS_EACH
            await command.log.until_trained(trained)
            for other in OBSERVERS.keys() - {observer}:
                await shown.until(other, trained)
            process.resume()
            await shown.until(observer, trained)
            process.rlimit(psutil.RLIMIT_FSIZE, (0, 0))  # as on a full disk: no write succeeds
            trained = command.log.trained + STEPS_EACH
            await command.log.until_trained(trained)
            with suppress(psutil.NoSuchProcess):  # a writer may end by itself, and is started again
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
