"""The view in a terminal, driven by textual's pilot: keys, sizes, no colour, texts that look like markup, the halt."""

import time
from pathlib import Path

import pytest
from textual.pilot import Pilot

from actors.observer import terminal
from actors.observer.observed import Observed
from actors.observer.terminal import RunView, log_tail
from messages import ActorStarted, HaltAnswered, RunStalled
from runtime.node.halting import NotHalted
from runtime.node.reopen import FoundRun
from runtime.util.exit_codes import EXIT_INTERRUPTED, EXIT_OK
from tests.support.log_of_a_run import LOG

pytestmark = pytest.mark.anyio
SHOWN_S = 40.0  # below the limit of a test
MARKUP = "[red]no[/red] \x1b[2J"


def observed() -> Observed:
    fold = Observed("r", 4)
    stall = RunStalled(idle_s=300.0, waiting={"trainer": MARKUP})
    for seq, event in enumerate((*LOG, ActorStarted(actor="rollout", node="n", pid=7), stall), 1):
        fold.apply(event, seq, 1000.0 + seq)
    return fold


def view(run_dir: Path, *, live: bool = True) -> RunView:
    made = RunView(FoundRun(name="r", directory=run_dir), observed())
    made.live = live
    return made


def screen_of(pilot: Pilot[int]) -> list[str]:
    """The lines of the terminal."""
    return [strip.text.rstrip() for strip in pilot.app.screen._compositor.render_strips()]


async def until(pilot: Pilot[int], words: str) -> list[str]:
    """Wait until the screen shows words; return its lines."""
    until = time.monotonic() + SHOWN_S
    while words not in "\n".join(lines := screen_of(pilot)):
        assert time.monotonic() < until, f"{words!r} is not in {lines}"
        await pilot.pause(0.02)
    return lines


async def test_keys_choose_what_is_shown_in_a_small_terminal_and_in_a_large_one(tmp_path: Path) -> None:
    async with view(tmp_path).run_test(size=(40, 12)) as pilot:
        await until(pilot, "8 issued:")
        for key, words in (("2", "reward "), ("3", "R rollout"), ("4", "group  state"), ("5", "checkpoint of step")):
            await pilot.press(key)
            lines = await until(pilot, words)
            assert max(map(len, lines)) <= 40
        await pilot.resize_terminal(120, 30)
        await pilot.press("1")
        assert len(await until(pilot, "rollout  up")) == 30


async def test_the_past_is_not_shown_as_the_present_before_the_log_is_read(tmp_path: Path) -> None:
    app = view(tmp_path)
    app.share_read = 0.259
    async with app.run_test(size=(80, 24)) as pilot:
        lines = "\n".join(await until(pilot, "r: reading the log, 25 %"))
        assert not any(words in lines for words in ("issued", "rollout  up", "waits for", "step 2"))
        await pilot.press("4")
        assert "in flight" not in "\n".join(await until(pilot, "group  state"))
        await pilot.press("2")
        await until(pilot, "reward ")  # curves are of the past in any case
        app.share_read = None
        app.changed()
        await pilot.press("1")
        await until(pilot, "rollout  up")


async def test_texts_of_a_run_are_shown_as_they_are(tmp_path: Path) -> None:
    async with view(tmp_path).run_test(size=(80, 24)) as pilot:
        lines = await until(pilot, "trainer waits for [red]no[/red]")
    assert "\x1b" not in "".join(lines)


async def test_a_process_opens_with_its_log_and_a_group_by_its_id(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rollout.jsonl").write_text('{"event":"[b]old[/b]","level":"info","time":"1"}\nno json\n')
    async with view(tmp_path).run_test(size=(80, 24)) as pilot:
        await until(pilot, "rollout  up")
        await pilot.press("enter")
        lines = "\n".join(await until(pilot, "1 info [b]old[/b]"))
        assert lines.index("process: pid 7") < lines.index("no json") < lines.index("[b]old[/b]")
        await pilot.press("escape", "g")
        await pilot.press("7", "enter")
        await until(pilot, "the log cannot be read")


async def test_a_log_that_is_not_there_is_named_and_no_other_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "secret.jsonl").write_text("{}")
    assert "has no log of ../secret" in (await log_tail(tmp_path, "../secret"))[0]


async def test_a_halt_is_asked_for_and_needs_the_login_of_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halted = list[str]()

    async def halt(found: FoundRun) -> HaltAnswered:
        halted.append(found.name)
        if len(halted) > 1:
            raise NotHalted("no group is being generated")
        return HaltAnswered(round=3, num_groups=5)

    monkeypatch.setattr(terminal, "halt_round", halt)
    async with view(tmp_path).run_test(size=(80, 24)) as pilot:
        await pilot.press("h")
        await pilot.pause()
        assert len(pilot.app.screen_stack) == 1
    (tmp_path / "bus.url").write_text("nats://u:p@127.0.0.1:1\n")
    async with view(tmp_path).run_test(size=(80, 24), notifications=True) as pilot:
        for answer in ("n", "escape"):
            await pilot.press("h")
            await until(pilot, "Halt the round that is generated now?")
            await pilot.press(answer)
        assert not halted
        for words in ("round 3 is halted: 5 groups", "not halted: no group"):
            await pilot.press("h", "y")
            await until(pilot, words)
    assert halted == ["r", "r"]


async def test_without_colour_the_cursor_is_reversed_and_nothing_has_a_colour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = view(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, "rollout  up")
        filters = app.get_line_filters()
        styles = [
            segment.style
            for strip in app.screen._compositor.render_strips()
            for segment in strip.apply_filter(filters[-1], app.screen.background_colors[0])
            if segment.style is not None
        ]
    assert all(one is None or one.is_default for style in styles for one in (style.color, style.bgcolor))
    assert any(style.reverse for style in styles)


@pytest.mark.parametrize(("key", "code"), [("q", EXIT_OK), ("ctrl+c", EXIT_INTERRUPTED)])
async def test_keys_end_the_view_with_the_exit_code_of_a_command(tmp_path: Path, key: str, code: int) -> None:
    app = view(tmp_path, live=False)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("h", key)
    assert app.return_value == code
