"""bin/report on the store of a small run, called in this process."""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from pyarrow import parquet

from actors.observer.observed import Observed
from actors.observer.page import report_page
from actors.observer.perfetto import Trace
from bin.report import main
from messages import GroupFailed
from runtime.report.fold.account import Account
from runtime.report.fold.spans import Span
from tests.bin.test_ledger import RUN, content_of, make
from tests.build.events import completed, failed, issued, trained, verdict
from tests.support.commands import called
from tests.support.log_of_a_run import LOG


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that is over; tests only read it."""
    directory = anyio.run(make, tmp_path_factory.mktemp("runs") / RUN)
    (directory / "versions-n1.jsonl").write_text('{"node":"n1","since":1.0,"versions":{"torch":"0.0.1"}}\n')
    return directory


def state_in(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="state">(.*?)</script>', page, re.DOTALL)
    return msgspec.json.decode(text)


def test_a_report_is_one_file_that_loads_nothing(ended: Path, tmp_path: Path) -> None:
    before = content_of(ended)
    done = called(main, str(ended), "--trace", "trace.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / f"{RUN}.html").read_text()
    state = state_in(page)
    assert (state["now"]["num_events"], state["now"]["step"], state["live"]) == (len(LOG), 2, False)
    assert state["ledger"]["books"]["trained"] == 4
    assert state["versions"] == {"n1: torch": "0.0.1"}  # those of the run, not of this machine
    assert re.findall(r'(?:src|href)="(?!data:)[^"]*"', page.replace(str(state), "")) == []
    assert content_of(ended) == before
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert called(main, "nobody", cwd=tmp_path).returncode == 2


def test_a_report_compares_two_runs(ended: Path, tmp_path: Path) -> None:
    done = called(main, str(ended), "--compare", str(ended), "--out", "both.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    state = state_in((tmp_path / "both.html").read_text())
    assert state["other"]["run"] == RUN
    assert state["other"]["rows"] == state["rows"] != []
    assert state["other"]["times"]["totals"] == state["times"]["totals"]
    assert called(main, str(ended), "--compare", "nobody", cwd=tmp_path).returncode == 2


def test_tables_are_written_beside_the_report(ended: Path, tmp_path: Path) -> None:
    done = called(main, str(ended), "--parquet", "tables", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tables    tables: steps 1, groups 8, samples 5, requests 5, scores 6, processes 0" in done.stdout
    states = Counter(parquet.read_table(tmp_path / "tables" / "groups.parquet")["state"].to_pylist())
    assert states == {"trained": 4, "dropped": 2, "failed": 1, "in_flight": 1}


def test_without_pyarrow_nothing_is_read(ended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # what an import meets where it is not installed
    done = called(main, str(ended), "--parquet", "tables", cwd=tmp_path)
    assert done.returncode == 2
    assert re.search(r'--parquet: .*bin/setup, or pip install "physarum\[parquet\]"', done.stderr)
    assert list(tmp_path.iterdir()) == []


def test_a_text_of_a_run_stays_a_text() -> None:
    observed = Observed("r")
    text = "</script><script>alert(1)</script>"
    for seq, event in enumerate((issued(0), failed(0, text)), 1):
        observed.apply(event, seq, 1.0)
    page = report_page(observed, {"key": text}, {"n: torch": text}, live=False).decode()
    assert text not in page
    state = state_in(page)
    assert (state["ledger"]["endings"][0]["reason"], state["settings"]["key"]) == (text, text)
    assert state["versions"] == {"n: torch": text}
    assert isinstance(failed(0), GroupFailed)


def test_a_trace_has_the_spans_of_groups_and_steps() -> None:
    trace, account, spans = Trace(), Account(), list[Span]()
    account.apply(issued(0), 100.0, spans)
    account.apply(completed(0, rollout_time_s=2.0, reward_time_s=1.0), 103.0, spans)
    account.apply(verdict(0, 2), 103.5, spans)
    metrics = {"perf/train_wait_time": 3.5, "perf/fetch_time": 0.25, "perf/train_time": 1.0}
    account.apply(trained(0, metrics=metrics), 104.75, spans)
    trace.add(spans, account.began)
    found = json.loads(trace.encoded())["traceEvents"]
    kinds = Counter(event["ph"] for event in found)
    assert kinds["b"] == kinds["e"] == 4
    assert {event["ph"] for event in found} == {"M", "b", "e", "X"}
    for event in found:  # what the format requires of each kind
        needed = {"M": {"args"}, "X": {"ts", "dur"}, "b": {"ts", "id", "cat"}, "e": {"ts", "id", "cat"}}[event["ph"]]
        assert needed | {"name", "pid", "tid"} <= set(event)
    begins = {event["name"]: event["ts"] for event in found if event["ph"] == "b"}
    assert begins == {"queue": 0, "rollout": 0, "scores": 2_000_000, "filter": 3_000_000}
    steps = {event["name"]: (event["ts"], event["dur"]) for event in found if event["ph"] == "X"}
    assert steps["step 1"] == (0, 4_750_000)
    assert steps["train"] == (3_750_000, 1_000_000)
