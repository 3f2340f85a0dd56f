"""Experts in one product are experts one after the other, forward and backward, whatever tokens each has."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.trainer.data.batch import make_micro_batch
from actors.trainer.megatron.layers import experts
from actors.trainer.megatron.rank_model import Replica
from runtime.settings.topology import Topology
from tests.actors.trainer.tiny import config_of, random_batch
from tests.build.topology import MakeTopology

COUNTS = [3, 0, 5, 1, 0]


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    return drawn.to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grouped_product_is_the_loop_over_its_groups(dtype: torch.dtype) -> None:
    inputs, weights = random(sum(COUNTS), 16, dtype=dtype), random(len(COUNTS), 24, 16, dtype=dtype).unbind()
    together = experts.grouped_linear(inputs, torch.tensor(COUNTS).cumsum(0, dtype=torch.int32), list(weights))
    loop = torch.cat([F.linear(rows, weight) for rows, weight in zip(inputs.split(COUNTS), weights, strict=True)])
    assert torch.equal(together, loop)
    mix = random(*loop.shape, dtype=dtype).detach()
    found, expected = (torch.autograd.grad(out, [inputs, *weights], mix) for out in (together, loop))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_an_expert_without_tokens_has_no_gradient_where_a_kernel_leaves_memory_as_it_was() -> None:
    """Kernels of some GPUs write nothing into the gradient of a weight whose group has no rows."""
    right = F.grouped_mm

    def leaves(one: Tensor, other: Tensor, *, offs: Tensor) -> Tensor:
        found = right(one, other, offs=offs)
        if found.dim() == 3:
            found[torch.tensor(COUNTS) == 0] = torch.nan
        return found

    weights = random(len(COUNTS), 24, 16, dtype=torch.float32)
    with mock.patch.object(experts, "GROUPED", leaves):
        ends = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
        inputs = random(sum(COUNTS), 16, dtype=torch.float32)
        (gradient,) = torch.autograd.grad(experts.grouped_linear(inputs, ends, list(weights.unbind())).sum(), [weights])
    assert [bool((each == 0).all()) for each in gradient] == [count == 0 for count in COUNTS]


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_a_model_has_the_same_gradients_with_its_experts_in_one_product(
    make_topology: MakeTopology, model_dir: Path, kind: str
) -> None:
    (model_dir / "config.json").write_text(json.dumps(config_of(kind)))
    one_by_one, together = (gradients(make_topology(), reason) for reason in ("the loop", None))
    assert max(float(value.abs().max()) for value in one_by_one.values()) > 0.1
    for name, expected in one_by_one.items():
        torch.testing.assert_close(together[name], expected, rtol=1e-5, atol=1e-6)


def gradients(topology: Topology, one_by_one: str | None) -> dict[str, Tensor]:
    """By name, of the summed log-probs of one micro-batch."""
    replica = Replica(topology, torch.device("cpu"))
    modules = [module for module in replica.chunks[0].modules() if isinstance(module, experts.GroupedExperts)]
    for module in modules:
        module.one_by_one = one_by_one
    calls: list[Any] = []
    right = experts.grouped_linear
    with mock.patch.object(experts, "grouped_linear", lambda *given: calls.append(given) or right(*given)):
        micro_batch = make_micro_batch(random_batch(), np.arange(8), packed=False)
        replica.backward([micro_batch], lambda _, outputs: outputs.log_probs.sum())
    assert len(calls) == (0 if one_by_one else 2 * len(modules))
    return {name: parameter.main_grad.clone() for name, parameter in replica.chunks[0].named_parameters()}


def test_what_cannot_be_computed_together_says_why() -> None:
    cpu = torch.device("cpu")
    assert "on the CPU" in str(experts.why_one_by_one(cpu, torch.bfloat16, 64))
    with mock.patch.object(experts, "GROUPED", None):
        assert "has no torch.nn.functional.grouped_mm" in str(experts.why_one_by_one(cpu, torch.bfloat16, 64))
    gpu = torch.device("cuda", 0)
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)):
        assert "compute capability 9.0" in str(experts.why_one_by_one(gpu, torch.bfloat16, 64))
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)):
        assert "torch.bfloat16, not 60" in str(experts.why_one_by_one(gpu, torch.bfloat16, 64, 60))
        assert "needs bfloat16" in str(experts.why_one_by_one(gpu, torch.float32, 64))
        assert experts.why_one_by_one(gpu, torch.bfloat16, 64, 8) is None
