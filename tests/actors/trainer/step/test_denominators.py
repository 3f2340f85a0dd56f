"""Losses that Megatron adds by itself keep their scale, whatever the policy loss is divided by."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.trainer.data.batch import TrainBatch
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.train_step import TrainStep
from runtime.settings.topology import Topology
from tests.actors.trainer.tiny import config_of, random_batch
from tests.build.topology import MakeTopology

AUXILIARY = {"moe_aux_loss_coeff": 0.5}
Z_LOSS = {"moe_z_loss_coeff": 0.5}


def indifferent() -> TrainBatch:
    """A batch whose rewards are all alike, so that its policy loss has no gradient."""
    batch = random_batch()
    return replace(batch, rewards_B=np.ones_like(batch.rewards_B))


def gradient(topology: Topology, batch: TrainBatch) -> Tensor:
    """The gradient of one optimizer step, before it is clipped."""
    torch.manual_seed(0)
    replica = Replica(topology, torch.device("cpu"))
    found: list[Tensor] = []
    move = replica.optimizer_step

    def look(**arguments: float) -> float:
        found.append(torch.cat([parameter.main_grad.flatten() for parameter in replica.chunks[0].parameters()]).clone())
        return move(**arguments)

    replica.optimizer_step = look  # pyright: ignore[reportAttributeAccessIssue]
    TrainStep(topology, replica)(batch)
    return found[0]


def topology_of(make_topology: MakeTopology, *, per_token: bool, **megatron: Any) -> Topology:
    algorithm = {"num_steps_per_rollout": 1, "reduction": {"type": "token-mean" if per_token else "rollout-mean"}}
    trainer = {"megatron": megatron}
    return make_topology(algorithm=algorithm, train={"max_tokens_per_gpu": 50}, trainer=trainer)


@pytest.mark.parametrize("options", [AUXILIARY, Z_LOSS], ids=["auxiliary", "z"])
def test_losses_of_the_router_have_one_scale_in_both_reductions(
    make_topology: MakeTopology, model_dir: Path, options: dict[str, Any]
) -> None:
    (model_dir / "config.json").write_text(json.dumps(config_of("qwen3_moe")))
    batch = indifferent()
    samples, tokens, without = (
        gradient(topology_of(make_topology, per_token=each, **named), batch)
        for each, named in ((False, options), (True, options), (True, {}))
    )
    assert samples.norm() > 1e-4
    assert without.norm() == 0
    assert torch.equal(samples, tokens)


@pytest.mark.parametrize(
    "options",
    [AUXILIARY, AUXILIARY | {"moe_router_load_balancing_type": "seq_aux_loss"}, Z_LOSS],
    ids=["of a micro-batch", "of a sequence", "z"],
)
@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_padding_counts_in_no_loss_of_the_router(
    make_topology: MakeTopology, model_dir: Path, options: dict[str, Any], kind: str
) -> None:
    (model_dir / "config.json").write_text(json.dumps(config_of(kind)))
    algorithm, train = {"num_steps_per_rollout": 1}, {"max_tokens_per_gpu": 10_000}  # one micro-batch
    padded, packed = (
        gradient(
            make_topology(algorithm=algorithm, train=train, trainer={"packed": each, "megatron": options}),
            indifferent(),
        )
        for each in (False, True)
    )
    assert padded.norm() > 1e-4
    assert float((padded - packed).norm() / padded.norm()) < 1e-5


def test_a_skipped_step_leaves_the_bias_of_experts_as_it_was(make_topology: MakeTopology, model_dir: Path) -> None:
    """Megatron moves it when gradients are finished, before their norm is known."""
    (model_dir / "config.json").write_text(json.dumps(config_of("glm4_moe", first_k_dense_replace=0)))
    megatron = {"moe_router_bias_update_rate": 1e-3}
    topology = make_topology(algorithm={"num_steps_per_rollout": 1}, trainer={"megatron": megatron})
    replica = Replica(topology, torch.device("cpu"))
    step = TrainStep(topology, replica)
    biases = {name: bias for name, bias in replica.chunks[0].named_buffers() if name.endswith("expert_bias")}
    assert len(biases) == 2
    step(random_batch(0))
    before = {name: bias.clone() for name, bias in biases.items()}
    assert all(bias.abs().sum() > 0 for bias in before.values())
    batch = random_batch(1)
    assert len(step(replace(batch, rewards_B=np.full_like(batch.rewards_B, np.nan))).skipped)
    assert all(torch.equal(bias, before[name]) for name, bias in biases.items())
