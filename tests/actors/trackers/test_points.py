"""What trackers log: the points of a row, the file of rows while it grows, and that a point is logged once."""

import json
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.trackers.__main__ import follow
from actors.trackers.points import Point, PointKey, RowsFile, axis_of, points_of
from actors.trackers.wandb import BLOCK_BYTES, FILE_HEADER_BYTES, records_of
from runtime.util.import_path import ROOT

ROW = {
    "step": 3,
    "time": 1000.5,
    "rollout/step": 2,
    "eval/step": 3,
    "train/loss": 0.5,
    "train/grad_norm": "NaN",
    "rollout/raw_reward": 1,
    "perf/step_time": 2.0,
    "passrate/pass@1": 0.25,
    "groups/trained": 48,
    "weights/version": 3,
    "eval/gsm8k": 0.75,
}
OPTIONS: dict[str, Any] = {"optimizer_steps": 1, "always_use_train_step": False}


def steps_of(row: dict[str, Any], **options: Any) -> dict[str, int]:
    return {point.key.axis: point.key.step for point in points_of(row, **options)}


def test_a_row_is_split_by_slimes_step_axes() -> None:
    rollout, train, evaluation = points_of(ROW)
    assert rollout.key == PointKey("rollout", 2)
    names = {"rollout/raw_reward", "perf/step_time", "passrate/pass@1", "groups/trained", "weights/version"}
    assert rollout.values.keys() == names
    assert train.key == PointKey("train", 2)
    assert train.values["train/loss"] == 0.5
    assert str(train.values["train/grad_norm"]) == "nan"
    assert evaluation == Point(PointKey("eval", 3), 1000.5, {"eval/gsm8k": 0.75})


@pytest.mark.parametrize(
    ("always", "steps"),
    [(False, {"rollout": 2, "train": 8, "eval": 3}), (True, {"rollout": 8, "train": 8, "eval": 12})],
)
def test_train_steps_count_optimizer_steps(always: bool, steps: dict[str, int]) -> None:
    assert steps_of(ROW, optimizer_steps=4, always_train_step=always) == steps


def test_the_row_before_training_has_its_evaluation_alone() -> None:
    row = {"step": 0, "time": 1.0, "eval/step": 0, "eval/gsm8k": 0.5, "perf/eval_time": 3.0}
    assert steps_of(row) == {"eval": 0}
    assert points_of(row)[0].values == {"eval/gsm8k": 0.5, "perf/eval_time": 3.0}


def test_an_evaluation_that_ends_late_is_logged_with_its_time() -> None:
    row = {name: value for name, value in ROW.items() if name != "eval/gsm8k"}
    logged = {point.key for point in points_of(row)}
    (late,) = [point for point in points_of(ROW | {"perf/eval_time": 3.0}) if point.key not in logged]
    assert late == Point(PointKey("eval", 3), 1000.5, {"eval/gsm8k": 0.75, "perf/eval_time": 3.0})


@pytest.mark.parametrize("value", ["text", None, [1], {"a": 1}, True, "1.5"])
def test_what_is_no_number_is_left_out(value: object) -> None:
    assert points_of({"step": 1, "time": 1.0, "train/x": value}) == []


@pytest.mark.parametrize("row", [{}, {"step": "1", "time": 1.0}, {"step": 1}, {"step": 1, "time": "now"}])
def test_a_row_without_step_and_time_has_no_points(row: dict[str, Any]) -> None:
    assert points_of(row | {"train/loss": 1.0}) == []


def test_a_line_is_read_when_it_is_complete_and_a_replaced_file_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with RowsFile(path) as rows:
        assert list(rows.new()) == []
        with path.open("a") as file:
            file.write('{"step": 1}\nno JSON\n[1]\n{"step"')
            file.flush()
            assert list(rows.new()) == [{"step": 1}]
            file.write(": 2}\n")
        assert list(rows.new()) == [{"step": 2}]
        assert list(rows.new()) == []
        for version in range(10):
            for _ in range(2):  # a file system gives the number of the file before the last one to the second
                (tmp_path / "other").write_text(f'{{"step": 1, "eval/x": {version}}}\n{{"step": 2}}\n')
                (tmp_path / "other").replace(path)
            assert list(rows.new()) == [{"step": 1, "eval/x": version}, {"step": 2}]
            assert list(rows.new()) == []


