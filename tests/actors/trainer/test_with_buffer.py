"""Trainer and buffer together: what is lost between rollout and trainer is generated again, and the books close."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from actors.registry import hosted
from messages import (
    BatchReady,
    BatchTrained,
    GroupsIssued,
    Message,
    Outcome,
    PayloadsMissing,
    Plane,
    RolloutRequested,
    RunFinished,
    VerdictGiven,
    WeightsAnnounced,
)
from runtime.bus.bus import Bus
from runtime.ledger.fold import LEDGER_EVENTS, LedgerState, Stage, fold
from runtime.process.hosting import host
from runtime.settings.tables.prompts import DataConfig
from runtime.settings.topology import Topology
from tests.actors.trainer.hosting import TIMEOUT_S, of, running
from tests.actors.trainer.logs import GROUPS, completed, payload
from tests.build.topology import MakeTopology

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("actor_joins")]

TOKENIZER = Path(__file__).resolve().parents[3] / "topologies/demo/models/reverse-digits"
LOST = (0, 4)  # groups whose first payload is purged before anyone reads it


@pytest.fixture
def make(make_topology: MakeTopology, model_dir: Path, tmp_path: Path) -> Callable[..., Topology]:
    """Three steps of three groups, with a max_staleness and so many groups asked for at a time."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, model_dir / name)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": str(number), "label": "1"}) + "\n" for number in range(10)))
    data = DataConfig(name="digits", path=str(prompts), rm_type="exact_match")

    def with_staleness(max_staleness: int, asked: int = GROUPS) -> Topology:
        rollout = {"rollout_batch_size": GROUPS, "over_sampling_batch_size": asked, "max_staleness": max_staleness}
        rollout["dynamic_filter"] = "nonzero_std"  # `answer_tasks` gives its verdicts
        return replace(make_topology(rollout=rollout, train={"num_steps": 3, "save_interval": 1}), data=(data,))

    return with_staleness


async def answer_tasks(bus: Bus, lost: tuple[int, ...]) -> None:
    """What rollout and a filter that keeps everything do, on a data stream that loses some payloads."""
    async with bus.consume(RolloutRequested, durable="rollout") as deliveries:
        async for delivery in deliveries:
            task = delivery.message
            group, attempt = task.group_id, task.attempt
            seq = await bus.publish(payload(group, version=task.min_version, attempt=attempt))
            if group in lost and attempt == 0:
                await bus.purge(Plane.DATA, below_seq=seq + 1)
            event_seq = await bus.publish(completed(group, seq, attempt=attempt))
            verdict = VerdictGiven(group_id=group, attempt=attempt, event_seq=event_seq, outcome=Outcome.KEEP)
            await bus.publish(verdict)
            await delivery.ack()


async def log_of_a_run(
    topology: Topology, bus: Bus, run_dir: Path, lost: tuple[int, ...] = ()
) -> list[tuple[int, Message]]:
    """Run it to its end."""
    async with running(topology, bus, run_dir), anyio.create_task_group() as group:
        group.start_soon(host, bus, [hosted("buffer", topology, run_dir)])
        group.start_soon(answer_tasks, bus, lost)
        log = await log_until_the_end(bus)
        group.cancel_scope.cancel()
    return log


async def log_until_the_end(bus: Bus) -> list[tuple[int, Message]]:
    log: list[tuple[int, Message]] = []
    with anyio.fail_after(TIMEOUT_S):
        async with bus.read() as events:
            async for received in events:
                log.append((received.seq, received.message))
                if isinstance(received.message, RunFinished):
                    return log
    raise AssertionError


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_groups_whose_payloads_were_purged_are_generated_again_and_no_other(
    make: Callable[[int], Topology], bus: Bus, tmp_path: Path, max_staleness: int
) -> None:
    topology = make(max_staleness)
    log = await log_of_a_run(topology, bus, tmp_path / "run", LOST)
    state = LedgerState()
    for seq, event in log:
        if isinstance(event, LEDGER_EVENTS):
            fold(state, event, seq)
    books = state.books()
    assert books.closed
    assert books.trained == 3 * GROUPS
    events = [event for _, event in log]
    lost = {ref.group_id for event in of(events, PayloadsMissing) for ref in event.groups}
    assert set(LOST) <= lost  # and what lay before them in the stream
    issued = Counter(item.group_id for event in of(events, GroupsIssued) for item in event.groups)
    again = {group_id for group_id, issues in issued.items() if issues > 1}
    assert again | state.in_stage(Stage.POOLED).keys() >= lost >= again  # others may have filled its batch meanwhile
    trained = [(event.step, event.replay, event.num_groups) for event in of(events, BatchTrained)]
    assert trained == [(step, False, GROUPS) for step in range(3)]
    final = {batch.step: batch for batch in of(events, BatchReady)}
    groups = [ref.group_id for batch in final.values() for ref in batch.groups]
    assert len(groups) == len(set(groups)) == 3 * GROUPS


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_rollout_leads_by_max_staleness_at_most_and_the_metrics_of_every_step_say_by_how_much(
    make: Callable[[int], Topology], bus: Bus, tmp_path: Path, max_staleness: int
) -> None:
    log = await log_of_a_run(make(max_staleness), bus, tmp_path / "run")
    trained = of([event for _, event in log], BatchTrained)
    staleness = [event.metrics["rollout/staleness_max"] for event in trained]
    assert len(staleness) == 3
    assert max(staleness) == max_staleness
    assert staleness[0] == 0  # no older weights than the first
    announced: dict[int, int] = {}  # seq of the announcement of the weights that a round needs at least
    for seq, event in log:
        if isinstance(event, WeightsAnnounced):
            announced[event.step] = seq
        if isinstance(event, GroupsIssued):
            assert seq > announced[max(0, event.round - max_staleness)]


async def test_a_synchronous_run_trains_the_surplus_of_a_round_one_step_late_as_docs_metrics_says(
    make: Callable[..., Topology], bus: Bus, tmp_path: Path
) -> None:
    log = await log_of_a_run(make(0, asked=GROUPS + 1), bus, tmp_path / "run")
    trained = of([event for _, event in log], BatchTrained)
    staleness = [event.metrics["rollout/staleness_max"] for event in trained]
    assert staleness[0] == 0
    assert max(staleness) >= 1  # of the fourth group of the first round
    assert all(0 < event.metrics["rollout/off_policy_ratio"] < 1 for event in trained if event.step == 1)
