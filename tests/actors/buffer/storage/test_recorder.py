"""Dumps follow from the log: what is in each pair, what may not be purged before, and that restarts change nothing."""

import json
from pathlib import Path
from random import Random
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.buffer.deciding.decide import Schedule
from actors.buffer.storage.recorder import Recorder
from actors.buffer.storage.records import Records, StepDump
from messages import (
    BatchReady,
    BufferStarted,
    Float32Array,
    GroupAborted,
    GroupCompleted,
    GroupRef,
    GroupsClosed,
    GroupsIssued,
    Int32Array,
    IssuedGroup,
    Message,
    MessageDeadLettered,
    Outcome,
    PayloadsMissing,
    Plane,
    SampleKey,
    SampleStatus,
    SampleSummary,
    Segment,
    SegmentRef,
    SegmentsPublished,
    TrainerStarted,
    UInt8Array,
    VerdictGiven,
    WeightSpan,
)
from runtime.bus.bus import Bus
from runtime.data.columns import DumpError
from runtime.data.dump_files import known_steps, read_lines, read_pair, steps_in
from runtime.ledger.fold import LEDGER_EVENTS
from runtime.process.actor import InputError
from runtime.settings.topology import Topology
from tests.actors.buffer.test_whole_runs import World
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually

MODEL = Path(__file__).resolve().parents[4] / "topologies/demo/models/reverse-digits"


def issued(*group_ids: int, attempt: int = 0) -> GroupsIssued:
    groups = tuple(IssuedGroup(group_id=group_id, attempt=attempt, prompt=group_id) for group_id in group_ids)
    return GroupsIssued(incarnation=1, round=0, min_version=1, groups=groups)


def completed(group_id: int, payload_seq: int, attempt: int = 0) -> GroupCompleted:
    sample = SampleSummary(
        index=0,
        status=SampleStatus.COMPLETED,
        segments=(SegmentRef(seq=payload_seq, position=0),),
        reward=float(group_id),
        prompt_len=2,
        response_len=2,
    )
    return GroupCompleted(
        group_id=group_id, attempt=attempt, lease="l", round=0, instance="r", data="d", samples=(sample,)
    )


def verdict(group_id: int, event_seq: int, outcome: Outcome = Outcome.KEEP, reason: str | None = None) -> VerdictGiven:
    return VerdictGiven(group_id=group_id, attempt=0, event_seq=event_seq, outcome=outcome, reason=reason)


def batch(step: int, passed_over: tuple[int, ...] = (), **refs: int) -> BatchReady:
    """Groups by g<id>=<sequence of its completion>."""
    groups = tuple(GroupRef(group_id=int(name[1:]), attempt=0, event_seq=seq) for name, seq in refs.items())
    return BatchReady(incarnation=1, step=step, groups=groups, passed_over=passed_over)


def told(log: list[Message]) -> tuple[Records, list[dict[int, Any]]]:
    """Each pair as fate by group: the step, or why it was given up."""
    records, pairs = Records(), []
    for seq, event in enumerate(log, start=1):
        pair = records.fold(event, seq)
        if pair is not None:
            pairs.append(fates(pair))
    return records, pairs


def fates(pair: StepDump) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for record in pair.records:
        fate = record.fate
        found[record.group_id] = fate.step if fate.step is not None else (fate.closed or fate.verdict_reason)
    return found


def test_a_pair_holds_the_batch_and_what_was_given_up_since_the_one_before() -> None:
    log: list[Message] = [
        issued(0, 1, 2, 3),
        completed(0, 1),
        completed(1, 2),
        completed(2, 3),
        verdict(0, 2, Outcome.DROP, "dull"),
        verdict(1, 3),
        batch(0, g1=3),
        verdict(2, 4),
        completed(3, 4),
        GroupsClosed(incarnation=1, group_ids=(3,), outcome="dropped", reason="stale"),
        batch(1, g2=4),
    ]
    records, pairs = told(log)
    assert pairs == [{0: "dull", 1: 0}, {2: 1, 3: "stale"}]
    assert records.rest().records == []


