"""Writes what the first run prints into README.md and docs/start/first-run.md, from a real run.

Run on an idle machine: python -m tests.support.printed_run
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
RECIPE: Final = "topologies/laptop.toml"
HOME: Final = "/home/me/physarum"  # as the pages show the clone
LIMIT_S: Final = 1800
README, FIRST_RUN = ROOT / "README.md", ROOT / "docs/start/first-run.md"
FENCE: Final = re.compile(r"^```(?:text)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STEP: Final = re.compile(r"step +(\d+)/(\d+) ")
NUMBER: Final = re.compile(r"-?\d[\d,]*(\.\d+)?(m?s\b|m\d+s\b)?")
CURVE: Final = re.compile(r"[▁▂▃▄▅▆▇█]+")
MIDDLE: Final = 40  # the step that is shown between the first and the last
BEGIN: Final = (
    "starting run",
    "data ",
    "first sample",
    "  prompt",
    "  response",
    "  label",
    "evaluation",
    "first train",
)


def run_of(place: Path) -> list[str]:
    """Start the first run in a directory, and return the lines that it prints."""
    command = [sys.executable, "-P", str(ROOT / "bin/physarum.py"), "start-topology", str(ROOT / RECIPE)]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return done.stdout.splitlines()


def as_in_a_clone(lines: Sequence[str], place: Path) -> list[str]:
    """Return the lines as a run in a clone prints them."""
    text = "\n".join(lines).replace(f"{place}/", "").replace(str(place), HOME)
    text = re.sub(r" --set train\.num_steps=\d+", "", text)  # of a test
    text = re.sub(r"(cd \S+ && )\S+ \S*laptop\S*", rf"\1bin/start-topology {RECIPE}", text)
    return text.splitlines()


def shown(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the lines of the pages: of the run, with "..." for most of its steps, and of the summary.

    What a busy machine makes a run print in addition is left out.
    """
    end = lines.index("run laptop finished")
    steps = [number for number, line in enumerate(lines) if STEP.match(line)]
    middle = next((number for number in steps if step_of(lines[number]) == MIDDLE), steps[len(steps) // 2])
    begin = [line for line in lines[: steps[5]] if line.startswith(BEGIN)]
    begin.append(lines[steps[0]])
    begin.sort(key=_place_in_pages)  # the first sample may come before or after the first evaluation
    run = [*begin, "...", lines[middle], "...", lines[steps[-1]]]
    run += [line for line in lines[steps[-1] + 1 : end] if line.startswith("evaluation after")]
    return run, list(lines[end:])


def _place_in_pages(line: str) -> int:
    """Return where a line of the beginning stands: the first step is before the line about its tokens."""
    known = [number for number, begin in enumerate(BEGIN) if line.startswith(begin)]
    return 2 * known[0] if known else 2 * len(BEGIN) - 3


def step_of(line: str) -> int:
    """Return the number of the step that a line is of."""
    found = STEP.match(line)
    assert found is not None, line
    return int(found[1])


def shape_of(line: str) -> str:
    """Return a line without what differs from run to run: numbers, times, curves, and what a sample says."""
    line = re.sub(r"'[^']*'$", "'...'", line)
    line = re.sub(
        r"(^time .* a step: ).*", r"\1...", line
    )  # the parts in the order of their size, the small ones as one
    line = re.sub(r"(sample: group \d+), \w+,", r"\1, ended,", line)
    line = re.sub(r" +", " ", CURVE.sub("~", line))
    return NUMBER.sub("N", line)


def blocks_of(page: Path) -> list[str]:
    """Return the blocks of a page that a run has printed."""
    return [block for block in FENCE.findall(page.read_text()) if block.startswith(("starting run", "run laptop"))]


def written(page: Path, blocks: Sequence[Sequence[str]]) -> str:
    """Return the text of a page with these blocks in place of those that a run had printed."""
    text = page.read_text()
    for old, new in zip(blocks_of(page), blocks, strict=True):
        text = text.replace(old, "\n".join(new) + "\n")
    return text


def shapes_of(lines: Sequence[str], place: Path) -> tuple[list[str], list[str]]:
    """Return what the pages would show of the lines of a run in a directory, without what differs by run."""
    run, summary = shown(as_in_a_clone(lines, place))
    return [*map(shape_of, run)], [*map(shape_of, summary)]


def write_pages(run: Sequence[str], summary: Sequence[str]) -> None:
    """Write the lines into both pages, and the fields of the step in the middle into the table that explains them."""
    README.write_text(written(README, [[*run, "", *summary]]))
    text = written(FIRST_RUN, [run, summary])
    middle = next(line for line in run if line.startswith(f"step  {MIDDLE}/"))
    for field in middle.split(" | ")[1:6]:
        name = "tok/s" if field.endswith("tok/s") else field.partition(" ")[0]
        text = re.sub(rf"^\| `[^`|]*{name}[^`|]*` \|", f"| `{field}` |", text, flags=re.MULTILINE)
    FIRST_RUN.write_text(text)


def main() -> None:
    """Write both pages."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder).resolve()
        run, summary = shown(as_in_a_clone(run_of(place), place))
    write_pages(run, summary)


if __name__ == "__main__":
    main()
