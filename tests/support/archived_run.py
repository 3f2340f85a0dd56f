"""The directory of a run that ended, with an archive of any length and a short log after it. Written without a run."""

import gzip
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

import msgspec

from messages import (
    ActorStarted,
    BatchTrained,
    BufferStarted,
    EngineNumbers,
    GroupCompleted,
    LastSample,
    Message,
    Outcome,
    Plane,
    RunFinished,
    SampleStatus,
    SampleSummary,
    SegmentRef,
    TrainerStarted,
    WeightsApplied,
)
from messages.base import tag_of
from messages.codec import encode
from messages.events import EngineUpdate
from runtime.bus.bus import Bus
from runtime.ledger.archive import ARCHIVE, LEVEL, ArchivedEvent
from runtime.node.claims.run_id import RUN_ID_FILE, IdInDirectory
from runtime.node.reopen import FoundRun
from tests.build.events import announced, batch, issued, saved, trained, verdict
from tests.fixtures.nats import TEST_LIMITS, TEST_STREAMS
from tests.support.running_server import running_server

RUN = "long"
EVERY = timedelta(milliseconds=10)  # an event
GROUPS = 32  # of a step
SAMPLES = 8  # of a group
SAVE_EVERY = 20  # steps
FILE_EVENTS = 50_000  # of an archive file
METRICS = [f"train/metric_{number}" for number in range(40)]
ENGINES = [f"engine.policy.{number}" for number in range(4)]


def events_of_a_run(num_events: int, *, samples: int = SAMPLES) -> Iterator[Message]:
    """At least so many events of a run as it goes, up to the end of a step, then its end."""
    seq, step, drawn = 0, 0, random.Random(0)

    def said(event: Message) -> Message:
        nonlocal seq
        seq += 1
        return event

    yield said(BufferStarted(incarnation=1))
    for actor in ("buffer", "rollout.policy.0", "reward", "filter", "trainer"):
        yield said(ActorStarted(actor=actor, node="node1", pid=100 + seq))
    yield said(TrainerStarted(incarnation=1, step=0))
    yield said(announced(1))
    while seq < num_events:
        groups = range(step * GROUPS, (step + 1) * GROUPS)
        yield said(issued(*groups, round=step, min_version=step + 1))
        kept: list[tuple[int, int]] = []
        for group in groups:
            yield said(_completed(group, step, samples, drawn))
            kept.append((group, seq))
            yield said(verdict(group, seq, Outcome.KEEP))
        yield said(batch(step, *kept))
        yield said(_trained(step, samples, drawn))
        if (step + 1) % SAVE_EVERY == 0:
            yield said(saved(step + 1, max(0, step + 1 - SAVE_EVERY), took_s=0.1, pause_s=0.01))
        yield said(announced(step + 2, step + 1, took_s=0.01))
        updates = tuple(EngineUpdate(engine=engine, pause_s=0.01, took_s=0.02) for engine in ENGINES)
        yield said(WeightsApplied(version=step + 2, instance="rollout", num_engines=4, took_s=0.03, engines=updates))
        step += 1
    yield RunFinished(incarnation=1, steps=step, reason=f"trained {step} steps")


def _completed(group: int, step: int, samples: int, drawn: random.Random) -> GroupCompleted:
    return GroupCompleted(
        group_id=group,
        attempt=0,
        lease=f"{drawn.getrandbits(128):032x}",
        round=step,
        instance="rollout.policy.0",
        data="gsm8k",
        samples=tuple(
            SampleSummary(
                index=index,
                status=SampleStatus.COMPLETED,
                segments=(SegmentRef(seq=samples * group + index + 1, position=0),),
                prompt_len=200,
                response_len=drawn.randrange(100, 4000),
                reward=float(drawn.randrange(2)),
                first_version=step + 1,
                last_version=step + 1,
            )
            for index in range(samples)
        ),
        rollout_time_s=drawn.random(),
        reward_time_s=0.01,
        engine=EngineNumbers(num_requests=samples, prompt_tokens=200 * samples, cached_tokens=200 * (samples - 1)),
        last_sample=LastSample(queue_time_s=0.01, engine=ENGINES[group % 4], grader="gsm8k"),
    )


def _trained(step: int, samples: int, drawn: random.Random) -> BatchTrained:
    metrics = {name: drawn.random() for name in METRICS}
    times = {"perf/train_time": 0.2, "perf/train_wait_time": 0.3, "perf/fetch_time": 0.01}
    num_samples = samples * GROUPS
    return trained(
        step,
        num_groups=GROUPS,
        num_samples=num_samples,
        num_tokens=2000 * num_samples,
        metrics={"train/loss": drawn.random(), **times, **metrics},
    )


async def make_archived_run(directory: Path, num_events: int, *, samples: int = SAMPLES) -> FoundRun:
    """Write a run of at least so many events: all but the last are archived, the log in the store has that one.

    Args:
        directory: does not exist yet.
        num_events: at least.
        samples: of a group.
    """
    (directory / ARCHIVE).mkdir(parents=True)
    stored = {"run": {"name": RUN}, "train": {"num_steps": 1_000_000}}
    (directory / "topology.json").write_bytes(msgspec.json.encode(stored))
    (directory / RUN_ID_FILE).write_bytes(msgspec.json.encode(IdInDirectory(id="0123456789abcdef", joined=True)))
    began, seq, last = datetime.now(UTC) - num_events * EVERY, 0, None
    events_left = events_of_a_run(num_events, samples=samples)
    while part := list(islice(events_left, FILE_EVENTS)):
        last = part[-1]
        events = part[:-1] if isinstance(last, RunFinished) else part
        lines = b"".join(_line(event, number, began + number * EVERY) for number, event in enumerate(events, seq + 1))
        name = f"events-{seq + 1:012}-{seq + len(events):012}.jsonl.gz"
        if events:
            (directory / ARCHIVE / name).write_bytes(gzip.compress(lines, LEVEL))
        seq += len(events)
    assert last is not None
    async with (
        running_server(directory) as server,
        Bus.connect(server.url, RUN, name="test", limits=TEST_LIMITS) as bus,
    ):
        await bus.ensure_streams(TEST_STREAMS)
        await bus.purge(Plane.EVENT, below_seq=seq + 1)
        assert await bus.publish(last) == seq + 1
    return FoundRun(name=RUN, directory=directory)


def _line(event: Message, seq: int, time: datetime) -> bytes:
    line = ArchivedEvent(seq=seq, time=time, type=tag_of(type(event)), event=msgspec.Raw(encode(event).payload))
    return msgspec.json.encode(line) + b"\n"
