"""What a trainer computes while it waits for a batch, on a real bus, and that nothing of it is missed after a crash."""

from pathlib import Path

import anyio
import msgspec
import pytest

from actors.trainer.commands import TrainerRank
from actors.trainer.data.assembly import CollectedGroup, assemble
from actors.trainer.log_prob_precomputer import LogProbPrecomputer
from actors.trainer.torch_thread import TorchThread
from messages import BatchReady, BatchTrained, GroupRef, Outcome, PayloadsMissing, Plane, VerdictGiven, WeightsAnnounced
from runtime.bus.bus import Bus
from runtime.settings.tables.algorithm import K3
from runtime.settings.topology import Topology
from tests.actors.trainer.hosting import TIMEOUT_S, errors_of, of, running, said_until
from tests.actors.trainer.logs import GROUPS, completed, payload, publish_groups
from tests.actors.trainer.test_crash_windows import Died, dying
from tests.build.topology import MakeTopology

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("actor_joins")]

NUM_STEPS = 2


@pytest.fixture
def topology(make_topology: MakeTopology) -> Topology:
    return make_topology(
        train={"num_steps": NUM_STEPS},
        algorithm={"num_steps_per_rollout": 2, "kl": {"type": "k1", "loss_coef": 0.3}},
        trainer={"log_probs_ahead": True},
    )


