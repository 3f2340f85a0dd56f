"""Two ranks of every kind give what one rank gives."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
import torch
from safetensors.torch import load_file

from messages import BatchTrained, CheckpointSaved
from runtime.bus.addresses import BUS_URL_VARIABLE
from runtime.bus.bus import Bus
from runtime.settings.topology import Topology, encode_topology
from tests.actors.trainer.hf import write_model
from tests.actors.trainer.logs import publish_batch
from tests.actors.trainer.tiny import tiny_topology
from tests.fixtures.nats import NatsServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[4]
PROGRAM = Path(__file__).with_name("rank_program.py")
LAYOUTS = {
    "tensor": {"tensor_model_parallel_size": 2},
    "tensor and sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "data": {},
}


class Result(NamedTuple):
    metrics: list[dict[str, float]]  # of each call
    weights: dict[str, torch.Tensor]  # at the end
    probe: list[list[float]]  # tokens, and their log-probs under these weights


def run_ranks(directory: Path, topology: Topology, world: int) -> Result:
    directory.mkdir(exist_ok=True)
    (directory / "topology.json").write_bytes(encode_topology(topology))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(directory), str(rank), str(world), str(port)], env=environment
        )
        for rank in range(world)
    ]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0] * world
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    result: dict[str, Any] = json.loads((directory / "result.json").read_text())
    weights = load_file(Path(result["path"]) / "model.safetensors")
    return Result(result["metrics"], weights, result["probe"])


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A model directory, and what one rank makes of it."""
    directory = tmp_path_factory.mktemp("one")
    write_model(directory / "model", tied=request.param)
    return directory / "model", run_ranks(directory / "run", topology_of(directory / "model"), 1)


def topology_of(model: Path, **trainer: Any) -> Topology:
    tables: dict[str, Any] = {
        "model": {"random_init": False},
        "algorithm": {"entropy_coef": 0.05, "use_kl_loss": True, "kl_loss_coef": 0.1, "num_steps_per_rollout": 2},
        "train": {"max_tokens_per_gpu": 40},
        "trainer": trainer,
    }
    return tiny_topology(model, model.parent, **tables)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_two_ranks_equal_one(one: tuple[Path, Result], tmp_path: Path, layout: dict[str, Any]) -> None:
    model, (metrics, weights, probe) = one
    found, found_weights, found_probe = run_ranks(
        tmp_path / "two", topology_of(model, num_processes=2, megatron=layout), 2
    )
    assert found[2]["train/loss"] == pytest.approx(found[1]["train/loss"], abs=1e-6)  # resumed from a checkpoint
    for expected, result in zip(metrics, found, strict=True):
        for name, value in expected.items():
            if not name.startswith("perf/"):
                assert result[name] == pytest.approx(value, abs=1e-5), name
    for name, weight in weights.items():
        torch.testing.assert_close(found_weights[name], weight, rtol=0, atol=1e-4)
    assert found_probe[0] == probe[0]
    assert found_probe[1] == pytest.approx(probe[1], abs=1e-3)


@pytest.mark.anyio
async def test_two_processes_of_the_actor_meet_over_the_bus(
    make_topology: Callable[..., Topology], bus: Bus, nats_server: NatsServer, run_name: str, tmp_path: Path
) -> None:
    topology = make_topology(run={"name": run_name}, trainer={"num_processes": 2}, train={"num_steps": 2})
    (tmp_path / "topology.json").write_bytes(encode_topology(topology))
    environment = os.environ | {"PYTHONPATH": str(ROOT), BUS_URL_VARIABLE: nats_server.url, "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "actors.host", str(tmp_path), "trainer"]
    ranks = [
        await anyio.open_process(command, stdout=None, stderr=None, env=environment | {"RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        for step in range(2):
            await publish_batch(bus, step)
        with anyio.fail_after(60):
            async with bus.read(BatchTrained, CheckpointSaved) as events:
                said = [(await anext(events)).message for _ in range(3)]
        assert [type(event).__name__ for event in said] == ["BatchTrained", "BatchTrained", "CheckpointSaved"]
    finally:
        for rank in ranks:
            rank.terminate()
        with anyio.fail_after(15):
            codes = [await rank.wait() for rank in ranks]
    assert codes == [0, 0]


def test_a_checkpoint_of_one_rank_is_loaded_by_two_tensor_parallel_ones(
    make_topology: Callable[..., Topology], tmp_path: Path
) -> None:
    one = run_ranks(tmp_path / "one", make_topology(), 1)
    (tmp_path / "two").mkdir()
    shutil.copytree(tmp_path / "one" / "checkpoints", tmp_path / "two" / "checkpoints")
    topology = make_topology(trainer={"num_processes": 2, "megatron": LAYOUTS["tensor"]})
    two = run_ranks(tmp_path / "two", topology, 2)
    assert two.metrics[2]["train/loss"] == pytest.approx(one.metrics[2]["train/loss"], abs=1e-5)
