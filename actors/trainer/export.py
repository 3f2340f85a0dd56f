"""Export of a run's model as a Hugging Face directory, in one process without a bus (bin/export-hf)."""

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from actors.trainer.checkpoints import CRITIC, checkpoints_in, newest_undamaged, saved_run
from actors.trainer.lora.saved import SavedLora
from runtime.models.checkpoint_files import CHECKPOINTS
from runtime.models.directory import CONFIG, copy_files, has_file
from runtime.node.claims.rundir import TOPOLOGY_FILE
from runtime.settings.derived import has_critic
from runtime.settings.devices import HIDDEN
from runtime.settings.placement import weight_format
from runtime.settings.tables.trainer import MegatronConfig
from runtime.settings.topology import Topology, critic_topology, decode_topology
from runtime.util.files import atomic_directory

if TYPE_CHECKING:
    import torch

    from actors.trainer.models.config import HfConfig


class CannotExport(Exception):
    """There is nothing to export, or the output directory cannot be used. The message says why."""


@dataclass(frozen=True)
class Source:
    """The checkpoint or the published weights to export."""

    description: str  # description for the user
    path: Path
    is_checkpoint: bool  # False: published weights, already in Hugging Face's format
    ignored: tuple[str, ...] = ()  # keys that the exported config.json is without


