"""How many torch threads engines and trainer ranks on the CPU get."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.processes import process_specs
from runtime.models.blocks import Attention, Layer, Mlp
from runtime.models.config import read_model
from runtime.models.rope import Rope
from runtime.settings.devices import ON_CPU
from runtime.settings.load import load_topology
from runtime.settings.reading.config import TopologyError
from runtime.settings.topology import Topology
from runtime.settings.torch_threads import VARIABLE, num_sharing, num_torch_threads, usable_cores

ROOT = Path(__file__).parents[3]
SMALL = read_model(ROOT / "topologies/demo/models/boxed-copy").shape
LAYER = Layer(Attention(heads=9, kv_heads=3, head_dim=64, rope=Rope()), Mlp(size=1536))
SMOLLM = msgspec.structs.replace(SMALL, vocab_size=49152, hidden_size=576, intermediate_size=1536, layers=(LAYER,) * 30)
STALE = "rollout.max_staleness=1"


def topology(*overrides: str) -> Topology:
    return load_topology(ROOT / "topologies/laptop.toml", overrides).topology


@pytest.mark.parametrize(
    ("overrides", "sharing"),
    [
        ((), 1),  # trainer and engine take turns
        ((STALE,), 2),
        (("trainer.log_probs_ahead=true", "algorithm.kl.loss_coef=0.1"), 2),
        (("trainer.num_processes=2", "trainer.megatron.tensor_model_parallel_size=2"), 2),
        (("engines.policy.num_engines=3",), 3),
        (("engines.policy.num_engines=3", STALE), 4),
        (('engines.policy.urls=["http://127.0.0.1:30000"]', STALE), 1),
        (("run.only=rollout", STALE), 1),
    ],
)
def test_processes_that_compute_at_the_same_time_share_the_cores(overrides: tuple[str, ...], sharing: int) -> None:
    assert num_sharing(topology(*overrides), "local") == sharing


def test_small_models_get_one_thread_and_larger_ones_their_share() -> None:
    for cores, sharing, threads in ((2, 1, 2), (2, 2, 1), (16, 3, 5), (1, 4, 1)):
        assert num_torch_threads(SMOLLM, {VARIABLE: f"/{sharing}"}, cores) == threads
        assert num_torch_threads(SMALL, {VARIABLE: f"/{sharing}"}, cores) == 1
    assert num_torch_threads(SMOLLM, {}, 8) == 1  # a tiny engine that no run started
    assert num_torch_threads(SMALL, {VARIABLE: "3/2"}, 8) == 3


@given(st.integers(1, 64), st.integers(1, 64), st.one_of(st.just(""), st.integers(1, 99).map(str)))
def test_all_threads_together_are_never_more_than_cores(cores: int, sharing: int, wanted: str) -> None:
    threads = num_torch_threads(SMOLLM, {VARIABLE: f"{wanted}/{sharing}"}, cores)
    assert threads >= 1
    assert threads * sharing <= cores or threads == 1


def test_engines_and_ranks_get_the_setting_and_no_other_process() -> None:
    loaded = topology("trainer.torch_threads=2", "engines.policy.torch_threads=1", STALE)
    found = {spec.name: spec.env.get(VARIABLE) for spec in process_specs(loaded, "local", Path("runs/r"))}
    assert {name: value for name, value in found.items() if value} == {"trainer": "2/2", "engine.policy.0": "1/2"}


def test_engines_and_ranks_on_the_cpu_keep_few_prepared_products_and_no_other_process_is_limited() -> None:
    found = {spec.name: spec.env for spec in process_specs(topology(), "local", Path("runs/r"))}
    assert {name for name, env in found.items() if ON_CPU.items() <= env.items()} == {"trainer", "engine.policy.0"}


def test_products_of_many_shapes_in_bfloat16_do_not_pile_up() -> None:
    """Without the limits, 60 shapes keep about 120 MB on a processor with AMX."""
    program = """
import ctypes, torch
from runtime.util.memory import own_anonymous_bytes
torch.set_num_threads(1)
weight, inputs = torch.zeros(1536, 576, dtype=torch.bfloat16), torch.zeros(140, 576, dtype=torch.bfloat16)
for count in range(80, 140):
    rows = inputs[:count]
    product = torch.mm(rows, weight.t())
    torch.mm(product, weight), torch.mm(product.t(), rows)
    before = own_anonymous_bytes() if count == 80 else before
ctypes.CDLL(None).malloc_trim(0)
print(own_anonymous_bytes() - before)
"""
    env = os.environ | ON_CPU | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, check=True, timeout=120)
    assert int(done.stdout) < 50e6


def test_freed_memory_is_taken_again_without_fresh_pages() -> None:
    """100 tensors of 16 MB on a thread, as in a trainer, took 409,600 pages."""
    program = """
import resource, threading, torch

def step():
    for _ in range(100):
        torch.zeros(4 << 20)

thread = threading.Thread(target=step)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
thread.start(), thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    env = os.environ | ON_CPU | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, check=True, timeout=120)
    assert int(done.stdout) < 100_000


def test_sglang_does_not_take_the_setting() -> None:
    with pytest.raises(TopologyError, match="OMP_NUM_THREADS"):
        topology("engines.policy.kind=sglang", "engines.policy.torch_threads=2")


def eight_cores(_pid: int) -> set[int]:
    return set(range(8))


def test_a_container_has_the_cores_of_its_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr("runtime.settings.torch_threads.CPU_QUOTA", quota)
    monkeypatch.setattr(os, "sched_getaffinity", eight_cores)
    assert usable_cores() == 8
    for text, cores in (("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8)):
        quota.write_text(text)
        assert usable_cores() == cores