class Mortal:
    """A tracker that keeps its last points only in memory, and is killed after some calls."""

    place = "here"

    def __init__(self, stored: list[PointKey], *, lives: int, keeps: int) -> None:
        self._stored = stored
        self._unstored: list[PointKey] = []
        self._lives = lives
        self._keeps = keeps

    def logged(self) -> set[PointKey]:
        return set(self._stored)

    def begin(self) -> None:
        pass

    def log(self, point: Point) -> None:
        self._unstored.append(point.key)
        if len(self._unstored) > self._keeps:
            self._stored.append(self._unstored.pop(0))
        self._lives -= 1
        if self._lives < 0:
            raise KeyboardInterrupt

    def flush(self) -> None:
        pass

    def finish(self) -> None:
        self._stored += self._unstored


@given(lives=st.lists(st.integers(0, 12), max_size=6), keeps=st.integers(0, 4), num_rows=st.integers(0, 8))
def test_whenever_processes_die_every_point_is_logged_once(
    tmp_path_factory: pytest.TempPathFactory, lives: list[int], keeps: int, num_rows: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    lines = [json.dumps(ROW | {"step": number}) for number in range(num_rows)]
    path.write_text("".join(f"{line}\n" for line in lines))
    stored: list[PointKey] = []
    stop = threading.Event()
    stop.set()
    for left in [*lives, 1000]:
        with suppress(KeyboardInterrupt), RowsFile(path) as rows:
            follow(Mortal(stored, lives=left, keeps=keeps), rows, OPTIONS, stop)
    assert len(stored) == len(set(stored))
    assert set(stored) == {point.key for line in lines for point in points_of(json.loads(line))}


def test_rows_before_the_stop_are_logged_and_none_is_waited_for(tmp_path: Path) -> None:
    path, stored, stop = tmp_path / "metrics.jsonl", list[PointKey](), threading.Event()
    with RowsFile(path) as rows:
        worker = threading.Thread(
            target=follow,
            args=(Mortal(stored, lives=1000, keeps=1000), rows, OPTIONS, stop),
            kwargs={"look_every_s": 30.0},
        )
        worker.start()
        path.write_text(json.dumps(ROW) + "\n")
        stop.set()
        worker.join(10)
    assert stored == [PointKey("rollout", 2), PointKey("train", 2), PointKey("eval", 3)]


REFUSED = """
import sys
from actors.trackers.__main__ import TRACKERS, main
class Refused:
    place = "https://user:pass@word@mlflow.example:5000"
    def __init__(self, options, run_dir, name): pass
    def logged(self): return set()
    def begin(self): pass
    def flush(self): raise ConnectionError("no answer from " + self.place)
TRACKERS["refused"] = Refused
sys.exit(main(sys.argv[1:]))
"""


def test_no_login_of_a_tracker_is_printed(tmp_path: Path) -> None:
    (tmp_path / "run-id.json").write_text('{"id": "0123456789abcdef"}')
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, "refused", json.dumps(OPTIONS | {"run": "r"})],
        env={"PYTHONPATH": str(ROOT), "PHYSARUM_RUN_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1
    assert "logging to https://***@mlflow.example:5000," in done.stderr
    assert "ConnectionError: no answer from https://***@mlflow.example:5000" in done.stderr
    assert "word" not in done.stderr


@pytest.mark.parametrize(
    ("name", "axis"), [("train/a/b", "train"), ("eval/x", "eval"), ("other", "rollout"), ("perf/eval_time", "eval")]
)
def test_metrics_of_other_families_are_on_the_rollout_axis(name: str, axis: str) -> None:
    assert axis_of(name) == axis


def leveldb_log(records: list[bytes]) -> bytes:
    """A LevelDB log behind W&B's header, by the format's description."""
    data = b":W&B" + b"\xbd\xe1\x00"
    for record in records:
        rest, is_first = record, True
        while True:
            room = BLOCK_BYTES - len(data) % BLOCK_BYTES
            if room < 7:
                data += b"\0" * room
                continue
            part, rest = rest[: room - 7], rest[room - 7 :]
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[is_first, not rest]
            data += struct.pack("<IHB", 0, len(part), kind) + part
            is_first = False
            if not rest:
                break
    return data


@given(sizes=st.lists(st.integers(0, 3 * BLOCK_BYTES), max_size=5), cut=st.integers(0, 100))
def test_wandbs_file_is_read_up_to_where_a_crash_cut_it(sizes: list[int], cut: int) -> None:
    records = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    data = leveldb_log(records)
    assert len(data) >= FILE_HEADER_BYTES
    assert list(records_of(data)) == records
    cut_off = list(records_of(data[: max(FILE_HEADER_BYTES, len(data) - cut)]))
    assert cut_off == records[: len(cut_off)]
    assert len(cut_off) >= len(records) - 100
