"""Tables of a run, from hand-made logs, and the Parquet files of them as pyarrow reads them."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyarrow import parquet as reader

from actors.observer import parquet
from actors.observer.observed import Observed
from actors.observer.parquet import parquet_tables
from actors.observer.tables import TABLES, Tables
from messages import ActorExited, ActorStarted, EvalCompleted, Message
from runtime.ledger.changes import Change
from runtime.ledger.fold import LedgerState, fold
from runtime.report.report import FOLDED
from tests.build.events import batch, completed, issued, trained, verdict
from tests.build.samples import summary
from tests.support.archived_run import GROUPS, SAMPLES, events_of_a_run
from tests.support.log_of_a_run import INSTANCE, LOG

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "tables.md"
KINDS = {"int": "int64", "float": "double", "text": "string", "time": "timestamp", "bool": "bool", "numbers": "map"}


def tables_of(events: Sequence[Message]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each table, by the names of its columns. Event N was logged at second N."""
    observed = Observed("r", 2)
    tables, found = Tables(observed), dict[str, list[dict[str, Any]]]((name, []) for name in TABLES)

    def add(rows: Any) -> None:
        for name, row in rows:
            found[name].append(dict(zip([column.name for column in TABLES[name]], row, strict=True)))

    for seq, event in enumerate(events, 1):
        changes = list[Change]()
        rows = observed.apply(event, seq, float(seq), changes)
        add(tables.apply(event, seq, float(seq), rows, changes))
    add(tables.finish(observed.open_row))
    return found


def test_each_group_has_one_row_with_what_became_of_it() -> None:
    groups = {row["group_id"]: row for row in tables_of(LOG)["groups"]}
    states = {number: (row["state"], row["reason"], row["step"], row["attempts"]) for number, row in groups.items()}
    assert states == {
        0: ("trained", None, 1, 1),
        1: ("trained", None, 1, 1),
        2: ("dropped", "zero_std", None, 1),
        3: ("trained", None, 2, 2),
        4: ("failed", "no score", None, 1),
        5: ("trained", None, 2, 1),
        6: ("dropped", "too_stale", None, 1),
        7: ("in_flight", None, None, 1),
    }
    assert [groups[3][name] for name in ("issued", "completed", "judged", "ended")] == [3.0, 18.0, 20.0, 26.0]
    assert (groups[0]["num_samples"], groups[0]["reward_mean"], groups[7]["reward_mean"]) == (1, 0.5, None)


def test_the_rows_add_up_to_the_ledger() -> None:
    state = LedgerState()
    for seq, event in enumerate(LOG, 1):
        if type(event) in FOLDED:
            fold(state, event, seq)
    found = Counter(row["state"] for row in tables_of(LOG)["groups"])
    books = msgspec.to_builtins(state.books())
    assert found.total() == books.pop("issued")
    assert found == {name: count for name, count in books.items() if count}


def test_samples_requests_and_scores_are_of_attempts_that_count() -> None:
    tables = tables_of(LOG)
    assert [(row["group_id"], row["attempt"], row["time"]) for row in tables["requests"]] == [
        (0, 0, 4.0),
        (1, 0, 6.0),
        (2, 0, 7.0),
        (3, 1, 18.0),  # the late result of its first attempt does not count
        (5, 0, 21.0),
    ]
    assert [row["group_id"] for row in tables["samples"]] == [0, 1, 2, 3, 5]
    evaluated = [row for row in tables["scores"] if row["eval_set"] is not None]
    assert [(row["eval_set"], row["eval_step"], row["item"], row["reward"]) for row in evaluated] == [
        ("heldout", 2, 0, 0.5)
    ]
    twice = (*LOG, *[event for event in LOG if isinstance(event, EvalCompleted)])
    assert len(tables_of(twice)["scores"]) == len(tables["scores"]) == 6


