"""The contract: a lowest bit that is flipped on its way is found at the engine's own checksums."""

from pathlib import Path

import pytest

from actors.rollout.engines.weights.proof import WeightsMismatch
from actors.rollout.sglang.client import SglangClient
from tests.sglang.server import Server
from tests.support.weight_line import Halves, drawn, flipped

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

VALUE = "model.layers.0.self_attn.v_proj.weight"


@pytest.mark.behaviour("a lowest bit that is flipped on its way is found, by its tensor; the next session is right")
async def test_a_flipped_lowest_bit_is_found(client: SglangClient, server: Server, contract_model: Path) -> None:
    halves = Halves(client, server.url, contract_model)
    assert await halves.bring(drawn(contract_model, 1)) == {}
    second = drawn(contract_model, 2)
    failed = await halves.bring(second, flipped(VALUE, 0, 1))
    assert isinstance(halves.refused, WeightsMismatch)
    assert "model.layers.0.self_attn.qkv_proj.weight on rank" in failed["engine-0"]
    assert await halves.bring(second) == {}
