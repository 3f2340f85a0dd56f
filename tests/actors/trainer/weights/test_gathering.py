"""Buckets of whole tensors, from the parts of tensor-parallel ranks. Across processes: tests/grid."""

from pathlib import Path

import pytest
import torch

from actors.trainer.models.config import HfConfig, read_hf_config
from actors.trainer.models.names import split_for_hf
from actors.trainer.models.shapes import hf_shapes
from actors.trainer.models.shards import entry_of
from actors.trainer.weights import gathering
from actors.trainer.weights.gathering import Part, buckets, own_parts, whole_entries, whole_tensors
from tests.actors.trainer.hf import write_model
from tests.actors.trainer.models.test_model_parity import load
from tests.actors.trainer.tiny import kinds

CPU = torch.device("cpu")


@pytest.fixture
def hf(tmp_path: Path) -> HfConfig:
    write_model(tmp_path)
    return read_hf_config(tmp_path)


def tensors(*sizes: int) -> list[tuple[gathering.Entry, torch.Tensor]]:
    made = [(str(number), torch.zeros(size, dtype=torch.bfloat16)) for number, size in enumerate(sizes)]
    return [(entry_of(name, tensor), tensor) for name, tensor in made]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([3], [["0"]]),
        ([5, 5, 1], [["0", "1"], ["2"]]),
        ([1, 11, 1, 9], [["0"], ["1"], ["2", "3"]]),  # a larger one alone; the last bucket is not full
        ([11, 12], [["0"], ["1"]]),
    ],
)
def test_buckets_hold_at_most_so_many_bytes(sizes: list[int], expected: list[list[str]]) -> None:
    found = list(buckets(tensors(*sizes), 20))
    assert [[name for name, _ in bucket] for bucket in found] == expected


def test_ranks_that_get_no_tensors_go_through_as_many_buckets() -> None:
    nothing = [(entry, None) for entry, _ in tensors(5, 5, 1, 30)]
    assert list(buckets(nothing, 20)) == [[], [], []]


@pytest.mark.parametrize(("kind", "tied"), [*((kind, False) for kind in kinds()), ("qwen3", True)])
def test_what_is_planned_is_what_comes(tmp_path: Path, kind: str, tied: bool) -> None:
    write_model(tmp_path, kind, tied=tied)
    built, model = load(tmp_path)
    parts = own_parts([built], model)
    planned = whole_entries(parts, model)
    came = list(whole_tensors(parts, model, CPU))
    assert planned == [entry for entry, _ in came] == [entry_of(entry.name, tensor) for entry, tensor in came]
    assert {entry.name: entry.shape for entry in planned} == hf_shapes(model)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "glm4"])
def test_parts_of_all_ranks_are_joined_to_the_whole(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, kind)
    built, model = load(tmp_path)
    for name, parameter in built.named_parameters():
        if any(kind in name for kind in ("linear_qkv", "linear_proj", "linear_fc1", "embedding")):
            dim = 1 if "linear_proj" in name else 0
            pieces = parameter.data.chunk(2, dim=dim)
            if "linear_fc1" in name:  # each rank has its part of the gates and of the values
                pieces = [piece.flatten(0, 1) for piece in parameter.data.unflatten(0, (2, -1)).chunk(2, dim=1)]
            monkeypatch.setattr(gathering, "_collected", lambda *_, pieces=pieces: torch.stack(pieces))
            part = Part((name,), pieces[0], dim, 2, None)
            found = {entry.name: tensor for entry, tensor in whole_tensors([part], model, CPU)}
            expected = dict(split_for_hf(name, model, parameter.data))
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_experts_of_other_ranks_have_names_of_their_own(hf: HfConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with other experts, of each of which two ranks have a half."""
    names = ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.mlp.linear_fc1.weight")
    wholes = [torch.randn(2 * hf.intermediate_size, hf.hidden_size) for _ in names]
    halves = [
        [torch.cat(pair) for pair in zip(*(half.chunk(2) for half in whole.chunk(2)), strict=True)] for whole in wholes
    ]
    monkeypatch.setattr(gathering, "_collected", lambda *_: torch.stack([half for pair in halves for half in pair]))
    found = dict(whole_tensors([Part(names, halves[0][0], 0, 2, None)], hf, CPU))
    assert {entry.name: entry.shape for entry in found} == {
        f"model.layers.{layer}.mlp.{kind}_proj.weight": (hf.intermediate_size, hf.hidden_size)
        for layer in (0, 1) for kind in ("gate", "up")
    }  # fmt: skip
    for layer, whole in enumerate(wholes):
        kinds = zip(("gate", "up"), whole.chunk(2), strict=True)
        for kind, expected in kinds:
            (tensor,) = [tensor for entry, tensor in found.items() if f"{layer}.mlp.{kind}" in entry.name]
            assert tensor is not None
            assert torch.equal(tensor, expected)


def test_rows_that_fill_up_a_vocabulary_are_cut_off(hf: HfConfig) -> None:
    filled = torch.randn(hf.vocab_size + 96, hf.hidden_size)
    part = Part(("embedding.word_embeddings.weight",), filled, 0, 1, None)
    (entry,) = whole_entries([part], hf)
    ((_, tensor),) = whole_tensors([part], hf, CPU)
    assert tensor is not None
    assert entry.shape == tuple(tensor.shape) == (hf.vocab_size, hf.hidden_size)
    assert torch.equal(tensor, filled[: hf.vocab_size])
