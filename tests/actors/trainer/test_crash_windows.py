"""A trainer that dies at exactly one point between the events of a step, and the one that goes on after it.

Both sides are real: nats-server, and the engine on a tiny model. Beside the trainer runs what buffer, rollout and
evaluation would do: batches as far ahead of the announced weights as `max_staleness` allows, and none past an
evaluation that is due and not issued.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from actors.trainer.commands import TrainerRank
from actors.trainer.data.assembly import CollectedGroup, assemble
from actors.trainer.torch_thread import TorchThread
from messages import (
    BatchReady,
    BatchTrained,
    CheckpointSaved,
    EvalIssued,
    Message,
    TrainerStarted,
    WeightsAnnounced,
)
from runtime.bus.bus import Bus
from runtime.settings.topology import Topology
from tests.actors.trainer.hosting import TIMEOUT_S, errors_of, of, running
from tests.actors.trainer.logs import GROUPS, completed, payload, publish_batch
from tests.build.topology import MakeTopology

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("actor_joins")]

NUM_STEPS = 4
SAVE_INTERVAL = 2
EVAL_INTERVAL = 2

# what the trainer publishes, in this order, but for checkpoints: training goes on while they are written
TOLD = (
    "started", "weights of 0", "step 0", "weights of 1", "step 1", "weights of 2", "checkpoint of 2",
    "step 2", "weights of 3", "step 3", "weights of 4", "checkpoint of 4",
)  # fmt: skip
WINDOWS = {  # between checkpoint, batch.trained and announcement, before and after the checkpoint
    "before step 1": (4, False),  # the weights are written, and nobody was told of the step
    "before weights of 2": (5, False),  # an evaluation is due on them
    "before checkpoint of 2": (6, False),  # it is there, and nobody was told
    "after checkpoint of 2": (6, True),
    "before weights of 3": (8, False),  # lost with the step, which is after the checkpoint
}
OTHERS = {
    f"{'after' if stored else 'before'} {what}": (place, stored)
    for place, what in enumerate(TOLD)
    for stored in (False, True)
    if (place, stored) not in WINDOWS.values()
}


class Died(Exception):
    """Where kill -9 would have struck."""


def dying(place: int, stored: bool) -> Callable[[Bus], Bus]:
    """A view of the bus on which one publication, by number, is the last one, or just not stored any more."""

    def through(view: Bus) -> Bus:
        publish, told = view.publish, iter(range(place + 1))

        async def counted(message: Message) -> int:
            number = next(told, None)
            if number is None:  # another task, which died with it
                raise Died
            last = number == place
            if last and not stored:
                raise Died
            seq = await publish(message)
            if last:
                raise Died
            return seq

        view.publish = counted
        return view

    return through


class Others:
    """The rest of a run, as far as a trainer can tell."""

    def __init__(self, bus: Bus, max_staleness: int) -> None:
        self._bus = bus
        self._max_staleness = max_staleness
        self._announced: dict[int, int] = {}  # newest weight version by step
        self._evaluated = 0
        self._made = 0

    async def run(self) -> None:
        """Follow the log until cancelled."""
        async with self._bus.read(WeightsAnnounced) as events:
            async for received in events:
                self._announced[received.message.step] = received.message.version
                await self._go_on(received.message.step)

    async def _go_on(self, step: int) -> None:
        while self._made < NUM_STEPS and self._made <= step + self._max_staleness:
            due = self._made - self._made % EVAL_INTERVAL
            if due > self._evaluated:
                if due not in self._announced:
                    return
                version = self._announced[due]
                await self._bus.publish(EvalIssued(incarnation=1, step=due, version=version, sets=()))
                self._evaluated = due
            await publish_batch(self._bus, self._made, version=self._announced[step])
            self._made += 1


@pytest.fixture
def topology(make_topology: MakeTopology) -> Topology:
    return make_topology(train={"num_steps": NUM_STEPS, "save_interval": SAVE_INTERVAL})


@asynccontextmanager
async def beside(bus: Bus, max_staleness: int) -> AsyncGenerator[None, None]:
    async with anyio.create_task_group() as group:
        group.start_soon(Others(bus, max_staleness).run)
        yield
        group.cancel_scope.cancel()


async def log_until_the_end(bus: Bus) -> list[Message]:
    """The whole log, once the last checkpoint was told by a trainer that lives."""
    log: list[Message] = []
    incarnation = 0
    with anyio.fail_after(TIMEOUT_S):
        async with bus.read() as events:
            async for received in events:
                log.append(received.message)
                if isinstance(received.message, TrainerStarted):
                    incarnation = received.message.incarnation
                if isinstance(received.message, CheckpointSaved) and received.message.step == NUM_STEPS:
                    if received.message.incarnation == incarnation and not events.pending:
                        return log
    raise AssertionError


UNDISTURBED: list[str] = []  # checksums of the weights after each step; trained without any bus


async def undisturbed(topology: Topology, directory: Path) -> list[str]:
    def train_all() -> list[str]:
        engine = TrainerRank(topology, directory)
        sums = [engine.publish(1, confirmed=0).checksum]
        for step in range(NUM_STEPS):
            groups = [
                CollectedGroup(completed(group, 1), {1: payload(group)})
                for group in range(step * GROUPS, (step + 1) * GROUPS)
            ]
            batch = assemble(step, groups, {1: step})
            assert batch is not None
            engine.train(batch)
            sums.append(engine.publish(step + 2, confirmed=0).checksum)
        engine.close()
        return sums

    if not UNDISTURBED:
        with TorchThread() as torch_thread:
            UNDISTURBED.extend(await torch_thread.run(train_all))
    return UNDISTURBED


def check(log: list[Message], checksums: list[str], *, deaths: int) -> None:
    """Same batches in the same order on the line that survives, versions never reused, every evaluation on its step."""
    line, frontier, incarnation, saved = 0, 0, 0, {0}
    announced: list[tuple[int, int]] = []
    for event in log:
        match event:
            case TrainerStarted():
                assert event.incarnation == incarnation + 1
                line, incarnation = event.step, event.incarnation
            case BatchTrained():
                assert (event.step, event.replay, event.incarnation) == (line, line < frontier, incarnation)
                assert event.num_groups == GROUPS
                line, frontier = line + 1, max(frontier, line + 1)
            case WeightsAnnounced():
                assert event.step == line >= frontier  # replayed steps announce nothing before the frontier
                assert event.checksum == checksums[event.step]
                announced.append((event.version, event.step))
            case CheckpointSaved():
                assert event.step <= line  # training goes on while it is written
                saved.add(event.step)
            case _:
                pass
    assert (line, frontier, incarnation) == (NUM_STEPS, NUM_STEPS, max(1, len(of(log, TrainerStarted))))
    assert incarnation in (deaths, deaths + 1)  # one that died before it said so has left no incarnation
    versions = [version for version, _ in announced]
    assert versions == sorted(set(versions))
    assert announced[-1][1] == NUM_STEPS in saved
    assert [batch.step for batch in of(log, BatchReady)] == list(range(NUM_STEPS))
    steps = dict(announced)
    assert [(steps[event.version], event.step) for event in of(log, EvalIssued)] == [(2, 2)]


async def die_and_go_on(
    topology: Topology, bus: Bus, run_dir: Path, max_staleness: int, *points: tuple[int, bool]
) -> None:
    async with beside(bus, max_staleness):
        for place, stored in points:
            errors = await errors_of(topology, bus, run_dir, through=dying(place, stored))
            assert errors
            assert all(isinstance(error, Died) for error in errors), errors
        async with running(topology, bus, run_dir):
            log = await log_until_the_end(bus)
    check(log, await undisturbed(topology, run_dir.with_name("undisturbed")), deaths=len(points))


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("point", WINDOWS.values(), ids=WINDOWS.keys())
async def test_a_run_goes_on_whatever_point_its_trainer_died_at(
    topology: Topology, bus: Bus, tmp_path: Path, max_staleness: int, point: tuple[int, bool]
) -> None:
    await die_and_go_on(topology, bus, tmp_path / "run", max_staleness, point)


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [pytest.param(0, marks=pytest.mark.nightly), 2])
@pytest.mark.parametrize("point", OTHERS.values(), ids=OTHERS.keys())
async def test_a_run_goes_on_after_a_death_at_any_other_point(
    topology: Topology, bus: Bus, tmp_path: Path, max_staleness: int, point: tuple[int, bool]
) -> None:
    await die_and_go_on(topology, bus, tmp_path / "run", max_staleness, point)


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_a_run_goes_on_after_one_trainer_after_the_other_died_while_steps_were_trained_again(
    topology: Topology, bus: Bus, tmp_path: Path, max_staleness: int
) -> None:
    """The first has trained step 2 and told nobody its weights; the next ones die before, in and after the replay."""
    replayed = 1  # in the second incarnation: started, step 2 again, weights of 3
    points = [(8, False), (0, True), (replayed, True), (replayed + 1, False), (replayed + 1, True)]
    await die_and_go_on(topology, bus, tmp_path / "run", max_staleness, *points)


async def test_the_undisturbed_run_passes_the_same_check(topology: Topology, bus: Bus, tmp_path: Path) -> None:
    await die_and_go_on(topology, bus, tmp_path / "run", 1)
