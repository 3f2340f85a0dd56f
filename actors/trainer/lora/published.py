"""Adapters as weight versions: peft's files, each version in a directory of its own that is never written again.

Engines that serve adapters load the base model once, from `base` here, and then an adapter of a few megabytes for each
version. Open `AdapterVersions`.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from actors.trainer.lora.adapters import adapters_of
from actors.trainer.lora.peft_files import CONFIG, TENSORS, write_adapter
from actors.trainer.megatron.groups import all_gather_objects
from actors.trainer.megatron.imports import parallel_state
from actors.trainer.models.config import HfConfig
from actors.trainer.weights.publish import KEEP_VERSIONS, Published
from messages import BaseWeights
from runtime.models.checksums import checksums_of
from runtime.models.delta import Version
from runtime.models.file_sums import sum_of
from runtime.models.manifest import write_manifest
from runtime.models.versions import name_of, versions_in
from runtime.settings.tables.trainer import LoraConfig
from runtime.util.files import begin_directory, complete_directory

if TYPE_CHECKING:
    from torch import Tensor


class AdapterVersions:
    """Adapter versions that a trainer writes to disk, managed by its first rank."""

    def __init__(
        self, root: Path, model: HfConfig, config: LoraConfig, model_directory: Path, *, is_fetched: bool = False
    ) -> None:
        """Start without a version of this process.

        Args:
            root: directory of adapter versions.
            model: configuration of the model.
            config: settings of the adapters, with a rank above 0.
            model_directory: directory of the base model, which the files name.
            is_fetched: write a manifest into each version, by which nodes fetch it.
        """
        self._root = root
        self._is_fetched = is_fetched
        self._model = model
        # Engines know one form of the scale: SGLang reads no `use_rslora`.
        self._config = msgspec.structs.replace(config, alpha=config.scale * config.rank, rslora=False)
        self._model_directory = model_directory

    def publish(self, number: int, tensors: "Mapping[str, Tensor]", base: BaseWeights) -> Published:
        """Write a version. Replaces what a crash before its announcement left under its name.

        Args:
            number: a number that was never announced.
            tensors: full tensors by peft's names without its prefix.
            base: weights that the adapter belongs to.
        """
        path = self._root / name_of(number)
        shutil.rmtree(path, ignore_errors=True)
        unfinished = begin_directory(path)
        write_adapter(
            tensors, unfinished, model=self._model, config=self._config, base=self._model_directory.as_posix()
        )
        checksum = checksums_of(unfinished).total
        files = {name: sum_of(unfinished / name) for name in (CONFIG, TENSORS)}
        manifest = write_manifest(unfinished, Version(number, checksum)) if self._is_fetched else ""
        complete_directory(unfinished, path)
        size_bytes = sum(each.size_bytes for each in files.values())
        return Published(path.resolve(), checksum, size_bytes, 0.0, files=files, manifest=manifest, base=base)

    def prune(self, *, confirmed: int) -> None:
        """Delete versions that no engine loads any more: those older than `confirmed`, except for the newest ones."""
        versions = versions_in(self._root)
        for number, path in versions[:-KEEP_VERSIONS]:
            if number < confirmed:
                shutil.rmtree(path, ignore_errors=True)


def gathered_adapters(chunks: Sequence[Any]) -> "dict[str, Tensor]":
    """Gather the adapters of all ranks, by peft's names without its prefix. A collective of all ranks."""
    import torch

    own: list[tuple[str, int, int, Tensor]] = []  # name, dimension along which shards are joined, number, shard
    rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    rank_of_experts = parallel_state.get_expert_data_parallel_rank()
    for adapter in (each for chunk in chunks for each in adapters_of(chunk).values()):
        if (rank_of_experts if adapter.is_of_expert else rank) == 0:
            for _, name, parameter, shard in adapter.tensors():
                if shard is not None or parallel_state.get_tensor_model_parallel_rank() == 0:
                    dim, number = (0, 0) if shard is None else (shard.dim, shard.index)
                    own.append((name, dim, number, parameter.detach().cpu()))
    shards: dict[str, list[tuple[int, int, Tensor]]] = {}
    for name, dim, number, tensor in (each for rank in all_gather_objects(own) for each in rank):
        shards.setdefault(name, []).append((dim, number, tensor))
    return {
        name: torch.cat([tensor for _, _, tensor in sorted(found, key=lambda each: each[1])], dim=found[0][0])
        for name, found in shards.items()
    }
