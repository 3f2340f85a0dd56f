"""Head and embedding add their gradients to Megatron's gradient buffer, and make no other ones of that size."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.trainer.algorithms import log_probs
from actors.trainer.data.batch import make_micro_batch
from actors.trainer.megatron.imports import VocabParallelEmbedding
from actors.trainer.megatron.layers.head import Embedding, Head
from actors.trainer.megatron.rank_model import Replica
from runtime.settings.topology import Topology
from tests.actors.trainer.tiny import TINY, VOCAB, random_batch
from tests.build.topology import MakeTopology


def gradients(topology: Topology) -> tuple[dict[str, Tensor], int]:
    """Of two micro-batches, by name; and how many tensors of zeros like the head's weight were made for them."""
    replica, made = Replica(topology, torch.device("cpu")), list[tuple[int, ...]]()
    right = torch.zeros_like

    def zeros(like: Tensor, **options: Any) -> Tensor:
        made.append(tuple(like.shape))
        return right(like, **options)

    batch = random_batch()
    micro_batches = [make_micro_batch(batch, np.arange(begin, begin + 6), packed=False) for begin in (0, 6)]
    with mock.patch.object(log_probs.torch, "zeros_like", zeros):
        replica.backward(micro_batches, lambda _, outputs: (outputs.log_probs + 0.1 * outputs.entropy).sum())
    found = {name: parameter.main_grad.clone() for name, parameter in replica.chunks[0].named_parameters()}
    return found, made.count((VOCAB, TINY["hidden_size"]))


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_gradient_of_the_output_weight_is_that_of_autograd(
    make_topology: MakeTopology, model_dir: Path, tied: bool, dtype: str, overlap: bool
) -> None:
    (model_dir / "config.json").write_text(json.dumps(TINY | {"tie_word_embeddings": tied}))
    topology = make_topology(
        model={"hf_checkpoint": str(model_dir), "random_init": True, "dtype": dtype},
        trainer={"ddp": {"overlap_grad_reduce": overlap}},
    )
    found, num_zeros = gradients(topology)
    with mock.patch.object(
        Head, "_accumulating", lambda head, shared: (head.weight if shared is None else shared, None)
    ):
        expected, by_autograd = gradients(topology)
    assert (num_zeros, by_autograd) == (0, 2)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_gradient_of_the_embedding_is_that_of_autograd(
    make_topology: MakeTopology, model_dir: Path, tied: bool, dtype: str, overlap: bool
) -> None:
    """Only a reduction that overlaps waits for autograd's own gradient, which has a row for each token."""
    (model_dir / "config.json").write_text(json.dumps(TINY | {"tie_word_embeddings": tied, "vocab_size": 4096}))
    topology = make_topology(
        model={"hf_checkpoint": str(model_dir), "random_init": True, "dtype": dtype},
        trainer={"ddp": {"overlap_grad_reduce": overlap}},
    )
    right, passes = Embedding.forward, list[bool]()

    def forward(layer: Any, tokens: Tensor) -> Tensor:
        rows = right(layer, tokens)
        passes.append("_Embedded" in type(rows.grad_fn).__name__)
        return rows

    with mock.patch.object(Embedding, "forward", forward):
        found, _ = gradients(topology)
    assert passes == [not overlap] * 2
    with mock.patch.object(Embedding, "forward", VocabParallelEmbedding.forward):
        expected, _ = gradients(topology)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance, msg=name)
    assert any(name.endswith("word_embeddings.weight") and one.count_nonzero() for name, one in found.items())
