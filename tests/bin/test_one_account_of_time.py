"""One recorded run: all that shows times says the same numbers, since each is a view of one account."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anyio
import pytest
from pyarrow import parquet

from actors.observer.exposition import families_of
from actors.observer.following import followed
from actors.observer.observed import Observed
from actors.observer.traces import traced
from bin import report, watch
from messages import Message
from runtime.node.reopen import find_run
from runtime.report.fold.spans import Span
from runtime.report.report import Report
from runtime.report.times import KINDS, WallTime
from tests.support.archived_run import make_archived_run
from tests.support.commands import called

Events = list[tuple[Message, int, float]]
Seconds = dict[str, float]


async def events_of(directory: Path) -> Events:
    await make_archived_run(directory, 400)
    async with followed(find_run(str(directory)), waits=False) as events:
        return [(received.message, received.seq, received.unix_time) async for received in events]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Events, dict[str, Any]]:
    """The directory of a run, its events, and what `bin/watch --time --json` says of it."""
    directory = tmp_path_factory.mktemp("runs") / "long"
    events = anyio.run(events_of, directory)
    return directory, events, json.loads(called(watch.main, str(directory), "--time", "--json").stdout)


def parts_in(text: str) -> dict[str, tuple[str, str]]:
    """Seconds and share of each part in a line or a table."""
    found = re.findall(r"([a-z ]+?) +(\d+\.\d+) s +\(? *(\d+\.\d)%", text)
    return {part.strip(): (seconds, share) for part, seconds, share in found}


def near(parts: Seconds) -> Any:
    return pytest.approx({part: seconds for part, seconds in parts.items() if seconds > 0}, abs=2e-6)


def steps_of(told: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {step["step"]: step for step in told["steps"] if step["what"] == "step"}


def test_the_wall_time_is_of_steps_that_count_and_of_the_rest(recorded: tuple[Path, Events, dict[str, Any]]) -> None:
    """All of it, and no step that was trained again counts."""
    _, events, told = recorded
    wall = WallTime()
    for message, _, time in events:
        wall.take(message, time)
    seconds = wall.seconds()
    assert math.fsum(seconds.values()) == pytest.approx(wall.wall_s, rel=1e-6)
    count = sum(step["end"] - step["begin"] for step in steps_of(told).values())
    assert 0 < seconds[KINDS["step"]] <= count + 1e-6


def test_the_closing_line_and_the_rows_say_what_watch_says(recorded: tuple[Path, Events, dict[str, Any]]) -> None:
    directory, events, told = recorded
    closing, rows, observed = Report("long", 100, events[0][2]), list[dict[str, Any]](), Observed("long")
    for event, seq, time in events:
        closing.apply(event, seq, time)
        rows += observed.apply(event, seq, time)
    (line,) = [line for line in closing.summary(events[-1][2]) if line.startswith("time ")]
    table = called(watch.main, str(directory), "--time").stdout.splitlines()
    assert line.removeprefix("time").partition(":")[0].strip() == table[0]
    shown, parts = parts_in(line.partition(":")[2]), parts_in("\n".join(table[1:]))
    other = sum(float(seconds) for part, (seconds, _) in parts.items() if part not in shown)
    assert float(shown.pop("other", ("0.0", ""))[0]) == pytest.approx(other, abs=0.01)
    assert shown == {part: parts[part] for part in shown}
    assert len(shown) > 4
    steps = steps_of(told)
    assert {row["step"]: row["perf/step_time"] for row in rows} == {
        number: pytest.approx(step["end"] - step["begin"]) for number, step in steps.items()
    }
    mean = math.fsum(row["perf/step_time"] for row in rows) / len(rows)
    assert f"{mean:.3f} s a step" in line
    prefix = "perf/time/"
    for row in rows:
        parts = {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}
        assert parts == near({name.replace(" ", "_"): s for name, s in steps[row["step"]]["parts"].items()})
    metrics = next(family for family in families_of(observed) if family.name == "time_seconds")
    assert {labels["part"]: seconds for labels, seconds in metrics.samples} == near(told["seconds"])


def test_parquet_says_what_watch_says(recorded: tuple[Path, Events, dict[str, Any]], tmp_path: Path) -> None:
    directory, _, told = recorded
    assert called(report.main, str(directory), "--parquet", "tables", cwd=tmp_path).returncode == 0
    rows = parquet.read_table(tmp_path / "tables" / "steps.parquet").to_pylist()
    steps = steps_of(told)
    assert {row["step"] for row in rows} == set(steps)
    for row in rows:
        step = steps[row["step"]]
        assert dict(row["parts"]) == near(step["parts"])
        assert (row["time"] - row["began"]).total_seconds() == pytest.approx(step["end"] - step["begin"], abs=2e-6)
        assert dict(row["metrics"])["perf/step_time"] == pytest.approx(step["end"] - step["begin"])


def summed(bars: Iterable[tuple[int, str, float, float]]) -> dict[int, Counter[str]]:
    """Seconds of parts by step."""
    found: dict[int, Counter[str]] = {}
    for step, part, begin, end in bars:
        found.setdefault(step, Counter())[part] += end - begin  # pyright: ignore[reportArgumentType]
    return found


def test_timeline_and_traces_say_what_watch_says(recorded: tuple[Path, Events, dict[str, Any]], tmp_path: Path) -> None:
    directory, events, told = recorded
    observed, spans = Observed("long"), list[Span]()
    for event, seq, time in events:
        observed.apply(event, seq, time)
        spans += observed.spans
    window = observed.timeline.window(0, 100)
    sent = [span for span in map(traced, spans) if span is not None and re.fullmatch(r"step/\d+", span.parent)]
    assert called(report.main, str(directory), "--trace", "t.json", cwd=tmp_path).returncode == 0
    drawn = [each for each in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if each["ph"] == "X"]
    rows = {each["tid"] for each in drawn if each["name"] in told["seconds"]}
    steps = sorted((each["ts"], each["ts"] + each["dur"]) for each in drawn if each["name"].startswith("step "))
    views = {
        "timeline": [(bar.step, bar.name, bar.begin, bar.end) for bar in window.bars if bar.kind == "part"],
        "OTLP": [(int(span.parent[5:]), span.name, span.begin, span.end) for span in sent],
        "Perfetto": [
            (number, each["name"], each["ts"] / 1e6, (each["ts"] + each["dur"]) / 1e6)
            for number, (begin, end) in enumerate(steps, 1)
            for each in drawn
            if each["tid"] in rows and begin <= each["ts"] < end
        ],
    }
    expected = {number: near(step["parts"]) for number, step in steps_of(told).items()}
    for view, bars in views.items():
        found = {step: dict(parts) for step, parts in summed(bars).items() if step}
        assert found == expected, view
    assert {number: (begin, end) for number, begin, end in window.steps} == {
        number: (pytest.approx(step["begin"]), pytest.approx(step["end"])) for number, step in steps_of(told).items()
    }