def export_run(
    directory: Path, out: Path, *, step: int | None = None, adapter: bool = False, megatron_lm: bool = False
) -> Source:
    """Write a run's model to a directory, which appears once it is complete. A critic gets `critic/` in it.

    The weights of a LoRA run are merged with its adapters.

    Call it in a separate process: exporting a checkpoint hides all GPUs from the process.

    Args:
        directory: directory of the run, which may still be running.
        out: output directory; must not exist, or be empty.
        step: train step of the checkpoint; None: the newest checkpoint, or else the newest published weights.
        adapter: write the adapters alone, in peft's files.
        megatron_lm: write the weights of a checkpoint as Megatron-LM saves them, without a critic.

    Raises:
        CannotExport: there is nothing to export, or no adapter, or `out` cannot be used.
        ValueError, OSError: the model directory or the files cannot be read.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CannotExport(f"--out {out} already exists: name a new or an empty directory")
    source, topology = find_source(directory, step), _topology(directory)
    model_directory = Path(topology.model.hf_checkpoint)
    if not has_file(model_directory, CONFIG):
        raise CannotExport(f"{model_directory}, the run's model.hf_checkpoint, has no {CONFIG} any more")
    if adapter and not topology.trainer.lora.rank:
        raise CannotExport(f"{directory} has no adapter: trainer.lora.rank is 0")
    if adapter and not source.is_checkpoint:
        raise CannotExport(f"{directory} has no checkpoint: published weights are merged, without an adapter")
    if megatron_lm and topology.trainer.lora.rank:
        raise CannotExport(f"{directory}: not implemented yet: a LoRA run (trainer.lora.rank) for Megatron-LM")
    if megatron_lm and not source.is_checkpoint:
        raise CannotExport(f"{directory} has no checkpoint, which an export for Megatron-LM is of")
    with atomic_directory(out) as unfinished:
        if megatron_lm:
            _write_megatron_lm(source.path, unfinished, topology)
            return source
        if adapter:
            _write_adapter(source.path, unfinished, topology)
            return source
        (_write_checkpoint if source.is_checkpoint else _copy_published)(source.path, unfinished, topology)
    return replace(source, ignored=topology.model.ignore_config_keys)


def find_source(directory: Path, step: int | None) -> Source:
    """Find the checkpoint to export, or else the newest published weights.

    Args:
        directory: directory of the run.
        step: train step of the checkpoint; None: the newest undamaged checkpoint, or else published weights.

    Raises:
        CannotExport: there is none. The message lists the checkpoints that exist.
    """
    newest, damaged = newest_undamaged(directory / CHECKPOINTS, step=step)
    notes = "; ".join(f"that of step {each.step} is damaged: {each.reason}" for each in damaged)
    if newest is not None:
        note = f" ({notes})" if notes else ""
        return Source(f"checkpoint of step {newest.step}{note}", newest.path, is_checkpoint=True)
    if damaged and step is not None:
        raise CannotExport(f"{directory}: the checkpoint of step {step} is damaged: {damaged[0].reason}")
    if damaged:
        raise CannotExport(f"{directory} has no checkpoint without damage ({notes})")
    found = checkpoints_in(directory / CHECKPOINTS)
    if found:
        steps = ", ".join(str(checkpoint.step) for checkpoint in found)
        raise CannotExport(f"{directory} has no checkpoint of step {step}: it has those of {steps}")
    if step is not None:
        raise CannotExport(f"{directory} has no checkpoint of step {step}, nor of any other")
    from actors.trainer.weights.publish import newest_whole  # imports torch
    from runtime.models.versions import WEIGHTS

    newest = newest_whole(directory / WEIGHTS)
    if newest is None:
        raise CannotExport(f"{directory} has neither a checkpoint nor published weights: nothing was saved yet")
    version, path = newest
    return Source(f"published weights of version {version}", path, is_checkpoint=False)


def _topology(directory: Path) -> Topology:
    stored = directory / TOPOLOGY_FILE
    try:
        return decode_topology(stored.read_bytes())
    except FileNotFoundError as error:
        raise CannotExport(f"{stored} is missing; it names the model that the run trained") from error
    except msgspec.MsgspecError as error:
        raise CannotExport(
            f"{stored} cannot be read ({error}): it was edited, or written by another version"
        ) from error


def _write_checkpoint(path: Path, unfinished: Path, topology: Topology) -> None:
    os.environ.update(HIDDEN)  # before torch looks for GPUs
    model, critic, device = _joined(path, topology)
    _write_weights(path, unfinished, topology, model, device)
    _copy_small_files(unfinished, topology, model)
    if critic is not None:
        (unfinished / CRITIC).mkdir()
        own = critic_topology(topology)
        _write_weights(path, unfinished / CRITIC, own, critic, device, is_critic=True)
        _copy_small_files(unfinished / CRITIC, own, critic)


def _joined(path: Path, topology: Topology) -> "tuple[HfConfig, HfConfig | None, torch.device]":
    """Become the only rank, and return the models of a checkpoint, which fits config.json: it is exported too."""
    import torch

    from actors.trainer.megatron import groups
    from actors.trainer.models.config import critic_model, trained_model

    device = torch.device("cpu")
    model, critic = trained_model(topology), critic_model(topology) if has_critic(topology) else None
    lora = SavedLora.of(topology, model)
    saved_run(path).check(path, model, lora=lora, dtype=None, resumes=True, critic=critic)
    groups.join(groups.Ranks(), _alone(topology), device, seed=topology.run.seed)
    return model, critic, device


def _alone(topology: Topology) -> MegatronConfig:
    return MegatronConfig(mtp_num_layers=topology.trainer.megatron.mtp_num_layers)


def _write_adapter(path: Path, unfinished: Path, topology: Topology) -> None:
    os.environ.update(HIDDEN)  # before torch looks for GPUs
    from actors.trainer.lora.adapters import whole_adapters
    from actors.trainer.lora.peft_files import write_adapter

    model, _, device = _joined(path, topology)
    tensors = whole_adapters(_loaded(path, topology, model, device))
    base = topology.model.hf_checkpoint
    write_adapter(tensors, unfinished, model=model, config=topology.trainer.lora, base=base)


def _write_megatron_lm(path: Path, unfinished: Path, topology: Topology) -> None:
    os.environ.update(HIDDEN)  # before torch looks for GPUs
    from actors.trainer.megatron.megatron_lm_export import write_for_megatron_lm

    model, _, device = _joined(path, topology)
    (chunk,) = _loaded(path, topology, model, device)
    write_for_megatron_lm(chunk, model, unfinished)


def _write_weights(
    path: Path,
    unfinished: Path,
    topology: Topology,
    model: "HfConfig",
    device: "torch.device",
    *,
    is_critic: bool = False,
) -> None:
    """Load a checkpoint into a model on this single rank, and write its weights."""
    from actors.trainer.weights.export import weight_thread
    from actors.trainer.weights.files import export_to_files
    from actors.trainer.weights.gathering import own_parts

    chunks = _loaded(path, topology, model, device, is_critic=is_critic)
    parts, bucket_bytes = own_parts(chunks, model), topology.trainer.export_bucket_bytes
    with weight_thread() as thread:
        export_to_files(parts, model, unfinished, thread, device=device, bucket_bytes=bucket_bytes).finish()


def _loaded(
    path: Path, topology: Topology, model: "HfConfig", device: "torch.device", *, is_critic: bool = False
) -> list[Any]:
    """Load a checkpoint into a model on this single rank, and return its chunks."""
    from actors.trainer.lora.adapters import attach, new_adapters
    from actors.trainer.megatron.build import build_chunks
    from actors.trainer.megatron.checkpoint import load_model
    from actors.trainer.megatron.config import DTYPES, transformer_config
    from actors.trainer.megatron.imports import quiet
    from actors.trainer.models.files import base_source
    from actors.trainer.models.sharding import load_weights

    dtype = DTYPES[topology.model.dtype]
    with quiet():
        chunks = build_chunks(model, transformer_config(model, _alone(topology), dtype=dtype))
    if topology.trainer.lora.rank:  # the checkpoint has the adapters alone
        for chunk in chunks:
            load_weights(chunk, model, base_source(topology, model))
        config = topology.trainer.lora
        attach(chunks, model, config, new_adapters(model, config, topology.run.seed))
    load_model(chunks, path, is_critic=is_critic)
    return chunks


def _copy_published(path: Path, unfinished: Path, topology: Topology) -> None:
    from actors.trainer.models.config import trained_model
    from actors.trainer.weights.publish import BASE
    from runtime.models.checksums import checksums_of
    from runtime.models.safetensors import INDEX_FILE, safetensors_files
    from runtime.models.versions import name_of, on_disk

    for file in safetensors_files(path):
        shutil.copyfile(file, unfinished / file.name)
    copy_files(path, unfinished, (INDEX_FILE,))
    root = path.parent.parent if path.parent.name == BASE else path.parent
    noted = [stored.version for stored in on_disk(root) if name_of(stored.version.number) == path.name]
    found = checksums_of(unfinished).total
    if noted and found != noted[0].checksum:
        raise CannotExport(f"{path} is damaged: its checksum is {found}, {noted[0].checksum} was published")
    _copy_small_files(unfinished, topology, trained_model(topology))
    if weight_format(topology) != "as_trained":
        copy_files(path, unfinished, (CONFIG,))  # it states the dtype and quantization


def _copy_small_files(unfinished: Path, topology: Topology, model: "HfConfig") -> None:
    from actors.trainer.models.files import add_copied, copy_small_files, set_dtype, set_value_head

    ignored = topology.model.ignore_config_keys
    if not topology.model.random_init:
        add_copied(Path(topology.model.hf_checkpoint), unfinished, model)
    copy_small_files(Path(topology.model.hf_checkpoint), unfinished, tokenizer=True, ignored=ignored)
    set_dtype(unfinished / CONFIG, topology.model.dtype)
    set_value_head(unfinished / CONFIG, model)
