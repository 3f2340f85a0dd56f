"""Row 108 by the real actors: 6 groups asked for at a time, 4 trained, both filters on. Only the engine is scripted."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import anyio
import pytest

from actors.buffer.prompts.source import load_prompts
from actors.registry import hosted
from messages import (
    BatchReady,
    BatchTrained,
    GroupAborted,
    GroupsClosed,
    GroupsIssued,
    Message,
    MessageT,
    Outcome,
    VerdictGiven,
)
from runtime.bus.addresses import Address, address_key
from runtime.bus.bus import Bus
from runtime.ledger.fold import LEDGER_EVENTS, LedgerState, Stage, fold
from runtime.process.hosting import host
from runtime.settings.topology import Topology
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.rollout import announcement
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio

MODEL = Path(__file__).resolve().parents[2] / "topologies/demo/models/reverse-digits"
SAMPLES = 4
RIGHT, WRONG = 1, 2  # tokens
NUM_RIGHT = {0: 4, 1: 0, 2: 4, 6: 1, 8: 3}  # of the samples of a group; 2 of all others, the widest spread


class Example:
    """An engine that holds every request until its group is let go, and the log as far as it was followed."""

    def __init__(self, topology: Topology) -> None:
        prompts = load_prompts(topology)
        self.numbers = {tuple(prompts.prompt(number).prompt_ids.tolist()): number for number in range(12)}
        self.asked: Counter[int] = Counter()
        self.engine = ScriptedEngine(script=self.answer, text=lambda ids: "right" if ids == [RIGHT] else "wrong")
        self.engine.hold = True
        self.log: list[tuple[int, Message]] = []
        self.state = LedgerState()

    def answer(self, prompt: list[int], _params: object) -> list[int]:
        number = self.numbers[tuple(prompt)]
        self.asked[number] += 1
        return [RIGHT if self.asked[number] <= NUM_RIGHT.get(number, 2) else WRONG]

    async def let_go(self, groups: Iterable[int]) -> None:
        """Let all samples of some groups end, which are in flight by now."""
        for group in groups:
            for body in self.engine.requests:
                if self.numbers[tuple(body["input_ids"])] == group:
                    await eventually(lambda rid=body["rid"]: rid in self.engine._running)
                    self.engine._running[body["rid"]].set()

    async def follow(self, bus: Bus, kind: type[Message], count: int) -> None:
        """Fold the log until so many events of a type were there."""
        from_seq = self.log[-1][0] + 1 if self.log else 1
        seen = len(self.of(kind))
        async with bus.read(*LEDGER_EVENTS, from_seq=from_seq) as events:
            while seen < count or events.pending:
                received = await events.next(20.0)
                assert received is not None, f"{seen} of {count} {kind.__name__}"
                fold(self.state, received.message, received.seq)
                assert self.state.books().closed
                self.log.append((received.seq, received.message))
                seen += isinstance(received.message, kind)

    def of(self, kind: type[MessageT]) -> list[MessageT]:
        return [event for _, event in self.log if isinstance(event, kind)]


@pytest.fixture
def topology(tmp_path: Path) -> Topology:
    rows = "".join(json.dumps({"input": f"{number:02}", "label": "right"}) + "\n" for number in range(20))
    (tmp_path / "prompts.jsonl").write_text(rows)
    rollout = {
        "rollout_batch_size": 4,
        "over_sampling_batch_size": 6,
        "n_samples_per_prompt": SAMPLES,
        "dynamic_filter": "nonzero_std",
        "over_sampling_filter": "sort_by_reward_std",
    }
    return topology_with(
        model={"hf_checkpoint": str(MODEL)},
        data=[{"name": "d", "path": str(tmp_path / "prompts.jsonl"), "label_key": "label", "rm_type": "exact_match"}],
        rollout=rollout,
        reward={"processes": 1},
        engines={"policy": {"kind": "tiny", "concurrency": 64}},
    )


async def test_the_worked_example(bus: Bus, router_url: str, topology: Topology, tmp_path: Path) -> None:
    example = Example(topology)
    state = example.state
    async with serving(example.engine) as engine, anyio.create_task_group() as group:
        await bus.kv.put(address_key("engine", "policy", 0), Address(url=engine.url))
        await bus.kv.put(address_key("router", "policy", 0), Address(url=router_url))
        roles = ("buffer", "rollout", "reward", "filter")
        group.start_soon(host, bus, [hosted(role, topology, tmp_path) for role in roles])
        await bus.publish(announcement(1))

        await example.follow(bus, GroupsIssued, 1)
        await engine.wait_for_requests(6 * SAMPLES)
        await example.let_go([0, 1, 2])  # all right or all wrong: nothing to learn
        await example.follow(bus, VerdictGiven, 3)
        await example.follow(bus, GroupsIssued, 2)
        assert state.dropped == {"zero_std_1.0": 2, "zero_std_0.0": 1}
        assert len(state.in_stage(Stage.IN_FLIGHT)) == 9  # what slime calls remaining
        assert [len(event.groups) for event in example.of(GroupsIssued)] == [6, 6]

        await engine.wait_for_requests(12 * SAMPLES)
        await example.let_go([3, 4, 6, 7, 8])
        await example.follow(bus, VerdictGiven, 8)
        assert (len(state.in_stage(Stage.READY)), example.of(BatchReady)) == (5, [])  # one short of the target
        await example.let_go([9])
        await example.follow(bus, GroupAborted, 3)
        await bus.publish(BatchTrained(step=0, incarnation=1, num_groups=4, num_samples=16, num_tokens=48, metrics={}))
        await example.follow(bus, BatchTrained, 1)
        group.cancel_scope.cancel()

    kept = [event.group_id for event in example.of(VerdictGiven) if event.outcome is Outcome.KEEP]
    assert sorted(kept) == [3, 4, 6, 7, 8, 9]
    (batch,) = example.of(BatchReady)
    assert [ref.group_id for ref in batch.groups] == [3, 4, 7, 9]  # 6 and 8 differ less
    (closed,) = example.of(GroupsClosed)
    assert (sorted(closed.group_ids), closed.reason) == ([6, 8], "over_sampling_filter")
    assert sorted(state.in_stage(Stage.POOLED)) == [5, 10, 11]
    books = state.books()
    assert (books.issued, books.trained, books.dropped, books.pooled) == (12, 4, 5, 3)
