"""The strip of the page in Chromium: in each state of a run, on each view, wide and narrow, light and dark."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import TaskStatus

from actors.observer.access import Address
from actors.observer.observed import Observed
from actors.observer.page import Page, served
from messages import BufferStarted, Message, RunFailed, RunFinished, RunStalled, RunStopped
from tests.page.chromium import needs_chromium, visited
from tests.support.log_of_a_run import LOG

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.xdist_group("chromium")]

SECRET = "5ec4e7" * 8
STALL = RunStalled(idle_s=300.0, waiting={"trainer": "a batch"})
FAILURE = RunFailed(incarnation=1, steps=2, reason="all graders failed")
STATES: dict[str, tuple[Sequence[Message], bool, float | None]] = {  # events, whether it is live, share of its log
    "\u25cb starting no sample is complete yet": ((*LOG, BufferStarted(incarnation=3)), True, None),
    "\u25b2 stalled trainer waits for a batch": ((*LOG, STALL), True, None),
    "\u2715 failed all graders failed": ((*LOG, FAILURE), False, None),
    "\u25a0 stopped SIGINT": ((*LOG, RunStopped(node="n", reason="SIGINT", exit_code=130)), False, None),
    "? not running no node daemon runs it, and the log does not say how it ended": (LOG, False, None),
    "\u2026 reading the log reading the log, 25 %": (LOG, True, 0.25),
    "\u25cf running": (LOG, True, None),
    "\u2713 finished 2 steps": ((*LOG, RunFinished(incarnation=1, steps=2, reason="2 steps")), True, None),
}
LOST = "? connection lost it was running when this page heard of it last"
CONTRAST = 4.5  # WCAG 2.2, success criterion 1.4.3


def luminance(colour: str) -> float:
    """Relative luminance of a CSS colour, as WCAG 2.2 defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_contrast_is_that_of_the_standard() -> None:
    assert contrast("rgb(0, 0, 0)", "rgb(255, 255, 255)") == pytest.approx(21)
    assert contrast("rgb(118, 118, 118)", "rgb(255, 255, 255)") == pytest.approx(4.54, abs=0.01)  # of WebAIM's checker


async def served_until(ends: anyio.Event, page: Page, *, closes: bool, task_status: TaskStatus[int]) -> None:
    """Serve a page until an event; it sends how the run ended if its process would do so too."""
    async with served(page, Address("127.0.0.1", 0)) as port:
        task_status.started(port)
        await ends.wait()
        if closes:
            await page.close()


async def test_each_state_has_its_word_and_a_lost_connection_is_not_a_finished_run(tmp_path: Path) -> None:
    needs_chromium()
    never, opened = anyio.Event(), anyio.Event()
    urls, found = list[str](), dict[str, Any]()
    async with anyio.create_task_group() as tasks:
        for number, (events, live, share) in enumerate(STATES.values()):
            observed = Observed("a-run-with-a-rather-long-name", 4)
            for seq, event in enumerate(events, 1):
                observed.apply(event, seq, 1000.0 + seq)
            page = Page(observed, lambda: SECRET)
            page.live, page.share_read = live, share
            is_last = number >= len(STATES) - 2  # the first of the two is killed
            serve = partial(served_until, opened if is_last else never, page, closes=number == len(STATES) - 1)
            urls.append(f"http://127.0.0.1:{await tasks.start(serve)}/#token={SECRET}")

        async def visit() -> None:
            found.update(await visited("strip.py", str(tmp_path), *urls))
            tasks.cancel_scope.cancel()

        tasks.start_soon(visit)
        while not (tmp_path / "opened").exists():  # noqa: ASYNC110 - another process writes it
            await anyio.sleep(0.05)
        opened.set()
    colours = dict[str, set[str]]()
    for seen in found["shown"]:
        words = list(STATES)[seen["page"]]
        where = words, seen["width"], seen["scheme"]
        assert seen["words"] == words, where
        assert len(seen["views"]) == (8 if seen["scheme"] == "light" else 0), where
        assert all(seen["views"]), where
        assert seen["overflow"] <= 0, where
        assert seen["broken"] == [], where
        assert seen["bar"] == seen["badge"], where
        for text, colour, behind in seen["colours"]:
            assert contrast(colour, behind) >= CONTRAST, (where, text, colour, behind)
        numbers = seen["numbers"]
        assert numbers["Failed groups"] == "\u25b2 1 (13 %)", where  # 1 of 8
        assert (numbers["Dropped"], numbers["Restarts"]) == ("2 (25 %)", "0"), where
        assert "Advice" in numbers, where
        if seen["page"] == 0:
            assert seen["legends"] == ["step1rollout/raw_reward0.5"] * 2, (
                where
            )  # before and after the pointer was there
            assert seen["responses"] == [
                ["83", "(empty)"],
                ["83", "(same reward)"],
                ["(empty)", "(same reward)"],
                ["", ""],
            ]
            assert seen["curves_of"] == {"a = b": [1, None, 2], "c": [1, 0, 2]}
        assert numbers["Reward"] == "0.500", where
        assert ("Time left" in numbers) == (words.split()[1] in ("running", "stalled")), where
        assert any(curve.startswith("Reward from ") for curve in seen["curves"]), where
        colours.setdefault(words, set()).add(seen["badge"])
    assert all(len(each) == 1 for each in colours.values())
    assert len(set.union(*colours.values())) >= 6
    assert set(found["ended"]) == {LOST, list(STATES)[-1]}
