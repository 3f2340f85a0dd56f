"""Every view of the page in Chromium: of a run that trains, after a kill -9 in it, and of the run when it ended."""

import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.observer import samples
from actors.observer.access import Address
from actors.observer.observed import Observed
from actors.observer.page import Page, served
from messages import Outcome
from runtime.data.dump_files import write_pair
from runtime.data.dumps import Fate
from runtime.settings.tables.observe import PAGE_FILE
from tests.build.dumps import dumped_group
from tests.build.events import failed
from tests.chaos.harness import ROOT, Run
from tests.page.chromium import browsed, needs_chromium, visited

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.xdist_group("chromium")]

SECRET = "5ec4e7" * 8
OPEN_STEPS = 2_000  # that curves show at most
WITHOUT_END = 100_000  # train steps
STEPS = 30  # with dumps; they are read for longer than the page's samples are shown at first
# A step takes a second or two, so that the run goes on while Chromium shows it, and leaves it most of the processor.
SLOW = """
import time

def grade(sample):
    time.sleep(0.05)
    return float(len(sample.response) % 2)
"""
HOSTILE = "<img src=x onerror=window.marked=1><script>window.marked=1</script>"


def shots_of(tmp_path: Path, name: str) -> Path:
    """A directory for the screenshots of one visit."""
    directory = tmp_path / f"shots-{name}"
    directory.mkdir()
    return directory


def check(found: dict[int, dict[str, Any]], status: str) -> None:
    """Nothing went wrong, nothing is wider than the window, and no view is empty."""
    for width, seen in found.items():
        assert seen["wrong"] == [], width
        assert seen["clean"]
        assert status in seen["status"]
        for name, view in seen["views"].items():
            assert view["overflow"] == [], (name, width)
            assert view["text"].strip(), (name, width)


async def test_each_view_of_a_run_that_trains_and_of_one_that_ended(tmp_path: Path) -> None:
    needs_chromium()
    (tmp_path / "slow.py").write_text(SLOW)
    on = ("observe.page=127.0.0.1:0", "observe.samples=true", f"data.0.rm_type={tmp_path / 'slow.py'}:grade")
    run = Run(tmp_path, num_steps=WITHOUT_END, eval_interval=3, overrides=on, paced=False)
    async with run.started() as command:
        await command.log.until_trained(3)
        url = (run.directory / PAGE_FILE).read_text().strip()
        trains = await browsed(url, shots_of(tmp_path, "trains"))
        check(trains, "running")
        assert "Reward" in trains[1280]["views"]["view-curves"]["text"]
        assert "trainer" in trains[1280]["views"]["view-now"]["text"]
        assert f"in {run.directory / 'samples'}" in trains[1280]["views"]["view-samples"]["text"]
        assert "Group " in trains[1280]["views"]["view-samples"]["text"]  # a group was opened
        assert "in flight" in trains[1280]["views"]["view-ledger"]["text"]
        command.log.kill("trainer")
        await command.log.until_restarted("trainer")
        check(await browsed(url, shots_of(tmp_path, "killed")), "running")
        command.send(signal.SIGINT)
        assert await command.end() == 130
    watch = [sys.executable, str(ROOT / "bin" / "physarum.py"), "watch", str(run.directory), "--page"]
    process = await anyio.open_process(watch, stderr=subprocess.STDOUT)
    try:
        assert process.stdout is not None
        text = ""
        with anyio.fail_after(200):
            while "--url" not in text or not text.endswith("\n"):  # a pipe gets no secret
                text += (await process.stdout.receive()).decode()
        assert "token" not in text
        line = next(line for line in text.splitlines() if line.startswith("page "))
        command = shlex.split(line.rpartition("secret: ")[2])
        url = (await anyio.run_process([str(ROOT / command[0]), *command[1:]])).stdout.decode().strip()
        ended = await browsed(url, shots_of(tmp_path, "ended"))
        check(ended, "stopped: SIGINT")
        assert "Group " in ended[1280]["views"]["view-samples"]["text"]
    finally:
        process.send_signal(signal.SIGINT)
        with anyio.fail_after(200):
            await process.wait()


async def test_no_text_of_a_run_becomes_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, responses, what graders say, and reasons are hostile. The page reads many steps of dumps, one by one."""
    needs_chromium()
    monkeypatch.setattr(samples, "READ_S", 0.0)
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    fate = Fate(verdict=Outcome.DROP, verdict_reason=HOSTILE)
    groups = [
        dumped_group(n, (0.0, 1.0), prompt=HOSTILE, reason=HOSTILE, score={HOSTILE: HOSTILE}, fate=fate)
        for n in range(STEPS)
    ]
    for step, group in enumerate(groups):
        write_pair(dumps, step, [group], (1, 0))
    observed = Observed(HOSTILE, 2)
    observed.apply(failed(0, reason=HOSTILE), 1, 1000.0)
    observed.problems = [HOSTILE]
    page = Page(observed, lambda: SECRET, {HOSTILE: HOSTILE}, dumps)
    async with served(page, Address("127.0.0.1", 0)) as port:
        found = await browsed(f"http://127.0.0.1:{port}/#token={SECRET}", shots_of(tmp_path, "hostile"))
    for seen in found.values():
        assert seen["wrong"] == []
        assert seen["clean"]
    assert "steps are not read yet" in found[1280]["views"]["view-samples"]["text"]
    assert HOSTILE in found[1280]["views"]["view-settings"]["text"]
    assert HOSTILE in found[1280]["views"]["view-samples"]["text"]


async def test_a_page_that_is_open_for_many_steps_draws_no_more_than_at_first(tmp_path: Path) -> None:
    """The number of points and elements is bounded, so a step more costs as much after 10,000 steps as after 2,000."""
    needs_chromium()
    page = Page(Observed("r", 2), lambda: SECRET)
    async with served(page, Address("127.0.0.1", 0)) as port:
        url = f"http://127.0.0.1:{port}/#token={SECRET}"
        few, many = await visited("redraw.py", url, str(OPEN_STEPS), str(5 * OPEN_STEPS))
    assert (few["steps"], few["times"], few["newest"]) == (OPEN_STEPS, OPEN_STEPS, OPEN_STEPS)
    assert set(few["points"]) == {OPEN_STEPS}
    assert many["newest"] == 5 * OPEN_STEPS
    assert OPEN_STEPS / 2 < many["steps"] <= OPEN_STEPS
    assert OPEN_STEPS / 2 < many["times"] <= OPEN_STEPS
    assert set(many["points"]) == {many["steps"]}
    assert (many["sparks"], many["elements"]) == (few["sparks"], few["elements"])
    assert [seen["legend"].replace(":", "") for seen in (few, many)] == [
        "step2,000train2.000 s",
        "step10,000train10.000 s",
    ]
