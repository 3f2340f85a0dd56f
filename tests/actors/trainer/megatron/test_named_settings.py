"""Settings that have Megatron-core's names reach it, and the table of its fields is that of the installed package.

What does something on several ranks alone is in the rows of tests/grid.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from actors.trainer.megatron.imports import quiet
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.train_step import TrainStep
from runtime.settings.megatron.fields import FIELDS, megatron_fields
from tests.actors.trainer.hf import whole_weights
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import MakeTopology
from tests.support.megatron_fields import found, page

HOW = {
    "recompute_modules": {
        "megatron": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
    },
    "disable_bf16_reduced_precision_matmul": {"megatron": {"disable_bf16_reduced_precision_matmul": True}},
}


def trained(
    make_topology: MakeTopology, trainer: Mapping[str, Any], *, steps: int = 2, **tables: Any
) -> dict[str, Tensor]:
    """The weights after one train step of so many optimizer steps."""
    topology = make_topology(trainer=dict(trainer), algorithm={"num_steps_per_rollout": steps}, **tables)
    replica = Replica(topology, torch.device("cpu"))
    with quiet():
        TrainStep(topology, replica)(random_batch(0))
    return {name: weight.clone() for name, weight in whole_weights(replica.complete_chunks(), replica.hf).items()}


def test_the_table_of_fields_is_that_of_the_installed_package() -> None:
    assert FIELDS.read_text(encoding="utf-8") == page(found())
    assert msgspec.to_builtins(megatron_fields())["megatron"] == found()["megatron"]


@pytest.mark.parametrize("trainer", HOW.values(), ids=HOW.keys())
def test_what_says_only_how_changes_no_weight(make_topology: MakeTopology, trainer: dict[str, Any]) -> None:
    plain, other = trained(make_topology, {}), trained(make_topology, trainer)
    for name, weight in plain.items():
        torch.testing.assert_close(other[name], weight, rtol=0, atol=1e-6)


def test_weight_decay_of_the_norms_of_queries_and_keys_is_a_choice(make_topology: MakeTopology) -> None:
    optimizer = {"weight_decay": 0.5, "lr": 0.01}
    plain = trained(make_topology, {}, steps=1, optimizer=optimizer)
    chosen = {"optimizer": {"apply_wd_to_qk_layernorm": True}}
    decayed = trained(make_topology, chosen, steps=1, optimizer=optimizer)
    # steps of other groups of parameters round otherwise on some processors; the decay is 0.005
    changed = {name for name, weight in plain.items() if not torch.allclose(weight, decayed[name], rtol=0, atol=1e-6)}
    assert changed
    assert all("q_norm" in name or "k_norm" in name for name in changed)
