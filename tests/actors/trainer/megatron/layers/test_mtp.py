"""The layer for the token after the next one, against one that is put together of transformers' parts."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.trainer.data.batch import TrainBatch
from actors.trainer.megatron.build import build_chunks
from actors.trainer.megatron.config import transformer_config
from actors.trainer.megatron.imports import quiet
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.models.config import HfConfig, read_hf_config
from actors.trainer.models.files import file_source, random_source
from actors.trainer.models.names import split_for_hf
from actors.trainer.models.shapes import hf_shapes
from actors.trainer.models.sharding import global_name, load_weights
from actors.trainer.preflight import weight_problems
from actors.trainer.step.train_step import TrainStep
from runtime.models.safetensors import SINGLE_FILE
from runtime.settings.tables.trainer import MegatronConfig
from runtime.settings.topology import Topology
from tests.actors.trainer.hf import state_of, whole_weights, write_mtp_model
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import MakeTopology

CPU = torch.device("cpu")
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OWN = "model.layers.2."  # the decoder has two layers
COPIES = (f"{OWN}embed_tokens.weight", f"{OWN}shared_head.head.weight")


def topology_of(make_topology: MakeTopology, directory: Path, *, packed: bool = False, **settings: Any) -> Topology:
    per_token = settings.pop("per_token", False)
    return make_topology(
        model={"hf_checkpoint": str(directory), "random_init": False},
        algorithm={
            "num_steps_per_rollout": 1,
            "reduction": {"type": "token-mean" if per_token else "rollout-mean"},
            "get_mismatch_metrics": True,  # every sample is passed, with the layer and without
        },
        rollout={"temperature": 0.8},
        train={"max_tokens_per_gpu": 60},
        trainer={"packed": packed, "megatron": settings},
    )


def trained(topology: Topology) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The metrics of an optimizer step, and its gradient by Hugging Face name before it is clipped."""
    replica = Replica(topology, CPU)
    found: dict[str, Tensor] = {}
    move, (chunk,) = replica.optimizer_step, replica.chunks

    def look(**arguments: float) -> float:
        for name, parameter in chunk.named_parameters():
            parts = split_for_hf(global_name(name, chunk), replica.hf, parameter.main_grad.clone())
            found.update((hf_name, part) for hf_name, part in parts if hf_name not in COPIES)
        return move(**arguments)

    replica.optimizer_step = look  # pyright: ignore[reportAttributeAccessIssue]
    metrics = TrainStep(topology, replica)(random_batch()).metrics
    return metrics, found


def expected_loss(model: Any, own: dict[str, Tensor], batch: TrainBatch) -> Tensor:
    """The mean cross-entropy of tokens that train, each two behind what is read last, one sample at a time."""
    inner, losses = model.model, []
    for start, length in zip(batch.starts_B.tolist(), batch.lengths_B.tolist(), strict=True):
        tokens = torch.from_numpy(batch.tokens_N[start : start + length]).long()[None]
        mask = torch.from_numpy(batch.loss_mask_N[start : start + length]).bool()
        if length < 3:
            continue
        rotary = inner.rotary_emb(inner.embed_tokens(tokens), torch.arange(length)[None])
        hidden = inner.embed_tokens(tokens)
        for layer in inner.layers[:-1]:
            hidden = layer(hidden, position_embeddings=rotary, attention_mask=None)
        hidden = normed(inner.norm(hidden).detach()[:, :-1], own["hnorm.weight"])
        embedded = normed(inner.embed_tokens(tokens[:, 1:]).detach(), own["enorm.weight"])
        hidden = torch.cat([embedded, hidden], dim=-1) @ own["eh_proj.weight"].t()
        shorter = tuple(part[:, :-1] for part in rotary)
        hidden = inner.layers[-1](hidden, position_embeddings=shorter, attention_mask=None)
        logits = normed(hidden, own["shared_head.norm.weight"]) @ model.lm_head.weight.detach().t()
        losses.append(F.cross_entropy(logits[0, :-1], tokens[0, 2:], reduction="none")[mask[2:]])
    return torch.cat(losses).mean()


