"""Every view of the page in Chromium: of a run that trains, after a kill -9 in it, and of the run when it ended."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.observer import samples
from actors.observer.page import Address, Page, new_token, served
from messages import Outcome
from runtime.data.dump_files import write_pair
from runtime.data.dumps import Fate
from runtime.report.observed import Observed
from runtime.settings.tables.observe import PAGE_FILE
from tests.build.dumps import dumped_group
from tests.build.events import failed
from tests.chaos.harness import ROOT, Run
from tests.page.chromium import browsed, needs_chromium

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.timeout(400), pytest.mark.xdist_group("chromium")]

WITHOUT_END = 100_000  # train steps
STEPS = 30  # with dumps; they are read for longer than the page's samples are shown at first
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
            assert view["overflow"] <= 0, (name, width)
            assert view["text"].strip(), (name, width)


async def test_each_view_of_a_run_that_trains_and_of_one_that_ended(tmp_path: Path) -> None:
    needs_chromium()
    on = ("observe.page=127.0.0.1:0", "observe.samples=true")
    run = Run(tmp_path, num_steps=WITHOUT_END, eval_interval=3, overrides=on, paced=False)
    async with run.started() as command:
        await command.log.until_trained(3)
        url = (run.directory / PAGE_FILE).read_text().strip()
        trains = await browsed(url, shots_of(tmp_path, "trains"))
        check(trains, "running")
        assert "Reward" in trains[1280]["views"]["view-curves"]["text"]
        assert "trainer" in trains[1280]["views"]["view-now"]["text"]
        assert "read with an auditor credential" in trains[1280]["views"]["view-samples"]["text"]
        assert "Group " in trains[1280]["views"]["view-samples"]["text"]  # a group was opened
        assert "in flight" in trains[1280]["views"]["view-ledger"]["text"]
        command.log.kill("trainer")
        await command.log.until_restarted("trainer")
        check(await browsed(url, shots_of(tmp_path, "killed")), "running")
        command.send(signal.SIGINT)
        assert await command.end() == 130
    watch = [sys.executable, str(ROOT / "bin" / "watch.py"), str(run.directory), "--page"]
    process = await anyio.open_process(watch, stderr=subprocess.STDOUT)
    try:
        assert process.stdout is not None
        text = ""
        with anyio.fail_after(60):
            while "?token=" not in text or not text.endswith("\n"):
                text += (await process.stdout.receive()).decode()
        url = next(word for word in text.split() if "?token=" in word)
        ended = await browsed(url, shots_of(tmp_path, "ended"))
        check(ended, "stopped: SIGINT")
        assert "run.dump_details" in ended[1280]["views"]["view-samples"]["text"]
    finally:
        process.send_signal(signal.SIGINT)
        with anyio.fail_after(30):
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
    token = new_token()
    page = Page(observed, token, {"run.dump_details": f'"{dumps}"', HOSTILE: HOSTILE})
    async with served(page, Address("127.0.0.1", 0)) as port:
        found = await browsed(f"http://127.0.0.1:{port}/?token={token}", shots_of(tmp_path, "hostile"))
    for seen in found.values():
        assert seen["wrong"] == []
        assert seen["clean"]
    assert "steps are not read yet" in found[1280]["views"]["view-samples"]["text"]
    assert HOSTILE in found[1280]["views"]["view-settings"]["text"]
    assert HOSTILE in found[1280]["views"]["view-samples"]["text"]
