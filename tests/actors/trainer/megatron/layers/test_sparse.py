"""Sparse attention (DSA) against transformers' modules: choices first, with margins that rounding cannot flip."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.trainer.data.batch import make_micro_batch
from actors.trainer.megatron.checkpoint import load_checkpoint
from actors.trainer.megatron.imports import quiet
from actors.trainer.megatron.layers.rows import packing
from actors.trainer.megatron.layers.sparse import Indexer
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.models.layout import check_layout
from actors.trainer.models.shapes import frozen_names
from actors.trainer.models.sharding import global_name, tensors_of
from actors.trainer.step.train_step import TrainStep
from runtime.models.delta import read_index
from runtime.settings.tables.trainer import MegatronConfig
from tests.actors.trainer.hf import whole_weights, write_model
from tests.actors.trainer.models.test_model_parity import load
from tests.actors.trainer.tiny import VOCAB, random_batch
from tests.actors.trainer.weights.test_delta import delta_of, forms, published
from tests.build.topology import MakeTopology
from tests.support.checkpoint_tensors import tensors_of as tensors_in
from tests.support.checkpoints import save_checkpoint

KINDS = ("deepseek_v32", "glm_moe_dsa")
LENGTH, TOPK = 24, 4
MARGIN = 1e-4  # between the last score that is chosen and the next, of the largest
EVERY = pytest.mark.parametrize("kind", KINDS)
RATE = 1e-2  # by which the biases of experts change


def exported(replica: Replica) -> dict[str, Tensor]:
    """The weights that an export has."""
    return {name: tensor.clone() for name, tensor in whole_weights(replica.complete_chunks(), replica.hf).items()}


def choices_of(reference: Any, tokens: Tensor) -> tuple[list[Tensor], float]:
    """The masks [b, s, s] of transformers' indexers for queries with keys to choose from, and the least margin."""
    found, margins, topk = list[Tensor](), list[float](), torch.Tensor.topk

    def watched(scores: Tensor, number: int, dim: int = -1) -> Any:
        if scores.size(-1) == tokens.size(1) and number == TOPK:
            best = topk(scores[:, number:], number + 1, dim=dim).values
            margins.append(float((best[..., -2] - best[..., -1]).min() / best[best.isfinite()].abs().max()))
        return topk(scores, number, dim=dim)

    def record(_module: Any, _inputs: Any, chosen: Tensor) -> None:
        mask = torch.zeros(*chosen.shape[:2], tokens.size(1), dtype=torch.bool).scatter(-1, chosen.long(), True)
        found.append(mask & torch.ones(mask.shape[1:], dtype=torch.bool).tril())

    indexers = [module for module in reference.modules() if type(module).__name__.endswith("Indexer")]
    hooks = [module.register_forward_hook(record) for module in indexers]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.Tensor, "topk", watched)
        reference(tokens)
    for hook in hooks:
        hook.remove()
    return found, min(margins)


def masks_of(built: Any, run: Any, batch: int, length: int) -> list[Tensor]:
    """The masks of the own indexers in a forward pass, [b, s, s]."""
    found = list[Tensor]()

    def record(_module: Any, _inputs: Any, plans: Any) -> None:
        mask = torch.zeros(batch, length, length, dtype=torch.bool)
        for index, plan in enumerate(plans):
            for pair in plan:
                mask[index, pair.queries, pair.keys] = pair.mask
        found.append(mask)

    hooks = [each.register_forward_hook(record) for each in built.modules() if isinstance(each, Indexer)]
    with quiet(), torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return found


@EVERY
def test_the_same_keys_are_chosen_and_without_a_choice_logits_differ(kind: str, tmp_path: Path) -> None:
    reference = write_model(tmp_path, kind, noise=0.2)
    built, _ = load(tmp_path)
    tokens = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    expected, margin = choices_of(reference, tokens)
    assert margin > MARGIN
    found = masks_of(built, lambda: built(tokens, None, None), *tokens.shape)
    assert len(found) == len(expected) == (2 if kind == "deepseek_v32" else 1)
    assert all(torch.equal(own, theirs) for own, theirs in zip(found, expected, strict=True))
    assert all(mask.sum(-1).max() == TOPK for mask in found)
    changed = tmp_path / "all"
    changed.mkdir()
    everything = write_model(changed, kind, noise=0.2, index_topk=LENGTH)
    with torch.no_grad():
        assert (everything(tokens).logits - reference(tokens).logits).abs().max() > 1e-3


