"""Tensors that come one by one: where they go, what is refused, and what a pickle may name."""

import base64
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.tiny_engine.model.forward import Weights, draw
from actors.tiny_engine.model.payloads import named_of
from actors.tiny_engine.model.receiving import flat_room, rooms, write
from runtime.models.config import read_tiny_engine_model
from tests.support.tiny_engine import write_config

QUERY = "model.layers.1.self_attn.q_proj.weight"


def weights_of(directory: Path, **changes: Any) -> Weights:
    write_config(directory, **changes)
    return draw(read_tiny_engine_model(directory).shape, seed=1, std=0.1, dtype="float32")


def payload(value: object) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def flattened(named: list[tuple[str, Tensor]]) -> dict[str, Any]:
    parts = [tensor.flatten().view(torch.uint8) for _, tensor in named]
    ends = torch.tensor([len(part) for part in parts]).cumsum(0).tolist()
    metadata = [
        SimpleNamespace(
            name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=end - len(part), end_idx=end, numel=len(part)
        )
        for (name, tensor), part, end in zip(named, parts, ends, strict=True)
    ]
    return {"flattened_tensor": torch.cat(parts), "metadata": metadata}


def test_tensors_are_written_into_the_fused_ones_that_the_forward_pass_sees(tmp_path: Path) -> None:
    held, sent = weights_of(tmp_path), weights_of(tmp_path)
    for tensor in sent.named.values():
        tensor.normal_()
    before = held.checksums()
    write(held, [(name, tensor.clone()) for name, tensor in sent.named.items()])
    sent.settle()
    assert held.checksums() == sent.checksums() != before
    scale, expected = held.layers[0].qk_scale, sent.layers[0].qk_scale  # derived from what came
    assert scale is not None
    assert expected is not None
    assert torch.equal(scale, expected)


def test_other_dtypes_become_the_one_that_is_held(tmp_path: Path) -> None:
    held = weights_of(tmp_path)
    sent = torch.randn(32).bfloat16()
    write(held, [("model.norm.weight", sent)])
    assert held.norm.dtype == torch.float32
    assert torch.equal(held.norm, sent.float())


def test_the_head_of_a_tied_model_is_its_embedding_whatever_else_comes(tmp_path: Path) -> None:
    held = weights_of(tmp_path, tie_word_embeddings=True)
    embedding = torch.randn(64, 32)
    write(held, [("model.embed_tokens.weight", embedding), ("lm_head.weight", torch.zeros(64, 32))])
    assert torch.equal(held.head, embedding)


def test_a_shape_that_the_model_has_not_is_refused_by_name(tmp_path: Path) -> None:
    held = weights_of(tmp_path)
    with pytest.raises(ValueError, match=r"q_proj.weight is \[3, 32\], the model has \[32, 32\]"):
        write(held, [(QUERY, torch.zeros(3, 32))])


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("foo.weight", False),
        (QUERY.replace("layers.1", "layers.9"), False),
        (QUERY.replace("weight", "bias"), False),
        (QUERY.replace("weight", "foo"), True),
    ],
)
def test_names_that_the_model_has_not_are_left_out_where_sglang_does(tmp_path: Path, name: str, refused: bool) -> None:
    held = weights_of(tmp_path)
    before = held.checksums()
    if refused:
        with pytest.raises(ValueError, match=name):
            write(held, [(name, torch.zeros(3))])
    else:
        write(held, [(name, torch.zeros(3))])
    assert held.checksums() == before


def test_a_bucket_is_room_in_one_piece_with_the_tensors_behind_one_another() -> None:
    flat, (first, second) = flat_room(["bfloat16", "float32"], [[2, 2], [3]])
    flat.copy_(torch.cat([torch.ones(4).bfloat16().view(torch.uint8), torch.arange(3.0).view(torch.uint8)]))
    assert first.tolist() == [[1, 1], [1, 1]]
    assert second.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: flat_room(["bfloat16", "float32"], [[1], [1]]), "Unaligned"),
        (lambda: flat_room([], []), "empty"),
        (lambda: rooms(["nn"], [[1]]), "dtype 'nn'"),
        (lambda: rooms(["float32"], [[-1]]), "Negative"),
    ],
)
def test_a_bucket_that_cannot_be_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_pickled_tensors_are_read(load_format: str | None) -> None:
    sent = [("a", torch.randn(2, 3)), ("b", torch.randn(4).bfloat16())]
    found = named_of(payload(flattened(sent) if load_format else sent), load_format)
    assert [name for name, _ in found] == ["a", "b"]
    assert all(torch.equal(tensor, other) for (_, tensor), (_, other) in zip(found, sent, strict=True))


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("evil",)


def test_a_pickle_that_names_anything_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="Blocked unsafe global"):
        named_of(payload([("a", Evil())]), None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("sent", "load_format"),
    [
        ("*", None),
        (payload(3), None),
        (payload([("a", 1)]), None),
        (payload([]), "direct"),
        (payload([]), "flattened_bucket"),
    ],
)
def test_a_payload_that_is_not_what_it_should_be_is_refused(sent: str, load_format: str | None) -> None:
    with pytest.raises(ValueError, match=r"unreadable|payload|load_format"):
        named_of(sent, load_format)
