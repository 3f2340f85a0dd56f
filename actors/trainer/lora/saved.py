"""Adapters in a checkpoint: what its metadata says of them and of their base model. No torch."""

from functools import lru_cache
from pathlib import Path

import msgspec

from actors.trainer.lora.targets import last_name, targeted
from actors.trainer.models.config import HfConfig
from runtime.models.checksums import checksums_of
from runtime.settings.topology import Topology


class SavedLora(msgspec.Struct, frozen=True, kw_only=True):
    """What the adapters in a checkpoint are, and on which base model."""

    rank: int
    alpha: float
    rslora: bool
    targets: tuple[str, ...]  # names of layers, sorted
    base: str  # sha256 of the base model's tensors, as in runtime/models/checksums.py; or the seed of random ones

    @classmethod
    def of(cls, topology: Topology, model: HfConfig) -> "SavedLora | None":
        """Describe a run's adapters. None: it trains all weights.

        Raises:
            NoTarget, a ValueError: as in `targeted`.
            OSError, ValueError: the base model cannot be read.
        """
        config = topology.trainer.lora
        if not config.rank:
            return None
        names = {last_name(layer) for layer in targeted(model, config)}
        seed, directory = topology.run.seed, topology.model.hf_checkpoint
        base = f"random weights of seed {seed}" if topology.model.random_init else _base_sum(directory)
        return cls(rank=config.rank, alpha=config.alpha, rslora=config.rslora, targets=tuple(sorted(names)), base=base)


@lru_cache(maxsize=2)
def _base_sum(directory: str) -> str:
    return checksums_of(Path(directory)).total


def compare(path: Path, there: SavedLora | None, here: SavedLora | None) -> None:
    """Reject a checkpoint of other adapters, or of another base model.

    Args:
        path: directory of the checkpoint.
        there: adapters of the checkpoint; None: it has all weights.
        here: adapters of the run that continues from it; None: it trains all weights.

    Raises:
        ValueError: they differ. The message says in what.
    """
    if there is None and here is not None:
        raise ValueError(
            f"{path} has all weights, and trainer.lora.rank = {here.rank} trains adapters: export the checkpoint with "
            f"bin/export-hf, and name what it writes in model.hf_checkpoint"
        )
    if there is not None and here is None:
        raise ValueError(
            f"{path} has LoRA adapters of rank {there.rank} alone: set trainer.lora as in that run, or export the "
            f"checkpoint with bin/export-hf, and name what it writes in model.hf_checkpoint"
        )
    if there is None or here is None:
        return
    for name in ("rank", "alpha", "rslora", "targets"):
        old, new = (msgspec.json.encode(getattr(each, name)).decode() for each in (there, here))
        if old != new:
            raise ValueError(f"{path}: {name} is {old} in the checkpoint, and {new} by trainer.lora")
    if there.base != here.base:
        raise ValueError(
            f"{path} has adapters of another base model: its weights are {there.base} in the checkpoint, and "
            f"{here.base} by model.hf_checkpoint"
        )
