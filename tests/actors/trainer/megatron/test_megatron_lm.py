"""A run begins from a directory as Megatron-LM's saving code lays it out.

The directories are written here with Megatron-core's own dist_checkpointing; none of another program could be had. The
model in them is Megatron's stock GPTModel, whose weights come from transformers' by a map of this file.
"""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from actors.trainer.commands import TrainerRank
from actors.trainer.megatron.checkpoint import fill_optimizer_state, leaves
from actors.trainer.megatron.config import transformer_config
from actors.trainer.megatron.imports import GPTModel, dist_checkpointing, quiet
from actors.trainer.megatron.megatron_lm import ALIKE
from actors.trainer.megatron.saving import SaveInProcess
from actors.trainer.models.config import read_hf_config
from runtime.settings.tables.trainer import MegatronConfig
from tests.actors.trainer.hf import whole_weights, write_model
from tests.actors.trainer.tiny import TINY, VOCAB, random_batch
from tests.build.topology import MakeTopology

# of Megatron's distributed optimizer
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
ITERATION = 10
PADDED = 128  # rows of the vocabulary: Megatron-LM's --make-vocab-size-divisible-by
FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}
DISTRIBUTED = {"optimizer": {"use_distributed_optimizer": True}}


def save(root: Path, state: dict[str, Any], *, kind: str | None = None) -> Path:
    """Write what save_checkpoint of Megatron-LM does beside the model: into iter_0000010, and the tracker."""
    path = root / f"iter_{ITERATION:07d}"
    path.mkdir(parents=True)
    beside = {
        "args": Namespace(hidden_size=TINY["hidden_size"], iteration=ITERATION, use_dist_ckpt=True),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "opt_param_scheduler": {"max_lr": 1e-4, "num_steps": 320},
        "rng_state": ShardedObject("rng_state", [{"torch_rng_state": torch.get_rng_state()}], (1, 1), (0, 0)),
        "num_floating_point_operations_so_far": 0,
    }
    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    content |= {} if kind is None else {"distrib_optim_sharding_type": kind}
    with quiet():
        writer = SaveInProcess(FileSystemWriter(path))
        dist_checkpointing.save({**beside, **state}, str(path), writer, content_metadata=content)
    (root / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    return path


def stock_model(directory: Path, weights: dict[str, Tensor]) -> Any:
    """Megatron's GPTModel by its own specification, with the weights of a model of transformers."""
    hf = read_hf_config(directory)
    config = transformer_config(hf, MegatronConfig(), dtype=torch.float32)
    with quiet():
        built = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
            vocab_size=PADDED,
            max_sequence_length=hf.max_position_embeddings,
            share_embeddings_and_output_weights=hf.tie_word_embeddings,
            position_embedding_type="rope",
        )
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            parameter.copy_(mapped(name, weights))
    return built


def mapped(name: str, hf: dict[str, Tensor]) -> Tensor:
    """A tensor of GPTModel. Rows of its linear_qkv are groups: their queries, their key, their value."""
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        rows = hf["model.embed_tokens.weight" if name.startswith("embedding") else "lm_head.weight"]
        return torch.cat([rows, torch.full((PADDED - VOCAB, rows.shape[1]), 7.0)])
    if name == "decoder.final_layernorm.weight":
        return hf["model.norm.weight"]
    _, _, layer, *rest = name.split(".")
    part, prefix = ".".join(rest), f"model.layers.{layer}"
    if part == "self_attention.linear_qkv.weight":
        heads = [hf[f"{prefix}.self_attn.{one}_proj.weight"].unflatten(0, (2, -1)) for one in "qkv"]  # 2 groups
        return torch.cat(heads, dim=1).flatten(0, 1)
    if part == "mlp.linear_fc1.weight":
        return torch.cat([hf[f"{prefix}.mlp.gate_proj.weight"], hf[f"{prefix}.mlp.up_proj.weight"]])
    alike = {
        "input_layernorm.weight": "input_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    }
    return hf[f"{prefix}.{alike[part]}"]


def described(model: Any, *, local: bool = False, stacked: bool = True) -> dict[str, Any]:
    """The model as Megatron-LM saves it: of TransformerEngine's layers, or of the local ones."""
    state: dict[str, Any] = model.sharded_state_dict(metadata={"non_homogeneous_layers": not stacked})
    for leaf in leaves(state):
        for engine, own in ALIKE.items() if local else ():
            leaf.key = leaf.key.replace(engine, own)
    if not local:
        state["extra"] = ShardedObject("decoder.layers.self_attention.core_attention._extra_state", None, (1,), (0,))
    return state


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "one by one"])
@pytest.mark.parametrize("local", [False, True], ids=["TransformerEngine", "local"])
def test_weights_are_those_of_the_directory(
    make_topology: MakeTopology, model_dir: Path, tmp_path: Path, local: bool, stacked: bool, tied: bool
) -> None:
    weights = {name: value.detach() for name, value in write_model(model_dir, tied=tied).state_dict().items()}
    save(tmp_path / "lm", {"model": described(stock_model(model_dir, weights), local=local, stacked=stacked)})
    trainer = {"load": str(tmp_path / "lm"), "load_weights_only": True}
    rank = TrainerRank(make_topology(trainer=trainer), tmp_path / "run")
    assert rank.resume() == 0
    found = whole_weights(rank._replica.complete_chunks(), rank._replica.hf)
    assert [name for name, tensor in found.items() if not torch.equal(tensor, weights[name])] == []
    assert len(found) == len(weights) - tied
    assert rank._replica.steps_before == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_its_optimizer_training_goes_on_exactly(make_topology: MakeTopology, tmp_path: Path, dtype: str) -> None:
    other, path = saved_training(make_topology, tmp_path, dtype)
    expected = [metrics(other, step) for step in (2, 3)]
    trainer = DISTRIBUTED | {"load": str(path)}
    again = TrainerRank(make_topology(trainer=trainer, model={"dtype": dtype}), tmp_path / "run")
    assert again.resume() == 0
    assert [metrics(again, step) for step in (2, 3)] == expected