def test_without_a_filter_groups_are_dumped_as_kept() -> None:
    """Wherever the log starts, as long as it has the issue of the groups."""
    log: list[Message] = [
        BufferStarted(incarnation=1, verdicts=False),
        msgspec.structs.replace(issued(0, 1, 2), verdicts=False),
        completed(0, 1),
        completed(1, 2),
        completed(2, 3),
        GroupsClosed(incarnation=1, group_ids=(2,), outcome="dropped", reason="stale"),
        batch(0, g0=3, g1=4),
    ]
    for start in (0, 1):
        records = Records()
        pairs = [records.fold(event, seq) for seq, event in enumerate(log, start=1) if seq > start]
        (pair,) = [pair for pair in pairs if pair is not None]
        assert fates(pair) == {0: 0, 1: 0, 2: "stale"}
        assert [(record.fate.verdict, record.fate.verdict_reason) for record in pair.records] == [("keep", None)] * 3


def test_groups_that_lose_the_selection_belong_to_its_batch() -> None:
    log: list[Message] = [
        issued(0, 1, 2),
        completed(0, 1),
        completed(1, 2),
        completed(2, 3),
        verdict(0, 2),
        verdict(1, 3),
        verdict(2, 4, Outcome.SPARE, "dull"),
        batch(0, (0,), g1=3),
        GroupsClosed(incarnation=1, group_ids=(0, 2), outcome="dropped", reason="over_sampling_filter"),
    ]
    assert told(log)[1] == [{0: "over_sampling_filter", 1: 0, 2: "dull"}]


def test_what_no_batch_took_is_the_rest() -> None:
    log: list[Message] = [
        issued(0, 1, 2),
        completed(0, 1),
        completed(1, 2),
        verdict(0, 2),
        verdict(1, 3, Outcome.DROP, "dull"),
    ]
    rest = told(log)[0].rest()
    assert (rest.step, fates(rest)) == (0, {0: None, 1: "dull"})


def test_a_batch_that_is_made_again_replaces_its_pair() -> None:
    lost = PayloadsMissing(step=0, incarnation=1, groups=(GroupRef(group_id=1, attempt=0, event_seq=3),), reason="gone")
    log: list[Message] = [
        issued(0, 1, 2),
        completed(0, 1),
        completed(1, 2),
        completed(2, 3),
        verdict(0, 2, Outcome.DROP, "dull"),
        verdict(1, 3),
        verdict(2, 4),
        batch(0, g1=3, g2=4),
        lost,
        issued(1, attempt=1),
        completed(1, 5, attempt=1),
        verdict(1, 11),
        batch(0, g1=11, g2=4),
    ]
    assert told(log)[1] == [{0: "dull", 1: 0, 2: 0}, {0: "dull", 1: 0, 2: 0}]


def test_a_batch_that_was_taken_back_before_the_log_starts_is_dumped() -> None:
    """The log starts after the first batch of step 0 and its loss."""
    log: list[Message] = [
        issued(1, 2),
        completed(1, 1),
        completed(2, 2),
        verdict(1, 2),
        verdict(2, 3),
        batch(1, g1=2),
        batch(0, g2=3),
        batch(0, g2=3),  # stored again
    ]
    records, pairs = told(log)
    assert pairs == [{1: 1}, {2: 0}]
    assert records.next_step == 2


def test_a_spare_that_comes_back_from_a_batch_waits_as_others_do() -> None:
    log: list[Message] = [
        issued(0, 1, 2),
        completed(0, 1),
        completed(1, 2),
        verdict(0, 2),
        verdict(1, 3, Outcome.SPARE, "dull"),
        batch(0, g0=2, g1=3),
        PayloadsMissing(step=0, incarnation=1, groups=(GroupRef(group_id=0, attempt=0, event_seq=2),), reason="gone"),
        completed(2, 3),
        verdict(2, 8),
        batch(0, g2=8),
        batch(1, g1=3),
    ]
    assert told(log)[1] == [{0: 0, 1: 0}, {2: 0}, {1: 1}]


def test_a_group_whose_task_nobody_can_read_holds_nothing_open() -> None:
    log: list[Message] = [issued(0), MessageDeadLettered(subject="phy.r.work.rollout.0.0", reason="torn", dead_seq=1)]
    records, _ = told(log)
    assert records.needed_seq() == 3


