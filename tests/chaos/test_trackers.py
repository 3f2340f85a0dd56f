"""A whole run with W&B, TensorBoard and /metrics: observers and trainer are killed and stopped, the run is resumed.

/metrics is read by Prometheus's own parser.
"""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from runtime.ledger.fold import LEDGER_EVENTS, LedgerState, fold
from tests.chaos.audit import audit, read_all
from tests.chaos.harness import Command, Run
from tests.fixtures.nats import eventually
from tests.support.prometheus_text import Series, free_address, scrape, value
from tests.support.trackers import logged_by_wandb, scalars, tracker_python

pytestmark = [pytest.mark.chaos, pytest.mark.anyio, pytest.mark.timeout(900)]

ON = ("observe.tensorboard.enabled=true", "observe.wandb.enabled=true", "observe.wandb.mode=offline")


LABELS = {
    *("run", "node", "process", "engine", "pool", "state", "outcome", "reason", "status", "metric", "part", "place"),
    *("mode", "kind"),
}
STATES = ("trained", "skipped", "dropped", "failed", "pooled", "ready", "in_flight")


async def caught_up(address: str) -> Series:
    found: Series = {}

    async def is_caught_up() -> bool:
        nonlocal found
        found = await scrape(address)
        return value(found, "exporter_caught_up") == 1

    await eventually(is_caught_up)
    return found


def process_of(command: Command, tracker: str) -> psutil.Process:
    """The process of a tracker, which the log does not name."""
    found: list[psutil.Process] = []
    for process in command.family()[0].children():
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            found += [process] if process.cmdline()[4:5] == [tracker] else []
    assert found, f"tracker {tracker} does not run"
    return found[0]


def check_scrapes(run: Run, before: Series, after: Series, last: Series, state: LedgerState) -> None:
    """No counter fell, and the last scrape equals the ledger and the row of its step."""
    counters = {key for key in before if key[0].endswith("_total") and "process_cpu" not in key[0]}
    assert [key for key in counters if not before[key] <= after[key] <= last[key]] == []
    assert {key for _, labels in last for key, _ in labels} <= LABELS
    assert {dict(labels)["run"] for _, labels in last} == {run.directory.name}
    assert value(last, "process_restarts_total", process="trainer") == 1
    assert value(last, "process_up", process="trainer") == 1
    assert value(last, "process_resident_bytes", process="trainer") > 10_000_000
    books = state.books()
    assert value(last, "groups_issued_total") == books.issued
    assert {name: value(last, "groups", state=name) for name in STATES} == {
        name: getattr(books, name) for name in STATES
    }
    step = int(value(last, "train_steps_total"))
    (row,) = [row for row in run.rows() if row["step"] == step]
    for metric in ("rollout/raw_reward", "train/loss", "perf/step_time"):
        assert value(last, "step_metric", metric=metric) == row[metric]


async def ledger_until(run: Run, last_seq: int) -> LedgerState:
    """Fold the log of a finished run up to a sequence."""
    state = LedgerState()
    async with run.reopened() as bus:
        for seq, event in await read_all(bus, run):
            if seq <= last_seq and isinstance(event, LEDGER_EVENTS):
                fold(state, event, seq)
    return state


async def test_every_step_is_in_every_tracker_once_and_a_scrape_is_equal_to_the_ledger(tmp_path: Path) -> None:
    """One tracker is killed, one is stopped; exporter and trainer are killed; the run is stopped and resumed."""
    for name in ("tensorboard", "wandb"):
        tracker_python(name)
    address = free_address()
    run = Run(tmp_path, num_steps=10, eval_interval=3, overrides=(*ON, f"observe.prometheus={address}"))
    async with run.started() as command:
        await command.log.until_trained(2)
        before = await caught_up(address)
        os.killpg(process_of(command, "wandb").pid, signal.SIGKILL)
        process_of(command, "tensorboard").kill()
        await command.log.until_trained(4)
        command.process_of("actors.observer.exporter").kill()
        command.log.kill("trainer")
        after = await caught_up(address)
        await command.log.until_trained(6)
        last = await caught_up(address)
        command.send(signal.SIGINT)
        assert await command.end() == 130
    async with run.started() as command:
        await command.log.until_trained(8)
        process_of(command, "tensorboard").suspend()
        await command.log.until_trained(10)
        process_of(command, "tensorboard").resume()
        assert await command.end() == 0
    await audit(run, killed=["trainer"])
    check_scrapes(run, before, after, last, await ledger_until(run, int(value(last, "log_sequence"))))
    rows = run.rows()
    trained, evaluated = (
        [row["rollout/step"] for row in rows if row["step"]],
        [row["step"] for row in rows if "eval/step" in row],
    )
    assert trained == list(range(10))
    readers: tuple[Callable[[Path], dict[str, list[int]]], ...] = (scalars, logged_by_wandb)
    for read in readers:
        found = read(run.directory)
        assert found["rollout/raw_reward"] == trained
        assert found["train/loss"] == [2 * step for step in trained]  # two optimizer steps each
        (name,) = [name for name in found if name.startswith("eval/reverse") and name.count("-") == 3]
        assert sorted(found[name]) == evaluated


async def test_a_server_that_refuses_costs_its_tracker_alone(tmp_path: Path) -> None:
    tracker_python("wandb")
    refusing = ("observe.wandb.enabled=true", "observe.wandb.host=http://127.0.0.1:9", "observe.stop_timeout_s=1")
    key = tmp_path / "key"
    key.write_text("0" * 40)
    key.chmod(0o600)
    run = Run(tmp_path, num_steps=2, eval_interval=None, overrides=(*refusing, f"observe.wandb.key_file={key}"))
    async with run.started() as command:
        assert await command.end() == 0
    told = run.output.read_text()
    assert "run r finished" in told
    assert "tracker.wandb" in told
    assert "0" * 40 not in told
    assert [row["step"] for row in run.rows()] == [0, 1, 2]
