"""Two processes of the trainer's actor meet over the bus. What ranks compute together: tests/grid."""

import os
import sys
from pathlib import Path

import anyio
import anyio.abc
import pytest

from messages import BatchTrained, CheckpointSaved
from runtime.bus.addresses import BUS_URL_VARIABLE
from runtime.bus.bus import Bus
from runtime.settings.topology import encode_topology
from runtime.util.exit_codes import EXIT_INPUT_ERROR
from tests.actors.trainer.logs import publish_batch
from tests.build.topology import MakeTopology
from tests.fixtures.nats import NatsServer

pytestmark = [pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[4]
NO_COMPILER = """
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._dynamo":
            raise ImportError("a trainer on the CPU needs no compiler")

sys.meta_path.insert(0, Refuses())
"""


@pytest.mark.anyio
async def test_two_processes_of_the_actor_meet_over_the_bus(
    make_topology: MakeTopology, bus: Bus, nats_server: NatsServer, run_name: str, tmp_path: Path
) -> None:
    topology = make_topology(run={"name": run_name}, trainer={"num_processes": 2}, train={"num_steps": 2})
    (tmp_path / "topology.json").write_bytes(encode_topology(topology))
    (tmp_path / "sitecustomize.py").write_text(NO_COMPILER)  # which would take each rank 0.8 s to load
    environment = os.environ | {
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        BUS_URL_VARIABLE: nats_server.url,
        "WORLD_SIZE": "2",
    }
    command = [sys.executable, "-m", "actors.host", str(tmp_path), "trainer"]
    ranks = [
        await anyio.open_process(command, stdout=None, stderr=None, env=environment | {"RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        for step in range(2):
            await publish_batch(bus, step)
        with anyio.fail_after(200):
            async with bus.read(BatchTrained, CheckpointSaved) as events:
                said = [(await anext(events)).message for _ in range(3)]
        assert [type(event).__name__ for event in said] == ["BatchTrained", "BatchTrained", "CheckpointSaved"]
    finally:
        for rank in ranks:
            rank.terminate()
        with anyio.fail_after(200):
            codes = [await rank.wait() for rank in ranks]
    assert codes == [0, 0]


def complete_checkpoints(folder: Path) -> list[Path]:
    return list(folder.glob("*/checkpoints/*/step-*"))


@pytest.mark.anyio
async def test_ranks_without_a_common_directory_announce_no_checkpoint(
    make_topology: MakeTopology, bus: Bus, nats_server: NatsServer, run_name: str, tmp_path: Path
) -> None:
    """Rank 1 wrote its half on its own disk, and checkpoint.saved was announced with one half of two."""
    topology = make_topology(run={"name": run_name}, trainer={"num_processes": 2}, train={"num_steps": 1})
    environment = os.environ | {"PYTHONPATH": f"{ROOT}", BUS_URL_VARIABLE: nats_server.url, "WORLD_SIZE": "2"}
    ranks: list[anyio.abc.Process] = []
    for rank in range(2):
        place = tmp_path / str(rank)
        place.mkdir()
        (place / "topology.json").write_bytes(encode_topology(topology))
        command = [sys.executable, "-m", "actors.host", str(place), "trainer"]
        env = environment | {"RANK": str(rank)}
        ranks.append(await anyio.open_process(command, stdout=None, stderr=None, env=env))
    try:
        await publish_batch(bus, 0)
        with anyio.fail_after(200):
            assert await ranks[0].wait() == EXIT_INPUT_ERROR
        async with bus.read(CheckpointSaved) as events:
            assert await events.next(0.2) is None
    finally:
        for rank in ranks:
            if rank.returncode is None:
                rank.kill()
            await rank.wait()
    assert not complete_checkpoints(tmp_path)
