"""What only training needs goes to the host and comes back: what is free then, and that no step notices."""

import json
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch

from actors.trainer.commands import TrainerRank
from actors.trainer.data.batch import make_micro_batch
from actors.trainer.megatron.memory import PeakMemory, give_back
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.by_group import ReferenceModel
from actors.trainer.step.train_step import TrainStep
from runtime.util.memory import own_anonymous_bytes
from tests.actors.trainer.hf import whole_weights
from tests.actors.trainer.measured import peak_of_tensors
from tests.actors.trainer.tiny import TINY, random_batch
from tests.build.topology import MakeTopology
from tests.support.checkpoints import save

LARGE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 16384}
FORMS = [(dtype, distributed) for dtype in ("float32", "bfloat16") for distributed in (False, True)]


def trainer(make_topology: MakeTopology, dtype: str, distributed: bool) -> tuple[Replica, TrainStep]:
    topology = make_topology(model={"dtype": dtype}, trainer={"optimizer": {"use_distributed_optimizer": distributed}})
    replica = Replica(topology, torch.device("cpu"))
    return replica, TrainStep(topology, replica)


@pytest.mark.parametrize(("dtype", "distributed"), FORMS)
def test_a_step_after_onload_is_bit_equal(
    make_topology: MakeTopology, tmp_path: Path, dtype: str, distributed: bool
) -> None:
    found: list[tuple[list[dict[str, float]], dict[str, torch.Tensor]]] = []
    for offloads in (False, True):
        replica, train = trainer(make_topology, dtype, distributed)
        metrics: list[dict[str, float]] = []
        for step in range(3):
            if offloads:
                replica.offload(tmp_path)
                assert replica.offloaded is not None
                assert {storage.nbytes() for storage in replica.offloaded.storages} == {0}
                weights = whole_weights(replica.complete_chunks(), replica.hf)  # stay
                assert all(weight.isfinite().all() for weight in weights.values())
                replica.onload()
            metrics.append({k: v for k, v in train(random_batch(step)).metrics.items() if not k.startswith("perf/")})
        found.append((metrics, whole_weights(replica.complete_chunks(), replica.hf)))
    assert found[0][0] == found[1][0]
    assert [name for name, weight in found[0][1].items() if not torch.equal(weight, found[1][1][name])] == []


@pytest.mark.parametrize(("dtype", "distributed"), FORMS)
def test_an_optimizer_that_rests_on_the_host_makes_the_same_steps(
    make_topology: MakeTopology, tmp_path: Path, dtype: str, distributed: bool
) -> None:
    found: list[tuple[list[float], dict[str, torch.Tensor]]] = []
    for offloads in (False, True):
        optimizer = {"use_distributed_optimizer": distributed, "optimizer_cpu_offload": offloads}
        topology = make_topology(model={"dtype": dtype}, trainer={"optimizer": optimizer})
        run = tmp_path / str(offloads)
        run.mkdir()
        rank = TrainerRank(topology, run)
        losses = [rank.train(random_batch(step)).metrics["train/loss"] for step in range(2)]
        save(rank, step=2, incarnation=1)
        resumed = TrainerRank(topology, run)
        assert resumed.resume() == 2
        losses += [resumed.train(random_batch(step)).metrics["train/loss"] for step in (2, 3)]
        assert_is_away(resumed._replica, away=offloads)
        assert resumed.offload() > 0
        resumed.onload()
        losses.append(resumed.train(random_batch(4)).metrics["train/loss"])
        found.append((losses, whole_weights(resumed._replica.complete_chunks(), resumed._replica.hf)))
    assert found[0][0] == found[1][0]
    assert [name for name, weight in found[0][1].items() if not torch.equal(weight, found[1][1][name])] == []


def assert_is_away(replica: Replica, *, away: bool) -> None:
    """Of moments no byte is there, or all are."""
    inner = replica.optimizer
    while not hasattr(inner, "state") or not isinstance(inner, torch.optim.Optimizer):
        inner = inner.optimizer
    moments = [state["exp_avg"] for state in inner.state.values()]
    assert moments
    assert all((moment.untyped_storage().nbytes() == 0) == away for moment in moments)


@pytest.mark.parametrize(("dtype", "distributed"), FORMS)
def test_memory_falls_by_what_is_offloaded(
    make_topology: MakeTopology, model_dir: Path, tmp_path: Path, dtype: str, distributed: bool
) -> None:
    (model_dir / "config.json").write_text(json.dumps(TINY | LARGE))
    replica, train = trainer(make_topology, dtype, distributed)
    train(random_batch())
    parameters = sum(parameter.numel() for chunk in replica.chunks for parameter in chunk.parameters())
    for _ in range(2):
        before = own_anonymous_bytes()
        size = replica.offload(tmp_path)
        assert size >= parameters * (12 if dtype == "float32" else 16)  # gradients, two moments, main parameters
        assert before - own_anonymous_bytes() >= 0.9 * size
        replica.onload()
    assert own_anonymous_bytes() - before <= 0.1 * size
    assert list(tmp_path.glob("tmp*")) == []


def test_a_trainer_publishes_what_it_has_while_the_rest_is_away(make_topology: MakeTopology, tmp_path: Path) -> None:
    rank = TrainerRank(make_topology(), tmp_path)
    rank.train(random_batch(0))
    expected = rank.publish(1, confirmed=0)
    assert rank.offload() > 0
    away = rank.publish(2, confirmed=0)
    assert (away.checksum, away.probe) == (expected.checksum, expected.probe)
    rank.onload()
    rank.train(random_batch(1))
    save(rank, step=2, incarnation=1)


def test_log_probs_of_the_reference_take_no_third_set_of_weights(
    make_topology: MakeTopology, model_dir: Path, tmp_path: Path
) -> None:
    (model_dir / "config.json").write_text(json.dumps(TINY | LARGE))
    replica = Replica(make_topology(), torch.device("cpu"))
    weights = [parameter.detach().clone() for chunk in replica.chunks for parameter in chunk.parameters()]
    batch = random_batch()
    micro_batch = make_micro_batch(batch, np.arange(4), packed=False)
    reference = ReferenceModel(replica, None)
    peak = peak_of_tensors(lambda: reference.log_probs(batch, [micro_batch]))
    assert max(weight.nbytes for weight in weights) <= peak < 0.75 * sum(weight.nbytes for weight in weights)
    after = [parameter for chunk in replica.chunks for parameter in chunk.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(weights, after, strict=True))


def test_peaks_are_by_phase_and_rank(make_topology: MakeTopology, tmp_path: Path) -> None:
    rank = TrainerRank(make_topology(algorithm={"kl": {"type": "k1", "loss_coef": 0.1}}), tmp_path)
    metrics = rank.train(random_batch(0)).metrics
    phases = {name.split("/")[2]: size for name, size in metrics.items() if name.startswith("perf/peak_bytes/")}
    assert phases.keys() == {"prepare", "train"}
    assert all(0.5 < size / own_anonymous_bytes() < 1.1 for size in phases.values())
    rank.publish(1, confirmed=0)
    assert "perf/peak_bytes/export/rank_0" in rank.train(random_batch(1)).metrics


def test_a_peak_is_seen_within_its_phase() -> None:
    memory = PeakMemory(torch.device("cpu"))
    give_back()  # else memory that earlier tests had is used again unseen
    with memory.phase("small"):
        pass
    with memory.phase("large"):
        held = torch.ones(64 << 20, dtype=torch.uint8)
        Event().wait(0.1)
        del held
    peaks = memory.take()
    assert peaks["large"] - peaks["small"] > 0.9 * (64 << 20)
    assert memory.take() == {}