def saved_training(
    make_topology: MakeTopology, tmp_path: Path, dtype: str = "float32", trainer: dict[str, Any] = DISTRIBUTED
) -> tuple[TrainerRank, Path]:
    """Two steps of ours, saved as Megatron-LM would; its iteration's directory."""
    other = TrainerRank(make_topology(trainer=trainer, model={"dtype": dtype}), tmp_path / "other")
    for step in range(2):
        metrics(other, step)
    replica = other._replica
    model = replica.complete_chunks()[0].sharded_state_dict()
    fill_optimizer_state(replica.optimizer)
    optimizer = replica.optimizer.sharded_state_dict(model, metadata=FORMAT)
    kind = FORMAT["distrib_optim_sharding_type"] if replica.is_distributed else None
    return other, save(tmp_path / "lm", {"model": model, "optimizer": optimizer}, kind=str(kind))


def metrics(rank: TrainerRank, step: int) -> dict[str, float]:
    found = rank.train(random_batch(step)).metrics
    return {name: value for name, value in found.items() if not name.startswith("perf/")}


def test_what_cannot_be_read_is_refused_with_the_reason(
    make_topology: MakeTopology, model_dir: Path, tmp_path: Path
) -> None:
    _, path = saved_training(make_topology, tmp_path)

    def refused(says: str, load: Path = path, **tables: Any) -> None:
        trainer = {"load": str(load)} | tables.pop("trainer", DISTRIBUTED)
        with pytest.raises(ValueError, match=says):
            TrainerRank(make_topology(trainer=trainer, **tables), tmp_path / "run").resume()

    def rewritten(change: Callable[[dict[str, Any]], object]) -> None:
        common = torch.load(path / "common.pt", weights_only=False)
        change(common)
        torch.save(common, path / "common.pt")

    refused("trainer.load_weights_only = true to load only the weights", trainer={})
    refused("trained in torch.float32, but this run trains in torch.bfloat16", model={"dtype": "bfloat16"})
    rewritten(lambda common: common["optimizer"].update(param_state_sharding_type="dp_reshardable"))
    refused("its optimizer's state saved as dp_reshardable; only fully_reshardable can be read")
    rewritten(lambda common: common["optimizer"].pop("param_state_sharding_type"))
    refused("state saved by another optimizer than the distributed one")
    rewritten(lambda common: common.pop("optimizer"))
    refused("was saved without its optimizer; load only the weights with trainer.load_weights_only = true")
    rewritten(lambda common: common.update(args=Strange()))
    refused("holds objects of another program, which are not loaded; load only the weights")
    own, weights_only = (model_dir / "config.json").read_bytes(), {"load_weights_only": True}
    TrainerRank(
        make_topology(trainer={"load": str(path)} | weights_only), tmp_path / "run"
    ).resume()  # weights alone are read
    for change, says in {
        ("num_hidden_layers", 3): r"linear_qkv\.layer_norm_weight is \[2, 16\] in the checkpoint, and \[3, 16\] here",
        ("vocab_size", 64): r"word_embeddings\.weight is \[32, 16\] in the checkpoint, and \[64, 16\] here",
        (
            "model_type",
            "llama",
        ): "it has decoder.layers.self_attention.[kq]_layernorm.weight, which this model does not have",
        ("tie_word_embeddings", True): r"it has output_layer\.weight, which this model does not have",
    }.items():
        (model_dir / "config.json").write_bytes(msgspec.json.encode(TINY | dict([change])))
        refused(says, trainer=weights_only)
    (model_dir / "config.json").write_bytes(own)
    (path / "metadata.json").unlink()
    refused("iter_0000010 is not a complete checkpoint of Megatron-LM", load=tmp_path / "lm")
    (path / "mp_rank_00").mkdir()
    refused("in Megatron-LM's format torch, which is sharded for its ranks: save it as torch_dist")
    (tmp_path / "lm" / "latest_checkpointed_iteration.txt").write_text("latest")
    refused("holds 'latest'; expected the number of an iteration", load=tmp_path / "lm")


class Strange:
    """What a program keeps among its arguments."""