@EVERY
def test_samples_of_a_packed_row_choose_among_their_own_keys(kind: str, tmp_path: Path) -> None:
    reference = write_model(tmp_path, kind, noise=0.2)
    built, _ = load(tmp_path)
    batch, samples = random_batch(), np.arange(7)
    packed = make_micro_batch(batch, samples, packed=True, multiple=1)
    assert packed.bounds is not None
    row, tokens = packing(packed.bounds, torch.device("cpu")), torch.from_numpy(packed.tokens)
    found = masks_of(built, lambda: built(tokens, None, None, packed_seq_params=row), 1, tokens.size(1))
    for start, end in zip(packed.bounds.tolist(), packed.bounds.tolist()[1:], strict=False):
        outside = found[0][0, start:end].clone()
        outside[:, start:end] = False
        assert not outside.any()
        if end - start > TOPK:
            alone, margin = choices_of(reference, tokens[:, start:end])
            assert margin > MARGIN
            assert torch.equal(found[0][0, start:end, start:end], alone[0][0])


@EVERY
def test_the_indexer_is_frozen_and_named_so(kind: str, tmp_path: Path) -> None:
    write_model(tmp_path, kind)
    built, hf = load(tmp_path)
    without = {global_name(name, built) for name, each in tensors_of(built) if not each.requires_grad}
    assert {name for name in without if "expert_bias" not in name} == {
        name.replace("model.layers.", "decoder.layers.").replace("self_attn", "self_attention")
        for name in frozen_names(hf)
    }
    assert len(frozen_names(hf)) == (10 if kind == "deepseek_v32" else 5)


@pytest.mark.parametrize("kind", [pytest.param("deepseek_v32", marks=pytest.mark.nightly), "glm_moe_dsa"])
def test_a_frozen_indexer_is_the_same_in_checkpoint_export_and_delta(
    kind: str, make_topology: MakeTopology, tmp_path: Path
) -> None:
    """All other weights change by the step. Biases of experts change by their rate alone."""
    write_model(tmp_path / "weights", kind, noise=0.2)
    topology = make_topology(
        model={"hf_checkpoint": str(tmp_path / "weights"), "random_init": False},
        algorithm={"num_steps_per_rollout": 1},
        trainer={"megatron": {"moe_router_bias_update_rate": RATE}},
    )
    replica = Replica(topology, torch.device("cpu"))
    before, frozen = exported(replica), frozen_names(replica.hf)
    TrainStep(topology, replica)(random_batch())
    after = exported(replica)
    assert {name for name, tensor in after.items() if torch.equal(tensor, before[name])} == frozen
    biases = [name for name in after if name.endswith("e_score_correction_bias")]
    steps = torch.cat([(after[name] - before[name]) / RATE for name in biases])
    torch.testing.assert_close(steps, steps.sign(), rtol=0, atol=1e-3)

    base = published(tmp_path, 1, before)
    found = forms(read_index(delta_of(tmp_path, base, 2, after)))
    assert {name for name, form in found.items() if form == "unchanged"} == frozen

    path = save_checkpoint(replica, tmp_path, step=1, incarnation=1)
    assert not [name for name in tensors_in(path) if name.startswith("optimizer") and ".indexer." in name]
    assert [name for name in tensors_in(path) if name.startswith("optimizer") and ".linear_proj." in name]
    resumed = Replica(topology, torch.device("cpu"))
    load_checkpoint(resumed, path)
    assert all(torch.equal(tensor, after[name]) for name, tensor in exported(resumed).items())


REFUSED = {
    "CP": ({"context_parallel_size": 2}, "context_parallel_size = 2: not supported for sparse attention"),
    "a shared choice": (
        {"pipeline_model_parallel_size": 2},
        "stage that begins with layer 1, which sees the keys that layer 0 of another stage chooses",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layout_that_is_not_supported_is_refused_by_name(name: str, tmp_path: Path) -> None:
    sizes, message = REFUSED[name]
    write_model(tmp_path, "glm_moe_dsa")
    _, hf = load(tmp_path)
    with pytest.raises(ValueError, match=message):
        check_layout(hf, MegatronConfig(**sizes))
