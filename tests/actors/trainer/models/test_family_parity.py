"""Each family against transformers' class, on a tiny configuration whose keys differ from the defaults.

All parameters and expert biases have noise, without which a wrong norm or bias would change nothing. Samples of a
packed row are compared with the output of transformers for each sample alone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from actors.trainer.data.batch import make_micro_batch
from actors.trainer.data.prompts import make_shared_micro_batch, units_of
from actors.trainer.megatron.imports import quiet
from actors.trainer.megatron.layers.blockwise import Row
from actors.trainer.megatron.layers.rows import packing
from actors.trainer.models.config import HfConfig
from actors.trainer.models.names import split_for_hf
from actors.trainer.models.shapes import frozen_names, hf_shapes
from actors.trainer.models.sharding import global_name, tensors_of
from actors.trainer.models.shards import entry_of
from actors.trainer.weights.gathering import stacked
from tests.actors.trainer.hf import gradients_of, whole_weights, write_model
from tests.actors.trainer.models.test_model_parity import load
from tests.actors.trainer.tiny import OF_KIND, VOCAB, kinds, random_batch, with_prompts

EVERY = pytest.mark.parametrize("kind", kinds())
NOISE = 0.2
CLOSE = 1e-5  # of the largest value

Written = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Write a family's tiny model; also return transformers' model."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(kind: str) -> tuple[Path, Any]:
        if kind not in made:
            directory, tied = tmp_path_factory.mktemp(kind), OF_KIND.get(kind, {}).get("tie_word_embeddings", False)
            made[kind] = directory, write_model(directory, kind, tied=tied, noise=NOISE)
        return made[kind]

    return make


def assert_close(found: Tensor, expected: Tensor, scale: Tensor | None = None) -> None:
    largest = (expected if scale is None else scale).abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE * largest)


def own_gradients(built: Any, hf: HfConfig) -> dict[str, Tensor]:
    """The gradients of a model by the names of the files."""
    parts = (
        (entry_of(hf_name, part), part)
        for name, parameter in tensors_of(built)
        if parameter.requires_grad and not (name == "output_layer.weight" and hf.tie_word_embeddings)
        for hf_name, part in split_for_hf(global_name(name, built), hf, parameter.grad)
    )
    return {entry.name: gradient for entry, gradient in stacked(parts, hf) if gradient is not None}


@EVERY
def test_logits_and_gradients_equal_those_of_transformers(kind: str, written: Written) -> None:
    directory, reference = written(kind)
    built, hf = load(directory)
    generator = torch.Generator().manual_seed(0)
    tokens, weights = (
        torch.randint(0, VOCAB, (3, 17), generator=generator),
        torch.randn(3, 17, VOCAB, generator=generator),
    )
    reference.zero_grad()
    expected = reference(tokens).logits
    with quiet():
        found = built(tokens, None, None)
        (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert expected.std() >= 1
    assert_close(found, expected)
    ours, theirs = own_gradients(built, hf), gradients_of(reference)
    frozen = frozen_names(hf)
    assert ours.keys() == {name for name in theirs if not name.endswith("e_score_correction_bias")} - frozen
    assert not any(theirs[name].any() for name in frozen)
    assert all(gradient.any() for gradient in ours.values())
    for name, gradient in ours.items():
        assert_close(gradient, theirs[name])


@EVERY
def test_weights_come_back_bit_for_bit(kind: str, written: Written) -> None:
    directory, _ = written(kind)
    reference = load_file(directory / "model.safetensors")
    built, hf = load(directory)
    exported = whole_weights([built], hf)
    assert {name: tuple(tensor.shape) for name, tensor in exported.items()} == hf_shapes(hf)
    assert all(torch.equal(tensor, reference[name]) for name, tensor in exported.items())
    assert set(reference) == set(exported)


def packed_and_alone(directory: Path, reference: Any, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Logits of the samples of a packed row, and transformers' of each sample alone."""
    built, _ = load(directory)
    batch, samples = random_batch(), np.arange(7)
    packed = make_micro_batch(batch, samples, packed=True, multiple=multiple)
    layout = packing(packed.bounds, torch.device("cpu"))
    assert packed.bounds is not None
    with quiet(), torch.no_grad():
        found = built(torch.from_numpy(packed.tokens), None, None, packed_seq_params=layout)[0]
        ours, alone = list[Tensor](), list[Tensor]()
        for sample, start in zip(samples.tolist(), packed.bounds.tolist(), strict=False):
            first, length = int(batch.starts_B[sample]), int(batch.lengths_B[sample])
            tokens = torch.from_numpy(batch.tokens_N[first : first + length - 1].astype(np.int64))
            row = torch.from_numpy(packed.tokens[0, start : start + length - 1])
            assert torch.equal(row, tokens)
            ours.append(found[start : start + length - 1])
            alone.append(reference(tokens[None]).logits[0])
    return torch.cat(ours), torch.cat(alone)


@EVERY
@pytest.mark.parametrize("multiple", [1, 8])
def test_samples_of_a_packed_row_equal_each_sample_alone(kind: str, multiple: int, written: Written) -> None:
    assert_close(*packed_and_alone(*written(kind), multiple))


@EVERY
def test_samples_behind_one_prompt_equal_each_sample_alone(kind: str, written: Written) -> None:
    directory, reference = written(kind)
    built, _ = load(directory)
    batch = with_prompts(random_batch(num_groups=2))
    units = units_of(batch, np.arange(len(batch.lengths_B)), max_tokens=1000, attention=0.0)
    shared = make_shared_micro_batch(batch, units, multiple=1)
    layout = packing(shared.bounds, torch.device("cpu"), shared.shared)
    assert len(units) < len(batch.lengths_B)
    with quiet(), torch.no_grad():
        found = built(torch.from_numpy(shared.tokens), None, None, packed_seq_params=layout)[0]
        alone = list[Tensor]()
        for column in shared.columns_M.tolist():
            first = int(batch.starts_B[np.searchsorted(batch.starts_B, column, side="right") - 1])
            tokens = torch.from_numpy(batch.tokens_N[first:column].astype(np.int64))
            alone.append(reference(tokens[None]).logits[0, -1])
    assert_close(found[torch.from_numpy(shared.rows_M)], torch.stack(alone))


@EVERY
def test_a_row_in_which_samples_see_each_other_is_found(
    kind: str, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = Row.of
    monkeypatch.setattr(Row, "of", lambda lengths, *others: of(lengths.sum(keepdims=True), *others))
    found, expected = packed_and_alone(*written(kind))
    assert (found - expected).abs().max() > 1e-2 * expected.abs().max()
