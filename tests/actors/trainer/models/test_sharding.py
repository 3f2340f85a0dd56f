"""What a tensor-parallel rank reads of a checkpoint: its part of each tensor, and nothing else."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.trainer.megatron.build import build_chunks
from actors.trainer.megatron.config import transformer_config
from actors.trainer.megatron.imports import quiet
from actors.trainer.models import files
from actors.trainer.models.config import HfConfig, read_hf_config
from actors.trainer.models.files import TensorShard, file_source, random_source
from runtime.settings.tables.trainer import MegatronConfig
from tests.actors.trainer.hf import write_model
from tests.actors.trainer.tiny import kinds
from tests.build.model import mapping_source, rank_part

DIMS = {"linear_proj.weight": 1, "linear_fc2.weight": 1, "layernorm.weight": None}  # of a parameter; others: rows
DIMS |= {"_down_proj.weight": None, "router.weight": None, "_bda.weight": None, "gate_weight": None}
DIMS |= {"self_attention.norm": None}
DIMS |= dict.fromkeys(("router.scale", "expert_scales", "_bda.scale", "_shared.weight", "_experts.weight"))


def parameters_of(hf: HfConfig) -> Iterator[tuple[str, int | None]]:
    """Every name of the model, and the dimension along which Megatron cuts it."""
    with quiet():
        config = transformer_config(hf, MegatronConfig(), dtype=torch.float32)
        (built,) = build_chunks(hf, config)
    for name, _ in built.named_parameters():
        yield name, next((dim for end, dim in DIMS.items() if name.endswith(end)), 0)


def part_of(whole: Tensor, name: str, cut: TensorShard) -> Tensor:
    """A part by the rule that Megatron has for its own parameters: of gate and up projection a part of both."""
    if "linear_fc1" in name:
        return torch.cat([cut.of(half) for half in whole.chunk(2)])
    return cut.of(whole)


@pytest.mark.parametrize("kind", kinds())
def test_the_parts_of_ranks_are_the_whole(tmp_path: Path, kind: str) -> None:
    write_model(tmp_path, kind)
    hf, source = read_hf_config(tmp_path), file_source(tmp_path)
    names = list(parameters_of(hf))
    assert len(names) >= 14
    for name, dim in names:
        whole = rank_part(name, hf, source, None)
        is_undivided = hf.experts is not None and hf.experts.clamped is not None and ".experts." in name  # check_layout
        for rank in range(2) if dim is not None and not is_undivided else ():
            cut = TensorShard(dim, rank, 2)
            assert torch.equal(rank_part(name, hf, source, cut), part_of(whole, name, cut)), name


def test_a_file_is_asked_for_the_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path)
    hf = read_hf_config(tmp_path)
    asked: list[str] = []
    opened = files.safe_open

    class Watched:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._file = opened(*arguments, **options)

        def __enter__(self) -> Any:
            self._file.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self._file.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(self._file, name)

    monkeypatch.setattr(files, "safe_open", Watched)
    source = file_source(tmp_path)
    asked.clear()
    part = rank_part("decoder.layers.1.mlp.linear_fc1.weight", hf, source, TensorShard(0, 1, 2))
    assert part.shape == (hf.intermediate_size, hf.hidden_size)
    assert asked == ["get_slice", "get_slice"]


def test_every_source_gives_the_same_parts(tmp_path: Path) -> None:
    reference = write_model(tmp_path).state_dict()
    hf, name = read_hf_config(tmp_path), "model.layers.0.self_attn.o_proj.weight"
    for dim in (0, 1):
        cut = TensorShard(dim, 1, 2)
        expected = reference[name].chunk(2, dim=dim)[1]
        assert torch.equal(file_source(tmp_path)(name, cut), expected)
        assert torch.equal(mapping_source(reference)(name, cut), expected)
        assert torch.equal(random_source(hf, 1)(name, cut), random_source(hf, 1)(name).chunk(2, dim=dim)[1])
