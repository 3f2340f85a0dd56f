"""How many tokens a micro-batch on the CPU has by default, and how much memory a trainer rank is said to take."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from actors.trainer.models.config import read_hf_config
from actors.trainer.models.memory import described, rank_memory, tokens_by_memory
from runtime.settings.load import load_topology
from tests.actors.trainer.tiny import TINY
from tests.bench.bench_trainer import REAL, ROOT, TOPOLOGY

WEIGHTS = 134_515_008  # of `REAL`
TOKENS = 542  # of the largest micro-batch of the bench with --real, where memory does not limit it
MEASURED = {  # peak bytes of `python -m tests.bench.bench_trainer --real DTYPE --layers N`, a processor with AMX
    ("float32", 30): 3.021e9,
    ("bfloat16", 30): 3.342e9,
    ("float32", 14): 1.970e9,
    ("bfloat16", 14): 2.292e9,
    ("float32", 6): 1.364e9,
    ("bfloat16", 6): 1.643e9,
}


def test_activations_of_a_micro_batch_take_an_eighth_of_the_states(tmp_path: Path) -> None:
    """134.5M weights: 2.15 GB of states; 30 layers of 5 x 576 + 3 x 1536 floats a token. Tiny models have no limit."""
    found: list[int] = []
    for name, config in {"real": REAL, "tiny": TINY}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        found.append(tokens_by_memory(read_hf_config(tmp_path / name)))
    assert found[0] == 16 * 134_515_008 // 8 // (4 * 30 * (5 * 576 + 3 * 1536))
    assert found[1] > 9216


@pytest.mark.parametrize(
    ("dtype", "settings", "bytes_a_weight"),
    [
        ("float32", (), 16),  # weight, gradient, two moments
        ("bfloat16", (), 18),  # weight, and in float32 gradient, main parameter, two moments
        ("bfloat16", ("algorithm.kl.loss_coef=0.1",), 20),  # and the reference's weight
        ("bfloat16", ("trainer.num_processes=2", "trainer.megatron.tensor_model_parallel_size=2"), 9),
        ("bfloat16", ("trainer.num_processes=2", "trainer.optimizer.use_distributed_optimizer=true"), 12),
    ],
)
def test_states_are_counted_by_weight(
    tmp_path: Path, dtype: str, settings: tuple[str, ...], bytes_a_weight: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REAL))
    topology = load_topology(TOPOLOGY, [f"model.dtype={dtype}", *settings]).topology
    assert rank_memory(topology, read_hf_config(tmp_path)).states == WEIGHTS * bytes_a_weight


@pytest.mark.parametrize(("dtype", "layers"), MEASURED)
def test_the_estimate_is_near_what_was_measured(tmp_path: Path, dtype: str, layers: int) -> None:
    assert estimate(tmp_path, dtype, layers) == pytest.approx(MEASURED[dtype, layers], rel=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_estimate_is_near_what_a_middle_sized_model_takes(tmp_path: Path, dtype: str) -> None:
    # the second step has the peak: moments beside activations
    command = [sys.executable, "-m", "tests.bench.bench_trainer", "--real", dtype, "--layers", "6", "--steps", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=280)
    measured = json.loads(done.stdout)["rss_mb"]["peak"] * 1e6
    assert measured == pytest.approx(estimate(tmp_path, dtype, 6), rel=0.15)


def test_the_plan_says_what_the_memory_is_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REAL))
    topology = load_topology(TOPOLOGY, ["model.dtype=float32", "train.max_tokens_per_gpu=200"]).topology
    assert described(topology, read_hf_config(tmp_path)) == (
        "memory: the trainer takes about 2.6 GiB: 2.0 GiB for weights, gradients and moments, "
        "303 MiB for activations and logits of a micro-batch, 327 MiB for the program"
    )


def estimate(place: Path, dtype: str, layers: int) -> int:
    """The estimate for the bench's model and batch."""
    (place / "config.json").write_text(json.dumps({**REAL, "num_hidden_layers": layers}))
    model = read_hf_config(place)
    tokens = min(TOKENS, tokens_by_memory(model))
    settings = [f"model.dtype={dtype}", f"train.max_tokens_per_gpu={tokens}"]
    return rank_memory(load_topology(TOPOLOGY, settings).topology, model).total
