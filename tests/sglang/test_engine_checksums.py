"""The oracle of engine checksums, against engines: the kept servers, and other models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.trainer.models.config import read_hf_config
from actors.trainer.models.shapes import hf_shapes
from actors.trainer.weights.engine_sums import Checksums, Layout, expected_checksums
from runtime.models.checksums import engine_checksum
from tests.sglang.server import TINY, TP1, TWO_PROCESSES, Server
from tests.sglang.test_verification import running
from tests.support.tiny_engine import post, write_config
from tests.support.tiny_models import QWEN2, write_tokenizer

pytestmark = [pytest.mark.timeout(900)]

LAYOUTS = {TINY: Layout(is_padded=False), TP1: Layout(), TWO_PROCESSES: Layout(tp_size=2)}
ODD: dict[str, Any] = {"vocab_size": 70, "intermediate_size": 40, "num_key_value_heads": 1}
TIED = QWEN2 | ODD | {"tie_word_embeddings": True}
EXPERTS: dict[str, Any] = ODD | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}


def said(server: Server) -> tuple[list[Checksums], str]:
    """What an engine says of each rank, and of itself."""
    status, body = post(f"{server.url}/weights_checker", {"action": "checksum"})
    assert status == 200, body
    return [rank["checksums"] for rank in body["ranks"]], body["per_engine_checksum"]


def check(server: Server, ranks: list[Checksums]) -> None:
    found, whole = said(server)
    for rank, (own, theirs) in enumerate(zip(ranks, found, strict=True)):
        differing = sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))
        assert differing == [], f"rank {rank}"
    assert whole == engine_checksum(ranks)


def load(server: Server, directory: Path) -> None:
    body = {"model_path": str(directory), "load_format": "auto"}
    status, answer = post(f"{server.url}/update_weights_from_disk", body)
    assert status == 200, answer


def expected(config: Path, directory: Path, layout: Layout) -> list[Checksums]:
    """Of the weights of a directory, as a trainer would send them."""
    weights = load_file(directory / "model.safetensors")
    return expected_checksums([list(weights.items())], read_hf_config(config), layout)


@pytest.mark.behaviour("the checksum of each tensor of each rank is the one that the oracle of the tests predicts")
def test_a_kept_server_says_what_was_expected(server: Server, contract_model: Path, weights: dict[int, Path]) -> None:
    for version in (2, 1):
        load(server, weights[version])
        check(server, expected(contract_model, weights[version], LAYOUTS[server.layout]))


def write_model(directory: Path, changes: dict[str, Any]) -> None:
    write_config(directory, **changes)
    write_tokenizer(directory)
    generator = torch.Generator().manual_seed(0)
    shapes = hf_shapes(read_hf_config(directory))
    drawn = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    save_file(drawn, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [TP1, TWO_PROCESSES])
@pytest.mark.parametrize("changes", [TIED, EXPERTS], ids=["biases, tied, odd sizes", "experts, odd sizes"])
def test_another_model_says_what_was_expected(layout: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_model(model, changes)
    with running(layout, model, tmp_path) as server:
        load(server, model)
        check(server, expected(model, model, LAYOUTS[layout]))
