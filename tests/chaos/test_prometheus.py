"""/metrics on a real run: read by Prometheus's own parser, equal to the ledger, and the same after a kill."""

from pathlib import Path

import pytest

from runtime.ledger.fold import LEDGER_EVENTS, LedgerState, fold
from tests.chaos.audit import audit, read_all
from tests.chaos.harness import Run
from tests.fixtures.nats import eventually
from tests.support.prometheus_text import Series, free_address, scrape, value

pytestmark = [pytest.mark.chaos, pytest.mark.anyio, pytest.mark.timeout(300)]

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

    await eventually(is_caught_up, timeout_s=60)
    return found


async def test_a_scrape_is_equal_to_the_ledger_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    address = free_address()
    run = Run(tmp_path, num_steps=30, eval_interval=4, overrides=(f"observe.prometheus={address}",))
    async with run.started() as command:
        await command.log.until_trained(2)
        before = await caught_up(address)
        command.process_of("actors.observer.exporter").kill()
        command.log.kill("trainer")
        after = await caught_up(address)
        await command.log.until_trained(7)
        last = await caught_up(address)
        assert await command.end() == 0
    await audit(run, killed=["trainer"])
    counters = {key for key in before if key[0].endswith("_total") and "process_cpu" not in key[0]}
    assert [key for key in counters if not before[key] <= after[key] <= last[key]] == []
    assert {key for _, labels in last for key, _ in labels} <= LABELS
    assert {dict(labels)["run"] for _, labels in last} == {run.directory.name}
    assert value(last, "process_restarts_total", process="trainer") == 1
    assert value(last, "process_up", process="trainer") == 1
    assert value(last, "process_resident_bytes", process="trainer") > 10_000_000
    books = (await ledger_until(run, int(value(last, "log_sequence")))).books()
    assert value(last, "groups_issued_total") == books.issued
    assert {state: value(last, "groups", state=state) for state in STATES} == {
        state: getattr(books, state) for state in STATES
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
