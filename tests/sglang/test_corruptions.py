"""The contract: what happens to weights on their way is found at the engine's own checksums."""

from pathlib import Path

import pytest

from actors.rollout.engines.weights.verification import WeightsMismatch
from actors.rollout.sglang.client import SglangClient
from tests.sglang.server import Server
from tests.support.corruptions import Version, cases
from tests.support.weight_line import ENGINE, Halves, drawn

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]


@pytest.mark.behaviour("eleven corruptions on the way are found, by tensor and bucket; the next session is right")
async def test_corruptions_are_found(client: SglangClient, server: Server, contract_model: Path) -> None:
    version = Version(now=drawn(contract_model, 2), before=drawn(contract_model, 1))
    halves = Halves(client, server.url, contract_model)
    for kind, case in cases(version).items():
        assert await halves.bring(version.before) == {}, kind
        failed = await halves.bring(version.now, case.corruption)
        assert list(failed) == [ENGINE], kind
        assert [part for part in case.says if part not in failed[ENGINE]] == [], kind
        assert isinstance(halves.refused, WeightsMismatch) == case.is_by_tensors, kind
    assert await halves.bring(version.now) == {}
    await halves.leave()
