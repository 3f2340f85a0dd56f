"""Rows of megabytes train, stored once for each group, and the log hardly notices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from messages import GroupCompleted, encode
from runtime.ledger.fold import LEDGER_EVENTS
from runtime.node.reopen import find_run, opened_log

ROOT = Path(__file__).parent.parent
LIMIT_S = 600  # of one run, on a loaded machine
STEPS, GROUPS = 5, 2
MORE_PER_GROUP = 2048  # bytes

TOPOLOGY = """
include = "laptop.toml"
model.hf_checkpoint = "{root}/topologies/demo/models/reverse-digits"
run.name = "{name}"
rollout.rollout_batch_size = {groups}
train.num_steps = {steps}
train.save_interval = 2
[[data]]
name = "rows"
path = "{rows}"
label_key = "label"
apply_chat_template = true
rm_type = "positional_match"
[[eval]]
name = "held-out"
path = "{rows}@[0:2]"
interval = 3
"""


def write_rows(path: Path, count: int, size: int) -> None:
    with path.open("w") as file:
        for number in range(count):
            digits = f"{number % 100:02}"
            row = {"input": digits, "label": digits[::-1], "metadata": {"blob": str(number) + "x" * size}}
            file.write(json.dumps(row) + "\n")


def run(folder: Path, name: str, count: int, size: int) -> None:
    """Train on rows of a size."""
    write_rows(folder / f"{name}.jsonl", count, size)
    topology = folder / f"{name}.toml"
    rows = str(folder / f"{name}.jsonl")
    topology.write_text(TOPOLOGY.format(root=ROOT, name=name, groups=GROUPS, steps=STEPS, rows=rows))
    command = [sys.executable, str(ROOT / "bin" / "physarum.py"), "start-topology", str(topology), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["steps"], result["groups"]["trained"]) == (STEPS, STEPS * GROUPS)


async def logged(folder: Path, name: str) -> tuple[float, list[GroupCompleted]]:
    """Bytes of the log for each group, without events of processes and completed groups."""
    size, completed = 0, []
    async with opened_log(find_run(name, folder / "runs")) as log:
        async for received in log.events.so_far():
            if isinstance(received.message, LEDGER_EVENTS):
                size += len(encode(received.message).payload)
            if isinstance(received.message, GroupCompleted):
                completed.append(received.message)
    return size / (STEPS * GROUPS), completed


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize(("count", "size"), [pytest.param(200, 1_000_000, marks=pytest.mark.nightly), (10, 10_000_000)])
def test_large_rows_train_and_the_log_grows_by_less_than_two_kibibytes_a_group(
    tmp_path: Path, count: int, size: int
) -> None:
    bytes_per_group: dict[str, float] = {}
    for name, rows in {"small": (200, 10), "large": (count, size)}.items():
        run(tmp_path, name, *rows)
        bytes_per_group[name], completed = anyio.run(logged, tmp_path, name)
        assert all(bool(group.prompt_parts) is (name == "large") for group in completed)
        (tmp_path / f"{name}.jsonl").unlink()
    assert bytes_per_group["large"] - bytes_per_group["small"] < MORE_PER_GROUP, bytes_per_group


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_a_row_of_seventeen_megabytes_is_refused_with_its_file_and_line(tmp_path: Path) -> None:
    write_rows(tmp_path / "huge.jsonl", 1, 17_000_000)
    topology = tmp_path / "huge.toml"
    rows = str(tmp_path / "huge.jsonl")
    topology.write_text(TOPOLOGY.format(root=ROOT, name="huge", groups=GROUPS, steps=STEPS, rows=rows))
    command = [sys.executable, str(ROOT / "bin" / "physarum.py"), "start-topology", str(topology), "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode != 0
    assert f"{rows}:1: prompt, label and metadata have 17000" in done.stderr
