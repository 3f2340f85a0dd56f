"""The gated delta net is transformers' module, alone and in packed rows, and samples share no state and no filter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextGatedDeltaNet,
    torch_recurrent_gated_delta_rule,
)

from actors.trainer.data.batch import SharedPrompts
from actors.trainer.data.context import Context
from actors.trainer.data.prompts import PADDING, PROMPT
from actors.trainer.megatron.config import transformer_config
from actors.trainer.megatron.imports import parallel_state, quiet
from actors.trainer.megatron.layers.blockwise import Row
from actors.trainer.megatron.layers.delta_net import GatedDeltaNet
from actors.trainer.megatron.layers.delta_rule import Chunks, convolved, delta_rule
from actors.trainer.megatron.layers.rows import packing
from actors.trainer.models.config import read_hf_config
from runtime.models.blocks import DeltaNet, Weight
from runtime.settings.tables.trainer import MegatronConfig
from tests.actors.trainer.hf import write_model
from tests.actors.trainer.megatron.layers.test_blockwise import units

CPU = torch.device("cpu")
CLOSE = 1e-5  # of the largest value
BLOCK = DeltaNet(key_heads=2, value_heads=6, key_dim=5, value_dim=7, width=3)
KINDS: dict[bool, tuple[Any, Any]] = {
    True: (Qwen3NextConfig, Qwen3NextGatedDeltaNet),
    False: (Qwen3_5TextConfig, Qwen3_5GatedDeltaNet),
}


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE * float(expected.detach().abs().max()))


def drawn(total: int, seed: int) -> list[Tensor]:
    """Queries, keys, values, decays and rates of a row; most decays are small."""
    made = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, total, 2, 5, generator=made).unbind(0)
    decay = -torch.rand(total, 2, 3, generator=made).pow(3) * 5
    found = (query, key, torch.randn(total, 2, 3, 7, generator=made), decay, torch.rand(total, 2, 3, generator=made))
    return [each.clone().requires_grad_() for each in found]


def by_position(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
    """Transformers' recurrence over one sample."""
    given = (each.flatten(1, each.dim() - 2)[None] if each.dim() == 4 else each[None] for each in (query, key, value))
    found, _ = torch_recurrent_gated_delta_rule(
        *given, g=decay.flatten(1)[None], beta=rate.flatten(1)[None], use_qk_l2norm_in_kernel=True
    )
    return found[0].view(value.shape)


def positions_of(row: Row) -> list[Tensor]:
    """The positions of each sample of a row, those of its prompt first."""
    found: list[Tensor] = []
    for sequence in np.unique(row.sequences):
        own = row.sequences == sequence
        prompt = np.flatnonzero(own & (row.owners == PROMPT))
        samples = (own & (row.owners == owner) for owner in np.unique(row.owners[own & (row.owners >= 0)]))
        found += (torch.from_numpy(np.concatenate([prompt, np.flatnonzero(sample)])) for sample in samples)
    return found


ROWS: dict[str, list[tuple[int, list[int]]]] = {
    "samples": [(0, [70, 2]), (0, [1]), (0, [33])],
    "behind prompts": [(40, [25, 1, 60]), (3, [5]), (0, [4, 9])],
}


@pytest.mark.parametrize("chosen", ROWS.values(), ids=ROWS)
def test_outputs_and_gradients_are_those_of_the_recurrence_over_each_sample(
    chosen: list[tuple[int, list[int]]],
) -> None:
    lengths, shared = units(chosen, 1)
    row = Row.of(lengths, Context(), shared)
    own, reference = drawn(len(row.sequences), 0), drawn(len(row.sequences), 0)
    found = delta_rule(*own, Chunks.of(row, CPU))
    along = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    total = ours = torch.zeros(())
    for positions in positions_of(row):
        expected = by_position(*(each[positions] for each in reference))
        assert_close(found[positions], expected)
        total, ours = total + (expected * along[positions]).sum(), ours + (found[positions] * along[positions]).sum()
    if positions_of(row):
        total.backward()
        ours.backward()
        for each, other in zip(own, reference, strict=True):
            assert_close(each.grad, other.grad)


def test_a_long_sample_passes_its_state_through_many_chunks() -> None:
    row = Row.of(np.array([300, 40]), Context(), None)
    chunks = Chunks.of(row, CPU)
    assert (chunks.size, len(chunks.waves)) == (64, 5)
    own = drawn(340, 2)
    found = delta_rule(*own, chunks)
    for part in (slice(0, 300), slice(300, 340)):
        assert_close(found[part], by_position(*(each[part] for each in own)))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("qwen3")
    write_model(directory)
    with quiet():
        return transformer_config(read_hf_config(directory), MegatronConfig(), dtype=torch.float32)


