"""Two ranks of every kind give what one rank gives."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runtime.topology import Topology, encode_topology
from tests.actors.trainer.hf import write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = Path(__file__).with_name("rank_program.py")
LAYOUTS = {
    "tensor": {"tensor_model_parallel_size": 2},
    "tensor and sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "data": {},
}


def run_ranks(
    directory: Path, topology: Topology, world: int
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
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
    return result["metrics"], load_file(Path(result["path"]) / "model.safetensors")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_two_ranks_equal_one(
    make_topology: Callable[..., Topology], tmp_path: Path, layout: dict[str, Any], tied: bool
) -> None:
    directory = tmp_path / "weights-to-load"
    write_model(directory, tied=tied)
    tables: dict[str, Any] = {
        "model": {"hf_checkpoint": str(directory), "random_init": False},
        "algorithm": {"entropy_coef": 0.05, "use_kl_loss": True, "kl_loss_coef": 0.1, "num_steps_per_rollout": 2},
        "train": {"max_tokens_per_gpu": 40},
    }
    one, weights_of_one = run_ranks(tmp_path / "one", make_topology(**tables), 1)
    trainer = {"num_processes": 2, "megatron": layout}
    two, weights_of_two = run_ranks(tmp_path / "two", make_topology(**tables, trainer=trainer), 2)
    assert two[2]["train/loss"] == pytest.approx(two[1]["train/loss"], abs=1e-6)  # resumed from a checkpoint
    for expected, found in zip(one, two, strict=True):
        for name, value in expected.items():
            if not name.startswith("perf/"):
                assert found[name] == pytest.approx(value, abs=1e-5), name
    for name, weight in weights_of_one.items():
        torch.testing.assert_close(weights_of_two[name], weight, rtol=0, atol=1e-4)


def test_a_checkpoint_of_one_rank_is_loaded_by_two_tensor_parallel_ones(
    make_topology: Callable[..., Topology], tmp_path: Path
) -> None:
    one, _ = run_ranks(tmp_path / "one", make_topology(), 1)
    (tmp_path / "two").mkdir()
    shutil.copytree(tmp_path / "one" / "checkpoints", tmp_path / "two" / "checkpoints")
    topology = make_topology(trainer={"num_processes": 2, "megatron": LAYOUTS["tensor"]})
    two, _ = run_ranks(tmp_path / "two", topology, 2)
    assert two[2]["train/loss"] == pytest.approx(one[2]["train/loss"], abs=1e-5)
