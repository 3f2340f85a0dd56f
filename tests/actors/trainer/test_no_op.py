"""The no-op trainer on a real bus: the same weights for every step, and every batch passes."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from safetensors.torch import load_file

from actors.registry import hosted
from messages import (
    BatchReady,
    BatchTrained,
    CheckpointRequested,
    CheckpointSaved,
    GroupRef,
    TrainerStarted,
    WeightsAnnounced,
)
from runtime.bus.bus import Bus
from runtime.bus.errors import Fenced
from runtime.models.checksums import checksums_of
from runtime.process.hosting import host
from runtime.settings.topology import Topology
from tests.actors.buffer.storage.test_recorder import completed
from tests.actors.trainer.data.test_feed import take_snapshot, trim
from tests.build.topology import topology_with
from tests.support.tiny_models import write_model

pytestmark = pytest.mark.anyio

MODEL = Path(__file__).resolve().parents[3] / "topologies/demo/models/reverse-digits"


def topology_of(model: Path, *, random_init: bool = False, save_interval: int | None = 1) -> Topology:
    return topology_with(
        run={"name": "t", "only": "rollout"},
        model={"hf_checkpoint": str(model), "random_init": random_init},
        train={"num_steps": 2, "save_interval": save_interval},
    )


@asynccontextmanager
async def no_op_trainer(bus: Bus, topology: Topology, run_dir: Path) -> AsyncGenerator[None]:
    async with anyio.create_task_group() as group:
        group.start_soon(host, bus, [hosted("trainer", topology, run_dir)])
        yield
        group.cancel_scope.cancel()


async def put_batch(bus: Bus, step: int) -> None:
    seq = await bus.publish(completed(step, 1))
    await bus.publish(BatchReady(incarnation=1, step=step, groups=(GroupRef(group_id=step, attempt=0, event_seq=seq),)))


async def test_every_batch_passes_and_every_step_announces_the_same_weights(bus: Bus, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    async with (
        no_op_trainer(bus, topology_of(model), tmp_path),
        bus.read(TrainerStarted, BatchTrained, WeightsAnnounced, CheckpointSaved) as events,
    ):
        told: list[str] = []
        announced: list[WeightsAnnounced] = []
        for step in range(2):
            await put_batch(bus, step)
        while len(told) < 8:
            received = await events.next(40)
            assert received is not None, told
            message = received.message
            told.append(type(message).__name__)
            if isinstance(message, WeightsAnnounced):
                announced.append(message)
            if isinstance(message, BatchTrained):
                assert (message.num_groups, message.num_samples, message.num_tokens) == (1, 1, 4)
    step = ["BatchTrained", "WeightsAnnounced", "CheckpointSaved"]
    assert told == ["TrainerStarted", "WeightsAnnounced", *step, *step]
    assert [(weights.version, weights.step) for weights in announced] == [(1, 0), (2, 1), (3, 2)]
    assert {(weights.path, weights.checksum) for weights in announced} == {(str(model), checksums_of(model).total)}
    assert {(weights.probe, weights.no_probe) for weights in announced} == {
        (None, 'run.only = "rollout": no trainer computes it')
    }


async def two_starts(bus: Bus, topology: Topology, run_dir: Path) -> None:
    """The second while the first is at work, and until that one ends."""
    async with no_op_trainer(bus, topology, run_dir), bus.read(BatchTrained) as trained:
        await put_batch(bus, 0)
        assert await trained.next(40) is not None
        async with no_op_trainer(bus, topology, run_dir), bus.read(TrainerStarted) as starts:
            await starts.next(40)
            second = await starts.next(40)
            assert second is not None
            assert (second.message.incarnation, second.message.step) == (2, 1)
            with anyio.fail_after(200):
                await anyio.sleep_forever()


async def test_a_second_start_goes_on_behind_the_log_and_fences_the_first(bus: Bus, tmp_path: Path) -> None:
    topology = topology_of(write_model(tmp_path / "model"))
    with pytest.raises(ExceptionGroup) as raised:
        await two_starts(bus, topology, tmp_path)
    assert raised.group_contains(Fenced, match="trainer incarnation 2 replaced incarnation 1")


async def test_a_checkpoint_is_told_when_a_stream_fills_up(bus: Bus, tmp_path: Path) -> None:
    topology = topology_of(write_model(tmp_path / "model"), save_interval=None)
    async with no_op_trainer(bus, topology, tmp_path), bus.read(BatchTrained, CheckpointSaved) as events:
        await put_batch(bus, 0)
        await events.next(40)
        await bus.publish(CheckpointRequested(step=1, stream="data", used=0.7))
        saved = await events.next(40)
    assert saved is not None
    assert isinstance(saved.message, CheckpointSaved)
    assert (saved.message.step, saved.message.oldest_step) == (1, 1)


async def test_a_start_goes_on_behind_a_log_whose_older_part_is_gone(bus: Bus, tmp_path: Path) -> None:
    topology = topology_of(write_model(tmp_path / "model"))
    async with no_op_trainer(bus, topology, tmp_path), bus.read(CheckpointSaved) as saved:
        await put_batch(bus, 0)
        assert await saved.next(40) is not None
    state, covers = await take_snapshot(bus)
    assert await trim(bus, state, covers) > 1
    async with no_op_trainer(bus, topology, tmp_path), bus.read(TrainerStarted, from_seq=covers + 1) as starts:
        second = await starts.next(40)
    assert second is not None
    assert (second.message.incarnation, second.message.step) == (2, 1)


async def test_weights_are_drawn_as_the_trainer_would_draw_them(bus: Bus, tmp_path: Path) -> None:
    from actors.trainer.commands import TrainerRank

    topology = topology_of(MODEL, random_init=True)
    for _ in range(2):  # the second start finds them
        async with no_op_trainer(bus, topology, tmp_path), bus.read(WeightsAnnounced) as events:
            received = await events.next(40)
            assert received is not None
            path = Path(received.message.path)
    trained = topology_with(model={"hf_checkpoint": str(MODEL), "random_init": True}, trainer={"device": "cpu"})
    engine = TrainerRank(trained, tmp_path / "run")
    try:
        published = engine.publish(1, confirmed=0)
    finally:
        engine.close()
    assert received.message.checksum == published.checksum
    assert load_file(path / "model.safetensors").keys() == load_file(published.path / "model.safetensors").keys()