def normed(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(hidden, (hidden.size(-1),), weight, eps=1e-6)


def gradients_of(model: Any, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """By Hugging Face name, of the MTP layer; transformers has its experts in one tensor."""
    of_gradients = deepcopy(model)
    for copy, parameter in zip(of_gradients.parameters(), model.parameters(), strict=True):
        copy.data = torch.zeros_like(copy) if parameter.grad is None else parameter.grad
    state = {name: tensor for name, tensor in state_of(of_gradients).items() if name.startswith(OWN)}
    return state | {f"{OWN}{name}": tensor.grad for name, tensor in own.items() if tensor.grad is not None}


FORMS: dict[str, dict[str, Any]] = {
    "mean of samples": {},
    "mean of tokens": {"per_token": True},
    "packed": {"packed": True},
    "recomputed": FULL,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_loss_and_gradient_are_those_of_transformers_parts(
    make_topology: MakeTopology, tmp_path: Path, form: dict[str, Any]
) -> None:
    """In both reductions alike: the loss is a mean over the tokens that it is of."""
    model, own = write_mtp_model(tmp_path / "hf")
    for tensor in own.values():
        tensor.requires_grad_()
    loss = expected_loss(model, own, random_batch())
    (0.3 * loss).backward()
    expected = gradients_of(model, own)
    mtp = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3}
    metrics, found = trained(topology_of(make_topology, tmp_path / "hf", **mtp, **form))
    assert metrics["train/mtp_loss"] == pytest.approx(loss.item(), abs=1e-5)
    of_layer = {name: gradient for name, gradient in found.items() if name.startswith(OWN)}
    expected = {name: gradient for name, gradient in expected.items() if not name.endswith("correction_bias")}
    assert of_layer.keys() == expected.keys()
    assert expected[f"{OWN}eh_proj.weight"].norm() > 1e-2
    for name, gradient in expected.items():
        torch.testing.assert_close(of_layer[name], gradient, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("per_token", [False, True])
def test_the_policys_loss_and_gradient_are_those_without_the_layer(
    make_topology: MakeTopology, tmp_path: Path, per_token: bool
) -> None:
    write_mtp_model(tmp_path / "hf")
    plain, gradient = trained(topology_of(make_topology, tmp_path / "hf", per_token=per_token))
    metrics, found = trained(topology_of(make_topology, tmp_path / "hf", per_token=per_token, mtp_num_layers=1))
    assert "train/mtp_loss" not in plain
    assert metrics["train/loss"] == plain["train/loss"]
    assert not any(name.startswith(OWN) for name in gradient)
    assert [name for name, tensor in gradient.items() if not torch.equal(tensor, found[name])] == []


def loaded(directory: Path, megatron: MegatronConfig) -> tuple[Any, HfConfig]:
    hf = read_hf_config(directory, megatron.mtp_num_layers)
    with quiet():
        (built,) = build_chunks(hf, transformer_config(hf, megatron, dtype=torch.float32))
    load_weights(built, hf, file_source(directory))
    return built, hf


def test_weights_come_back_bit_for_bit(tmp_path: Path) -> None:
    """And without the setting the layer is left out."""
    write_mtp_model(tmp_path)
    reference = load_file(tmp_path / SINGLE_FILE)
    built, hf = loaded(tmp_path, MegatronConfig(mtp_num_layers=1))
    exported = whole_weights([built], hf)
    assert {name: tuple(tensor.shape) for name, tensor in exported.items()} == hf_shapes(hf)
    assert exported.keys() == reference.keys()
    assert all(torch.equal(tensor, reference[name]) for name, tensor in exported.items())
    built, hf = loaded(tmp_path, MegatronConfig())
    assert whole_weights([built], hf).keys() == {name for name in reference if not name.startswith(OWN)}


def test_a_layer_is_drawn_with_the_models_embedding_and_head(tmp_path: Path) -> None:
    write_mtp_model(tmp_path)
    hf = read_hf_config(tmp_path, 1)
    drawn = random_source(hf, 1)
    for copy, name in zip(COPIES, ("model.embed_tokens.weight", "lm_head.weight"), strict=True):
        assert torch.equal(drawn(copy), drawn(name))
    assert drawn(f"{OWN}eh_proj.weight").std() > 0


def test_weights_without_the_layer_are_refused(make_topology: MakeTopology, tmp_path: Path) -> None:
    """By --check and by the trainer; its copies of embedding and head need not be there."""
    write_mtp_model(tmp_path / "hf")
    file, shape = tmp_path / "hf" / SINGLE_FILE, read_hf_config(tmp_path / "hf", 1)
    state = {name: tensor for name, tensor in load_file(file).items() if name not in COPIES}
    save_file(state, file)
    assert list(weight_problems("model.hf_checkpoint", str(tmp_path / "hf"), shape)) == []
    save_file({name: tensor for name, tensor in state.items() if not name.startswith(OWN)}, file)
    (problem,) = weight_problems("model.hf_checkpoint", str(tmp_path / "hf"), shape)
    assert "trainer.megatron.mtp_num_layers = 1 trains a layer that these weights lack" in str(problem)
    with pytest.raises(ValueError, match=r"has no tensor model\.layers\.2\."):
        Replica(topology_of(make_topology, tmp_path / "hf", mtp_num_layers=1), CPU)


def test_a_model_without_the_layer_is_refused(model_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"mtp_num_layers = 1, and the model has 0 MTP layers"):
        read_hf_config(model_dir, 1)