def test_a_sample_without_a_score_has_no_row_among_the_scores() -> None:
    given = summary(0, (1, 0), reward=0.25, score={"score": 0.25, "why": "half"}, rewards={"style": 1.0})
    replaced, own = summary(1, (2, 0), reward=0.0, reason="timeout"), summary(2, (3, 0), reward=2.0, own_reward=True)
    tables = tables_of((issued(0), completed(0, samples=(given, replaced, own), instance=INSTANCE, reward_time_s=1.5)))
    (score,) = tables["scores"]
    assert (score["index"], score["score"], score["rewards"], score["group_reward_s"]) == (
        0,
        '{"score":0.25,"why":"half"}',
        {"style": 1.0},
        1.5,
    )
    assert [(row["reward"], row["own_reward"], row["reason"]) for row in tables["samples"]] == [
        (0.25, False, None),
        (0.0, False, "timeout"),
        (2.0, True, None),
    ]


def test_steps_have_their_metrics_and_the_parts_of_their_time() -> None:
    events = [issued(0), completed(0), verdict(0, 2), batch(0, (0, 2)), trained(0, num_tokens=7, metrics={"x": 2.0})]
    events += [
        trained(0, replay=True, num_tokens=7),
        issued(1),
        completed(1),
        verdict(1, 8),
        batch(1, (1, 8)),
        trained(1),
    ]
    first, second = tables_of(events)["steps"]
    assert (first["step"], first["time"], first["began"], first["num_tokens"]) == (1, 5.0, 1.0, 7)
    assert (first["metrics"]["x"], first["metrics"]["rollout/raw_reward"]) == (2.0, 1.0)
    assert (sum(first["parts"].values()), sum(second["parts"].values())) == (4.0, 5.0)


def test_a_process_has_a_row_for_each_of_its_lives() -> None:
    started = ActorStarted(actor="reward", node="n", pid=7)
    killed = ActorExited(actor="reward", node="n", pid=7, exit_code=-9, reason="killed", restart_in_s=1.0)
    rows = tables_of((started, killed, ActorStarted(actor="reward", node="n", pid=8, restarts=1)))["processes"]
    assert [tuple(row.values()) for row in rows] == [
        ("reward", "n", 7, 0, 1.0, 2.0, -9, "killed"),
        ("reward", "n", 8, 1, 3.0, None, None, None),
    ]


def test_files_are_written_row_group_by_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP", 100)
    observed = Observed("r", 2)
    tables, events = Tables(observed), list(events_of_a_run(500))
    with parquet_tables(tmp_path / "new" / "tables") as files:
        for seq, event in enumerate(events, 1):
            changes = list[Change]()
            rows = observed.apply(event, seq, seq / 8, changes)
            files.add(tables.apply(event, seq, seq / 8, rows, changes))
        files.add(tables.finish(observed.open_row))
    read = {name: reader.read_table(tmp_path / "new" / "tables" / f"{name}.parquet") for name in TABLES}
    num_groups = GROUPS * observed.steps
    assert {name: table.num_rows for name, table in read.items()} == files.num_rows
    assert (read["samples"].num_rows, read["groups"].num_rows) == (SAMPLES * num_groups, num_groups)
    assert reader.ParquetFile(tmp_path / "new" / "tables" / "samples.parquet").num_row_groups == 21
    whole = [event for event in events if type(event).__name__ == "GroupCompleted"]
    lens = [sample.response_len for event in whole for sample in event.samples]  # type: ignore[attr-defined]
    assert read["samples"]["response_tokens"].to_pylist() == lens
    assert read["groups"]["ended"][0].as_py().timestamp() == 75 / 8  # event 75 ends the first step
    assert dict(read["steps"]["metrics"][0].as_py())["train/loss"] == events[74].metrics["train/loss"]  # type: ignore[attr-defined]


def test_a_failure_leaves_older_files_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "steps.parquet").write_bytes(b"older")
    with suppress(OSError), parquet_tables(tmp_path) as files:
        files.add([("processes", ("reward", "n", 7, 0, 1.0, None, None, None))])
        raise OSError("full")
    assert [path.name for path in tmp_path.iterdir()] == ["steps.parquet"]
    assert (tmp_path / "steps.parquet").read_bytes() == b"older"


def test_the_page_names_each_column() -> None:
    page = PAGE.read_text().splitlines()
    rows = [
        f"| {column.name} | {KINDS[column.kind]} | {column.text} |" for columns in TABLES.values() for column in columns
    ]
    assert [line for line in page if line in rows] == rows
