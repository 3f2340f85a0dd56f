"""The command that measures the demo, on lines as a run prints them; README shows what it wrote."""

import re
from pathlib import Path

import pytest

from tests.learning.demo import BEGIN, END, Demo, Point, Run, Seen, block_of, page_of, with_block

ROOT = Path(__file__).parents[2]
ROW = r" *\d+ +\d+\.\d( +(\d\.\d\d|-))+( +█+)?\n"
KILLED = r"engine and trainer of seed \d+ were killed with -9 after step \d+\n"
FORM = re.compile(
    r"```\nSmolLM2-135M-Instruct, \w+, .+, \d+ cores, \d{4}-\d\d-\d\d\n"
    rf"step  minutes( +seed \d+)+   share of 100 held-out sums answered right\n({ROW})+({KILLED})*```\n"
)


def point(step: int, minutes: float, held_out: float) -> Point:
    return Point(step=step, minutes=minutes, held_out=held_out)


SLOW = Run(seed=7, points=(point(0, 0.6, 0.0), point(20, 3.0, 0.46)), killed_at=10)
QUICK = Run(seed=1234, points=(point(0, 0.5, 0.0), point(20, 2.0, 0.54), point(40, 3.5, 0.51)))
DEMO = Demo(date="2026-11-30", cpu="AMD EPYC", cores=2, dtype="bfloat16", minutes=12.0, runs=(QUICK, SLOW))
DRAWN = """\
```
SmolLM2-135M-Instruct, bfloat16, AMD EPYC, 2 cores, 2026-11-30
step  minutes  seed 1234     seed 7   share of 100 held-out sums answered right
   0      0.6       0.00       0.00
  20      3.0       0.54       0.46   ██████████
  40      3.5       0.51          -   ██████████
engine and trainer of seed 7 were killed with -9 after step 10
```
"""


def test_evaluations_are_read_from_what_a_run_prints(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "starting run\nevaluation after step 0 (weights v1): sums-held-out 0.000\nstep  19/100 | reward 0.3\n"
    )
    seen = Seen(log, start=0.0)
    seen.look()
    assert (seen.step, [each.step for each in seen.points.values()]) == (19, [0])
    with log.open("a") as appended:
        appended.write("evaluation after step 20 (weights v21): sums-held-out 0.540\nevaluation after step 40 (we")
    seen.look()
    assert [(each.step, each.held_out) for each in seen.points.values()] == [(0, 0.0), (20, 0.54)]
    with log.open("a") as appended:  # after a death step 20 is evaluated again
        appended.write("ights v9): sums-held-out 0.510\nevaluation after step 20 (weights v33): sums-held-out 0.550\n")
    seen.look()
    assert [(each.step, each.held_out) for each in seen.points.values()] == [(0, 0.0), (20, 0.54), (40, 0.51)]


def test_curves_are_drawn_by_step() -> None:
    assert block_of(DEMO) == DRAWN
    assert FORM.fullmatch(DRAWN)


def test_the_page_says_when_each_seed_reached_the_goal() -> None:
    page = page_of(DEMO)
    assert "| 1234 | 0.54, step 20, 2.0 min | 0.54, step 20, 2.0 min | 0.51, step 40, 3.5 min | - | 0.00 |\n" in page
    assert "| 7 | no | 0.46, step 20, 3.0 min | 0.46, step 20, 3.0 min | after step 10 | 0.00 |\n" in page
    assert DRAWN in page


def test_a_block_replaces_the_one_before() -> None:
    once = with_block(f"text\n{BEGIN}{END}more\n", DRAWN)
    assert once == f"text\n{BEGIN}{DRAWN}{END}more\n"
    assert with_block(once, DRAWN) == once
    with pytest.raises(ValueError, match="the page has no lines"):
        with_block("text\n", DRAWN)


def test_readme_shows_the_newest_measurement() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.partition(BEGIN)[2].partition(END)[0]
    pages = sorted((ROOT / "docs" / "results").glob("*-demo-smollm2.md"))
    assert bool(pages) == bool(shown)
    for page in pages[-1:]:
        assert FORM.fullmatch(shown)
        assert shown in page.read_text(encoding="utf-8")
