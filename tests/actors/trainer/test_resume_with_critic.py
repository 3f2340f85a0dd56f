"""Checkpoints and exports of a run with a critic."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification

from actors.trainer.checkpoints import checkpoints_in
from actors.trainer.commands import TrainerRank
from actors.trainer.export import export_run
from actors.trainer.step.critic import Critic
from actors.trainer.step.estimator import advantage_inputs
from runtime.models.checkpoint_files import CHECKPOINTS
from runtime.settings.topology import encode_topology
from tests.actors.trainer.hf import whole_weights, write_model
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import MakeTopology
from tests.support.checkpoints import save
from tests.support.published import flip

PPO: dict[str, Any] = {"estimator": {"type": "ppo", "value_clip": 0.1}}


def train(rank: TrainerRank, steps: range) -> list[dict[str, float]]:
    """Metrics of steps on fixed samples; times left out."""
    found = [rank.train(random_batch(step)).metrics for step in steps]
    return [{name: value for name, value in one.items() if not name.startswith("perf/")} for one in found]


def weights_of(rank: TrainerRank) -> dict[str, torch.Tensor]:
    """Copies of the weights of policy and critic."""
    found = [whole_weights(replica.complete_chunks(), replica.hf) for replica in rank._replicas]
    return {f"{role}.{name}": tensor.clone() for role, own in enumerate(found) for name, tensor in own.items()}


def critic_of(rank: TrainerRank) -> Critic:
    assert rank._critic is not None
    return rank._critic


def assert_equal(one: TrainerRank, other: TrainerRank) -> None:
    expected, found = weights_of(one), weights_of(other)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("distributed", [False, True])
def test_a_resumed_run_continues_bit_equal(
    make_topology: MakeTopology, tmp_path: Path, dtype: str, distributed: bool
) -> None:
    topology = make_topology(
        model={"dtype": dtype},
        algorithm=PPO,
        critic={"lr": 3e-3, "lr_warmup_iters": 4},
        trainer={"optimizer": {"use_distributed_optimizer": distributed}},
    )
    rank = TrainerRank(topology, tmp_path / "run")
    train(rank, range(2))
    save(rank, step=2)
    expected = train(rank, range(2, 4))
    resumed = TrainerRank(topology, tmp_path / "run")
    assert resumed.resume() == 2
    assert train(resumed, range(2, 4)) == expected
    assert_equal(rank, resumed)


def test_a_new_run_continues_with_the_critic_of_another_run(make_topology: MakeTopology, tmp_path: Path) -> None:
    schedule = {"lr_decay_style": "linear", "lr_warmup_iters": 3}
    rank = TrainerRank(make_topology(algorithm=PPO, optimizer=schedule, train={"num_steps": 4}), tmp_path / "other")
    train(rank, range(2))
    save(rank, step=2)
    before = weights_of(rank)
    expected = train(rank, range(2, 4))
    load = {"load": str(tmp_path / "other")}
    new = TrainerRank(
        make_topology(algorithm=PPO, optimizer=schedule, train={"num_steps": 2}, trainer=load), tmp_path / "new"
    )
    assert new.resume() == 0
    later = [new.train(replace(random_batch(step), step=step - 2)).metrics for step in (2, 3)]
    for found, wanted in zip(later, expected, strict=True):
        names = [name for name in wanted if not name.startswith("train/masked_tokens/")]
        assert {name: found[name] for name in names if name != "train/num_response_tokens"} == {
            name: wanted[name] for name in names if name != "train/num_response_tokens"
        }
    assert_equal(rank, new)
    weights_only = TrainerRank(make_topology(algorithm=PPO, trainer=load | {"load_weights_only": True}), tmp_path / "w")
    assert weights_only.resume() == 0
    found = weights_of(weights_only)
    assert [name for name in before if not torch.equal(before[name], found[name])] == []


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_critic_starts_from_the_policy_of_a_checkpoint_without_critic(
    make_topology: MakeTopology, tmp_path: Path, weights_only: bool
) -> None:
    rank = TrainerRank(make_topology(), tmp_path / "other")
    train(rank, range(2))
    save(rank, step=2)
    policy = weights_of(rank)
    load = {"load": str(tmp_path / "other"), "load_weights_only": weights_only}
    topology = make_topology(algorithm=PPO, critic={"init_method_std": 0.5}, trainer=load)
    new = TrainerRank(topology, tmp_path / "new")
    head = weights_of(new)["1.score.weight"]
    assert new.resume() == 0
    found = weights_of(new)
    body = {name.removeprefix("1."): weight for name, weight in found.items() if name.startswith("1.model.")}
    assert len(body) == len(policy) - 1
    assert [name for name, weight in body.items() if not torch.equal(weight, policy[f"0.{name}"])] == []
    assert torch.equal(found["1.score.weight"], head)
    assert found["1.score.bias"].tolist() == [0.0]
    train(new, range(1))
    assert not torch.equal(weights_of(new)["1.score.weight"], head)


def test_a_critic_with_a_model_of_its_own_keeps_its_weights(
    make_topology: MakeTopology, model_dir: Path, tmp_path: Path
) -> None:
    save(TrainerRank(make_topology(), tmp_path / "other"), step=0)
    write_model(tmp_path / "weights")
    critic = {"hf_checkpoint": str(tmp_path / "weights")}
    topology = make_topology(algorithm=PPO, critic=critic, trainer={"load": str(tmp_path / "other")})
    new = TrainerRank(topology, tmp_path / "new")
    before = weights_of(new)
    new.resume()
    found = weights_of(new)
    assert [name for name in before if name.startswith("1.") and not torch.equal(before[name], found[name])] == []


def test_a_checkpoint_without_critic_is_not_resumed(make_topology: MakeTopology, tmp_path: Path) -> None:
    save(TrainerRank(make_topology(), tmp_path / "run"), step=1)
    with pytest.raises(ValueError, match=r'has no critic, which algorithm\.estimator\.type = "ppo" continues with'):
        TrainerRank(make_topology(algorithm=PPO), tmp_path / "run").resume()


def test_a_critic_of_another_model_is_refused(make_topology: MakeTopology, tmp_path: Path) -> None:
    save(TrainerRank(make_topology(algorithm=PPO), tmp_path / "other"), step=1)
    write_model(tmp_path / "wider", intermediate_size=48)
    wider = {"hf_checkpoint": str(tmp_path / "wider")}
    topology = make_topology(algorithm=PPO, critic=wider, trainer={"load": str(tmp_path / "other")})
    with pytest.raises(ValueError, match="is of another critic: intermediate_size is 32 in the checkpoint, and 48"):
        TrainerRank(topology, tmp_path / "new").resume()


def test_training_continues_from_the_older_checkpoint_if_the_newest_is_damaged(
    make_topology: MakeTopology, tmp_path: Path
) -> None:
    topology = make_topology(algorithm=PPO)
    rank = TrainerRank(topology, tmp_path / "run")
    for step in range(2):
        train(rank, range(step, step + 1))
        save(rank, step=step + 1)
    expected = train(rank, range(2, 3))
    flip(checkpoints_in(tmp_path / "run" / CHECKPOINTS)[-1].path / "__0_0.distcp", 1000)
    again = TrainerRank(topology, tmp_path / "run")
    assert again.resume() == 1
    train(again, range(1, 2))
    assert train(again, range(2, 3)) == expected
    assert [aside.step for aside in again.take_set_aside()] == [2]


def test_skipped_steps_of_the_critic_are_saved(make_topology: MakeTopology, tmp_path: Path) -> None:
    topology = make_topology(algorithm=PPO | {"num_steps_per_rollout": 1})
    rank = TrainerRank(topology, tmp_path / "run")
    batch = random_batch(0)
    with torch.no_grad():
        rank._replicas[1].chunks[0].output_layer.bias.fill_(torch.nan)
    rank.train(batch)
    save(rank, step=1)
    resumed = TrainerRank(topology, tmp_path / "run")
    resumed.resume()
    assert [replica.skips.in_a_row for replica in resumed._replicas] == [1, 1]


@pytest.mark.parametrize(("dtype", "distributed"), [("float32", False), ("bfloat16", True)])
def test_the_memory_of_the_critic_leaves_the_device_and_comes_back(
    make_topology: MakeTopology, tmp_path: Path, dtype: str, distributed: bool
) -> None:
    optimizer = {"use_distributed_optimizer": distributed}
    topology = make_topology(model={"dtype": dtype}, algorithm=PPO, trainer={"optimizer": optimizer})
    found: list[tuple[Any, TrainerRank]] = []
    for offloads in (False, True):
        rank = TrainerRank(topology, tmp_path)
        metrics = []
        for step in range(2):
            if offloads:
                assert rank.offload() > 0
                critic = rank._replicas[1]
                assert {weight.untyped_storage().nbytes() for weight in critic.chunks[0].parameters()} == {0}
                rank.onload()
            metrics += train(rank, range(step, step + 1))
        rank.export(tmp_path / f"hf {offloads}")
        rank.offload()  # also after an export, which reads the weights in place
        rank.onload()
        found.append((metrics, rank))
    assert found[0][0] == found[1][0]
    assert_equal(found[0][1], found[1][1])


def test_an_optimizer_that_rests_on_the_host_has_that_of_the_critic(
    make_topology: MakeTopology, tmp_path: Path
) -> None:
    found = []
    for offloads in (False, True):
        (tmp_path / str(offloads)).mkdir()
        topology = make_topology(algorithm=PPO, trainer={"optimizer": {"optimizer_cpu_offload": offloads}})
        rank = TrainerRank(topology, tmp_path / str(offloads))
        metrics = train(rank, range(2))
        save(rank, step=2)
        resumed = TrainerRank(topology, tmp_path / str(offloads))
        resumed.resume()
        metrics += train(resumed, range(2, 3))
        resumed.offload()
        resumed.onload()
        found.append((metrics + train(resumed, range(3, 4)), resumed))
    assert found[0][0] == found[1][0]
    assert_equal(found[0][1], found[1][1])


def test_an_exported_critic_computes_in_transformers_what_the_trainer_does_and_is_read_back(
    make_topology: MakeTopology, model_dir: Path, tmp_path: Path
) -> None:
    write_model(model_dir)
    (model_dir / "tokenizer.json").write_text("{}")
    topology = make_topology(model={"random_init": False}, algorithm=PPO, critic={"init_method_std": 0.3})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "topology.json").write_bytes(encode_topology(topology))
    rank = TrainerRank(topology, tmp_path / "run")
    train(rank, range(2))
    save(rank, step=2)
    batch = random_batch(2)
    wanted_N = advantage_inputs(batch).response_mask
    values_N = critic_of(rank).values(batch, wanted_N)
    rank.export(tmp_path / "by the trainer")
    export_run(tmp_path / "run", tmp_path / "out")
    for place in ("by the trainer", "out"):
        model = AutoModelForTokenClassification.from_pretrained(tmp_path / place / "critic").eval()
        sample = slice(int(batch.starts_B[1]), int(batch.starts_B[1] + batch.lengths_B[1]))
        tokens = torch.from_numpy(batch.tokens_N[sample]).long()
        with torch.no_grad():
            expected = model(tokens[None]).logits[0, :-1, 0].numpy()
        own = wanted_N[sample][1:]
        np.testing.assert_allclose(values_N[sample][1:][own], expected[own], rtol=0, atol=1e-5)
        assert (tmp_path / place / "critic" / "tokenizer.json").is_file()
        critic = {"hf_checkpoint": str(tmp_path / place / "critic")}
        again = TrainerRank(
            make_topology(model={"random_init": False}, algorithm=PPO, critic=critic), tmp_path / "again"
        )
        found, before = weights_of(again), weights_of(rank)
        assert [name for name in before if name.startswith("1.") and not torch.equal(before[name], found[name])] == []
