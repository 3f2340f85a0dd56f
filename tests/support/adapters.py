"""Random LoRA adapters in peft's format, for tests of engines that serve them."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from actors.tiny_engine.model.adapters import CONFIG, PREFIX, TENSORS, places
from runtime.models.config import read_model

ALL: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK: Final = 4


def adapter_tensors(
    model: Path, *, seed: int, rank: int = RANK, targets: Collection[str] = ALL, std: float = 0.2
) -> dict[str, Tensor]:
    """Draw A and B, neither zero, for the layers of a model with these last names."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for layer, place in places(read_model(model).shape).items():
        if layer.rpartition(".")[2] in targets:
            for kind, shape in (("A", (rank, place.columns)), ("B", (place.rows, rank))):
                tensors[f"{PREFIX}{layer}.lora_{kind}.weight"] = torch.randn(shape, generator=generator) * std
    return tensors


def adapter_config(*, rank: int = RANK, targets: Collection[str] = ALL, **changes: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), **changes}


def write_adapter(
    directory: Path, model: Path, *, seed: int, rank: int = RANK, targets: Collection[str] = ALL, **changes: Any
) -> Path:
    """Write an adapter of `adapter_tensors` with `adapter_config`."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = adapter_tensors(model, seed=seed, rank=rank, targets=targets)
    save_file(tensors, str(directory / TENSORS), metadata={"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(adapter_config(rank=rank, targets=targets, **changes)))
    return directory