def test_what_was_spilled_or_halted_is_not_purged_before_its_group_is_dumped() -> None:
    """The halt tells of the newest segment alone; the group goes on from an older one that was spilled."""
    halted = SampleSummary(index=0, status=SampleStatus.ABORTED, segments=(SegmentRef(seq=4, position=0),))
    aborted = GroupAborted(group_id=0, attempt=0, lease="l", round=0, instance="r", samples=(halted,))
    records, _ = told([issued(0), aborted, issued(0, attempt=1)])
    assert (records.low_water(), records.needed_seq()) == (1, 1)
    records.fold(completed(0, 3, attempt=1), 4)
    assert records.low_water() == 3
    records.fold(verdict(0, 4), 5)
    assert records.fold(batch(0, g0=4), 6) is not None
    assert records.low_water() == 3  # the batch may be taken back
    records.fold(TrainerStarted(incarnation=1, step=1), 7)
    assert (records.low_water(), records.needed_seq()) == (5, 8)


def test_late_results_and_second_verdicts_are_not_dumped() -> None:
    log: list[Message] = [
        issued(0),
        completed(0, 1),
        completed(0, 2),
        verdict(0, 3, Outcome.DROP, "of the late one"),
        verdict(0, 2),
        verdict(0, 2, Outcome.DROP, "too late"),
        batch(0, g0=2),
        completed(0, 3),
        verdict(0, 8, Outcome.DROP, "long trained"),
        batch(1),
    ]
    assert told(log)[1] == [{0: 0}]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    staleness=st.integers(0, 2),
    surplus=st.integers(0, 4),
    on_halt=st.sampled_from(["resume", "restart", "drop"]),
)
def test_every_completed_group_is_in_one_pair_and_a_restart_continues(
    seed: int, staleness: int, surplus: int, on_halt: Any
) -> None:
    random = Random(seed)
    schedule = Schedule(
        num_steps=4,
        rollout_batch_size=2,
        over_sampling_batch_size=2 + surplus,
        max_staleness=staleness,
        on_halt=on_halt,
        max_attempts=3,
    )
    world = World(schedule, random, 2, freezes=False)  # a part of the log does not tell whom a trainer replaced
    while not world.finished:
        chance = random.random()
        if chance < 0.05:
            world.repeat(decisions=False)  # a reader of a part of the log relies on the append
        elif chance < 0.6 or not world.act():
            world.decide()
    log = [(seq, event) for seq, event in enumerate(world.log, start=1) if isinstance(event, LEDGER_EVENTS)]
    records, files, low, needed = Records(), dict[int, dict[int, Any]](), 0, 0
    for seq, event in log:
        if random.random() < 0.05:  # it starts again, and the log begins where it said
            begin, after = needed, Records()
            for earlier, again in log[: seq - 1]:
                if earlier >= begin:
                    after.fold(again, earlier)
            assert fates(after.rest()) == fates(records.rest())
            records = after
        low, needed = max(low, records.low_water()), max(needed, records.needed_seq())
        pair = records.fold(event, seq)
        if pair is not None:
            assert all(
                ref.seq >= low
                for record in pair.records
                if record.completed is not None and record.event_seq < seq
                for sample in record.completed.samples
                for ref in sample.segments
            )
            files[pair.step] = fates(pair)
    in_files = [group_id for found in [*files.values(), fates(records.rest())] for group_id in found]
    assert len(in_files) == len(set(in_files))
    trained = {group_id: step for found in files.values() for group_id, step in found.items() if isinstance(step, int)}
    assert trained == {ref.group_id: ready.step for ready in world.batches.values() for ref in ready.groups}


@pytest.fixture
def topology(tmp_path: Path) -> Topology:
    """Two groups of two samples a step; dumped."""
    details = str(tmp_path / "dump")
    return topology_with(run={"name": "t", "dump_details": details}, model={"hf_checkpoint": str(MODEL)})


def recorder_of(topology: Topology, bus: Bus) -> Recorder:
    return Recorder(topology, bus, Path(topology.run.dir))