class Computed:
    """Groups that trainers of this test have computed ahead."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = anyio.Condition()

    async def add(self) -> None:
        async with self._changed:
            self.count += 1
            self._changed.notify_all()

    async def until(self, count: int) -> None:
        with anyio.fail_after(TIMEOUT_S):
            async with self._changed:
                while self.count < count:
                    await self._changed.wait()


@pytest.fixture
def precomputed(monkeypatch: pytest.MonkeyPatch) -> Computed:
    computed, compute_one = Computed(), LogProbPrecomputer.compute_one

    async def counted(self: LogProbPrecomputer, step: int) -> float:
        took_s = await compute_one(self, step)
        await computed.add()
        return took_s

    monkeypatch.setattr(LogProbPrecomputer, "compute_one", counted)
    return computed


async def checksums(topology: Topology, directory: Path) -> list[str]:
    """Of the weights after each step of a trainer that computed nothing ahead and never died."""

    def train_all() -> list[str]:
        engine = TrainerRank(topology, directory)
        sums = [engine.publish(1, confirmed=0).checksum]
        for step in range(NUM_STEPS):
            numbers = range(step * GROUPS, (step + 1) * GROUPS)
            batch = assemble(step, [CollectedGroup(completed(one, 1), {1: payload(one)}) for one in numbers], {1: step})
            assert batch is not None
            engine.train(batch)
            sums.append(engine.publish(step + 2, confirmed=0).checksum)
        engine.close()
        return sums

    with TorchThread() as torch_thread:
        return await torch_thread.run(train_all)


async def make(bus: Bus, step: int, groups: tuple[GroupRef, ...]) -> None:
    await bus.publish(BatchReady(incarnation=1, step=step, groups=groups))


async def test_groups_that_are_kept_are_computed_while_their_batch_is_awaited(
    topology: Topology, bus: Bus, tmp_path: Path, precomputed: Computed
) -> None:
    """Those of the second batch too, whose old log-probs the first step makes worthless."""
    async with running(topology, bus, tmp_path / "run"):
        await said_until(bus, WeightsAnnounced)
        groups = [await publish_groups(bus, step, version=1) for step in range(NUM_STEPS)]
        await precomputed.until(NUM_STEPS * GROUPS)
        for step in range(NUM_STEPS):
            await make(bus, step, groups[step])
        said = await said_until(bus, WeightsAnnounced, NUM_STEPS + 1)
    metrics = [trained.metrics for trained in of(said, BatchTrained)]
    assert [one["perf/log_probs_ahead_ratio"] for one in metrics] == [1.0, 1.0]
    assert 0 < metrics[0]["perf/log_probs_ahead_time"] <= metrics[0]["perf/train_wait_time"]
    assert [event.checksum for event in of(said, WeightsAnnounced)] == await checksums(topology, tmp_path / "other")


async def test_log_probs_of_a_reference_that_has_moved_are_not_used(
    topology: Topology, bus: Bus, tmp_path: Path, precomputed: Computed
) -> None:
    """Those of the second batch were computed before the first step, after which the reference is the policy."""
    algorithm = msgspec.structs.replace(topology.algorithm, ref_update_interval=1, kl=K3(loss_coef=0.3))
    topology = msgspec.structs.replace(topology, algorithm=algorithm)
    async with running(topology, bus, tmp_path / "run"):
        await said_until(bus, WeightsAnnounced)
        groups = [await publish_groups(bus, step, version=1) for step in range(NUM_STEPS)]
        await precomputed.until(NUM_STEPS * GROUPS)
        for step in range(NUM_STEPS):
            await make(bus, step, groups[step])
        said = await said_until(bus, WeightsAnnounced, NUM_STEPS + 1)
    assert [event.checksum for event in of(said, WeightsAnnounced)] == await checksums(topology, tmp_path / "other")


@pytest.mark.parametrize(
    ("point", "num_announced"), [((4, False), 4), ((5, False), 3)], ids=["before step 1", "before weights of 2"]
)
async def test_a_trainer_that_died_with_groups_ahead_goes_on_to_the_same_weights(
    topology: Topology, bus: Bus, tmp_path: Path, precomputed: Computed, point: tuple[int, bool], num_announced: int
) -> None:
    """The one after it replays from the beginning, with nothing computed ahead."""

    async def meanwhile() -> None:
        for step in range(NUM_STEPS):
            await said_until(bus, WeightsAnnounced, step + 1)
            groups = await publish_groups(bus, step)
            await precomputed.until((step + 1) * GROUPS)
            await make(bus, step, groups)

    errors = await errors_of(topology, bus, tmp_path / "run", meanwhile, through=dying(*point))
    assert {type(error) for error in errors} == {Died}
    async with running(topology, bus, tmp_path / "run"):
        said = await said_until(bus, WeightsAnnounced, num_announced)
    assert precomputed.count == NUM_STEPS * GROUPS
    assert of(said, BatchTrained)[-1].metrics["perf/log_probs_ahead_ratio"] == 0.0
    expected = await checksums(topology, tmp_path / "other")
    announced = [(event.step, event.checksum) for event in of(said, WeightsAnnounced)]
    assert set(announced) == set(enumerate(expected))


async def test_groups_without_a_verdict_dropped_or_without_payloads_are_not_computed(
    topology: Topology, bus: Bus, tmp_path: Path, precomputed: Computed
) -> None:
    """Nothing is stored of group 7; that of group 1 comes so late that its batch is made before."""
    async with running(topology, bus, tmp_path / "run"):
        await said_until(bus, WeightsAnnounced)
        gone = await bus.publish(payload(7))
        await bus.purge(Plane.DATA, below_seq=gone + 1)
        lost = GroupRef(group_id=7, attempt=0, event_seq=await bus.publish(completed(7, gone)))
        await judge(bus, lost.event_seq, 7, Outcome.KEEP)
        late = GroupRef(group_id=1, attempt=0, event_seq=await complete(bus, 1))
        await judge(bus, await complete(bus, 6), 6, Outcome.DROP)
        first, _, last = await publish_groups(bus, 1)  # groups 3, 4 and 5
        await precomputed.until(3)
        await make(bus, 0, (first, late, last))
        (trained,) = of(await said_until(bus, BatchTrained), BatchTrained)
        assert trained.metrics["perf/log_probs_ahead_ratio"] == pytest.approx(2 / 3)
        assert precomputed.count == 3
        await make(bus, 1, (lost,))
        (missing,) = of(await said_until(bus, PayloadsMissing), PayloadsMissing)
        kept = GroupRef(group_id=8, attempt=0, event_seq=await complete(bus, 8))
        await judge(bus, kept.event_seq, 8, Outcome.KEEP)
        await precomputed.until(4)
        await make(bus, 1, (kept,))
        trained = of(await said_until(bus, BatchTrained, 2), BatchTrained)[-1]
    assert (missing.groups, trained.metrics["perf/log_probs_ahead_ratio"]) == ((lost,), 1.0)


async def complete(bus: Bus, group_id: int) -> int:
    return await bus.publish(completed(group_id, await bus.publish(payload(group_id))))


async def judge(bus: Bus, seq: int, group_id: int, outcome: Outcome) -> None:
    await bus.publish(VerdictGiven(group_id=group_id, attempt=0, event_seq=seq, outcome=outcome))