def layers(config: Any, *, is_fused: bool) -> tuple[GatedDeltaNet, Any]:
    """The layer and transformers' module, with the same weights."""
    keys, kind = KINDS[is_fused]
    block = DeltaNet(**{name: getattr(BLOCK, name) for name in BLOCK.__struct_fields__} | {"is_fused": is_fused})
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 5}
    sizes |= {"linear_value_head_dim": 7, "linear_conv_kernel_dim": 3, "hidden_size": config.hidden_size}
    torch.manual_seed(3)
    reference = kind(keys(**sizes, rms_norm_eps=config.layernorm_epsilon), 0)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        reference.A_log.uniform_(-1.0, 1.0)  # faster decays make large sums, which transformers rounds to float32
    built = GatedDeltaNet(config, 1, block=block, pg_collection=_Groups())
    state = dict(reference.named_parameters())
    with torch.no_grad():
        for weight in block.weights(config.hidden_size):
            built.get_parameter(weight.name).copy_(of_files(weight, {name: each.data for name, each in state.items()}))
    return built, reference


class _Groups:
    """The process groups that a layer is built with."""

    def __init__(self) -> None:
        self.tp = parallel_state.get_tensor_model_parallel_group()


def of_files(weight: Weight, state: dict[str, Tensor]) -> Tensor:
    """A tensor of the layer from those of the files."""
    if weight.is_stored_joined:
        rows = [shape[0] for shape in weight.parts.values()]
        parts = list(state[weight.joined].split(rows))
    else:
        parts = [state[part] for part in weight.parts]
    return torch.cat([part.unflatten(0, (weight.groups, -1)) for part in parts], dim=1).flatten(0, 1)


def out_of(built: GatedDeltaNet, hidden: Tensor, lengths: list[int] | None) -> Tensor:
    row = None if lengths is None else packing(np.cumsum([0, *lengths]).astype(np.int32), CPU)
    with quiet():
        return built(hidden, packed_seq_params=row)[0]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("is_fused", KINDS, ids=["rows of a key head together", "rows of all queries together"])
def test_outputs_and_gradients_are_those_of_transformers_module(config: Any, is_fused: bool, packed: bool) -> None:
    built, reference = layers(config, is_fused=is_fused)
    lengths = [20, 3, 1, 70] if packed else [33, 33]
    samples = [torch.randn(1, length, config.hidden_size) for length in lengths]
    hidden = torch.cat(samples, 1).transpose(0, 1) if packed else torch.cat(samples).transpose(0, 1)
    found = out_of(built, hidden.clone().requires_grad_(), lengths if packed else None)
    expected = torch.cat([reference(sample) for sample in samples], 1 if packed else 0).transpose(0, 1)
    assert_close(found, expected)
    along = torch.randn(expected.shape)
    (found * along).sum().backward()
    (expected * along).sum().backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for weight in built._block.weights(config.hidden_size):
        gradient = built.get_parameter(weight.name).grad
        assert gradient is not None
        assert gradient.any()
        assert_close(gradient, of_files(weight, gradients))


def merged(row: Row) -> Row:
    return Row(np.zeros_like(row.sequences), row.owners, np.arange(len(row.owners)), row.kept)


LEAKS: dict[str, Callable[[Chunks, Chunks], Chunks]] = {
    "state": lambda own, leaking: leaking._replace(earlier=own.earlier),
    "convolution": lambda own, leaking: own._replace(earlier=leaking.earlier),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_over_the_border_of_a_sample_changes_outputs(
    config: Any, monkeypatch: pytest.MonkeyPatch, leak: str
) -> None:
    built, _ = layers(config, is_fused=False)
    hidden, lengths = torch.randn(30, 1, config.hidden_size), [10, 8, 12]
    with torch.no_grad():
        alone = torch.cat([out_of(built, part, [len(part)]) for part in hidden.split(lengths)])
        assert_close(out_of(built, hidden, lengths), alone)
        of = Chunks.of
        monkeypatch.setattr(Chunks, "of", lambda row, device: LEAKS[leak](of(row, device), of(merged(row), device)))
        found = out_of(built, hidden, lengths)
    assert_close(found[:10], alone[:10])
    assert float((found - alone)[10:].abs().max()) > 1e-2 * float(alone.abs().max())


def test_a_filter_begins_with_the_prompt_that_samples_share() -> None:
    lengths, shared = units([(3, [2, 4])], 1)
    chunks = Chunks.of(Row.of(lengths, Context(), shared), CPU)
    assert chunks.earlier.tolist() == [9, 0, 1, 2, 3, 2, 5, 6, 7, 9]
    values, weight = torch.randn(9, 2), torch.randn(2, 4)
    found = convolved(values, weight, chunks)
    for own in ([0, 1, 2, 3, 4], [0, 1, 2, 5, 6, 7, 8]):
        behind = torch.nn.functional.pad(values[own].t()[None], (3, 0))
        expected = torch.nn.functional.conv1d(behind, weight[:, None], groups=2)[0].t()
        torch.testing.assert_close(found[own], expected)


def test_padding_between_samples_is_of_no_sample() -> None:
    shared = SharedPrompts(np.array([0, 1, 0, 1, 0, 1]), np.array([0, 0, PADDING, PADDING, 1, 1]), np.zeros(0), (), 0)
    chunks = Chunks.of(Row.of(np.array([4, 2]), Context(), shared), CPU)
    assert chunks.earlier.tolist() == [6, 0, 6, 2, 6, 4, 6]