class Story:
    """A run's groups on a real bus."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    async def complete(self, group_id: int, outcome: Outcome = Outcome.KEEP) -> int:
        """Issue, store, complete and judge a group; return the sequence of its completion."""
        await self.bus.publish(issued(group_id))
        key = SampleKey(group_id=group_id, attempt=0, index=0)
        segment = Segment(
            sample=key,
            prompt_ids=Int32Array([1, 2]),
            response_ids=Int32Array([group_id, 4]),
            loss_mask=UInt8Array([1, 1]),
            rollout_log_probs=Float32Array([-1.0, -2.0]),
            weight_spans=(WeightSpan(version=1, start=0, end=2),),
            text=f"answer {group_id}",
        )
        payload = SegmentsPublished(group_id=group_id, attempt=0, lease="l", segments=(segment,), prompt="say")
        seq = await self.bus.publish(completed(group_id, await self.bus.publish(payload)))
        await self.bus.publish(verdict(group_id, seq, outcome, "dull" if outcome is Outcome.DROP else None))
        return seq


def responses(directory: Path, step: int) -> dict[int, str]:
    return {sample.group_id: sample.response for sample in read_lines(directory, step)}


def dumped(directory: Path, step: int) -> bool:
    """Whether a step has its pair."""
    return directory.is_dir() and (directory / f"rollout_{step}.jsonl").exists()


def written_at(directory: Path, step: int) -> tuple[int, int]:
    """Tells a file from one that replaced it."""
    state = (directory / f"rollout_{step}.npz").stat()
    return state.st_ino, state.st_mtime_ns


def listed(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


@pytest.mark.anyio
async def test_a_restart_in_the_middle_writes_what_is_missing_and_nothing_else(bus: Bus, topology: Topology) -> None:
    directory, story = Path(topology.run.dump_details or ""), Story(bus)
    seqs = {group_id: await story.complete(group_id) for group_id in (0, 1)}
    await story.complete(2, Outcome.DROP)
    async with anyio.create_task_group() as tasks:
        recorder = recorder_of(topology, bus)
        await recorder.prepare()
        tasks.start_soon(recorder.run)
        await bus.publish(batch(0, g0=seqs[0], g1=seqs[1]))
        await eventually(lambda: dumped(directory, 0))
        tasks.cancel_scope.cancel()
    before = written_at(directory, 0)
    seqs |= {group_id: await story.complete(group_id) for group_id in (3, 4)}
    await bus.publish(batch(1, g3=seqs[3]))
    (directory / ".rollout_1.npz.99").write_bytes(b"half")  # what a kill in the middle of a write leaves
    async with anyio.create_task_group() as tasks:
        recorder = recorder_of(topology, bus)
        await recorder.prepare()
        tasks.start_soon(recorder.run)
        await eventually(lambda: dumped(directory, 1))
        assert recorder.low_water() <= (await bus.state(Plane.DATA)).last_seq  # group 4 waits for its batch
        await recorder.write_rest((await bus.state(Plane.EVENT)).last_seq)
        tasks.cancel_scope.cancel()
    assert written_at(directory, 0) == before
    assert steps_in(directory) == [0, 1, 2]
    assert responses(directory, 0) == {0: "answer 0", 1: "answer 1", 2: "answer 2"}
    assert [(group.group_id, group.samples[0].step) for group in read_pair(directory, 1)] == [(3, 1)]
    assert [(group.group_id, group.samples[0].step) for group in read_pair(directory, 2)] == [(4, None)]
    assert read_pair(directory, 1)[0].segments[0][0].response_ids.tolist() == [3, 4]
    assert [path for path in listed(directory) if path.startswith(".")] == []


@pytest.mark.anyio
async def test_a_group_whose_payload_is_gone_is_left_out(bus: Bus, topology: Topology) -> None:
    directory, story = Path(topology.run.dump_details or ""), Story(bus)
    seqs = {group_id: await story.complete(group_id) for group_id in (0, 1)}
    await bus.purge(Plane.DATA, below_seq=2)
    await bus.publish(batch(0, g0=seqs[0], g1=seqs[1]))
    async with anyio.create_task_group() as tasks:
        recorder = recorder_of(topology, bus)
        await recorder.prepare()
        tasks.start_soon(recorder.run)
        await eventually(lambda: dumped(directory, 0))
        tasks.cancel_scope.cancel()
    assert responses(directory, 0) == {1: "answer 1"}


def modes_below(root: Path) -> dict[bool, set[int]]:
    """Of directories and of files."""
    modes = {True: set[int](), False: set[int]()}
    for path in (root, *root.rglob("*")):
        modes[path.is_dir()].add(path.stat().st_mode & 0o777)
    return modes


@pytest.mark.anyio
async def test_the_tokenizer_and_the_topology_lie_beside_the_dumps(bus: Bus, topology: Topology) -> None:
    directory = Path(topology.run.dump_details or "")
    await recorder_of(topology, bus).prepare()
    assert (directory / "tokenizer" / "tokenizer.json").read_bytes() == (MODEL / "tokenizer.json").read_bytes()
    assert json.loads((directory / "topology.json").read_bytes())["run"]["name"] == "t"
    with pytest.raises(DumpError):
        steps_in(directory)
    modes = modes_below(Path(str(topology.run.dump_details)))
    assert modes == {True: {0o700}, False: {0o600}}


@pytest.mark.anyio
async def test_a_directory_that_cannot_be_used_is_wrong_input(bus: Bus, topology: Topology) -> None:
    directory = anyio.Path(topology.run.dump_details or "")
    await directory.write_text("a file")
    with pytest.raises(InputError, match="cannot be written"):
        await recorder_of(topology, bus).prepare()
    await directory.unlink()
    await recorder_of(topology, bus).prepare()
    await recorder_of(topology, bus).prepare()  # of the same run: it goes on
    await (directory / "run.json").write_text('{"run": "other", "began": "then"}')
    with pytest.raises(InputError, match="holds the dumps of another run, other: move them away"):
        await recorder_of(topology, bus).prepare()
    await (directory / "run.json").unlink()
    await (directory / "rollout_7.jsonl").write_text("somebody's")
    with pytest.raises(InputError, match=r"holds dumps and no run\.json"):
        await recorder_of(topology, bus).prepare()


@pytest.mark.anyio
async def test_samples_of_the_newest_steps_are_kept_in_the_run_directory(bus: Bus, tmp_path: Path) -> None:
    topology = topology_with(
        run={"name": "t", "dir": str(tmp_path)},
        model={"hf_checkpoint": str(MODEL)},
        observe={"samples": True, "sample_steps": 2},
    )
    directory, story = tmp_path / "samples", Story(bus)
    # the second start reads the log from its begin, and writes none of the removed steps again
    for begin, end in ((0, 4), (4, 7)):
        async with anyio.create_task_group() as tasks:
            recorder = recorder_of(topology, bus)
            await recorder.prepare()
            tasks.start_soon(recorder.run)
            for step in range(begin, end):
                await bus.publish(batch(step, **{f"g{step}": await story.complete(step)}))
                await eventually(lambda step=step: dumped(directory, step))
                assert len(known_steps(directory)) <= 3  # the new one is there before the oldest goes
            await recorder.write_rest((await bus.state(Plane.EVENT)).last_seq)
            tasks.cancel_scope.cancel()
        assert steps_in(directory) == [end - 2, end - 1]
        assert len(list(directory.glob("rollout_*"))) == 4
    assert responses(directory, 6) == {6: "answer 6"}
    assert modes_below(directory) == {True: {0o700}, False: {0o600}}


@pytest.mark.anyio
async def test_samples_that_cannot_be_kept_do_not_end_the_run(bus: Bus, tmp_path: Path) -> None:
    topology = topology_with(
        run={"name": "t", "dir": str(tmp_path)}, model={"hf_checkpoint": str(MODEL)}, observe={"samples": True}
    )
    directory, story = tmp_path / "samples", Story(bus)
    async with anyio.create_task_group() as tasks:
        recorder = recorder_of(topology, bus)
        await recorder.prepare()
        (directory / "rollout_0.npz").mkdir()  # a file cannot replace it
        tasks.start_soon(recorder.run)
        for step in range(2):
            await bus.publish(batch(step, **{f"g{step}": await story.complete(step)}))
        await recorder.write_rest((await bus.state(Plane.EVENT)).last_seq)
        tasks.cancel_scope.cancel()
    assert known_steps(directory) == [1]
