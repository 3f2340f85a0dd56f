"""The contract: corruptions of weights in transit are found by the engine's own checksums."""

from pathlib import Path

import pytest

from actors.rollout.engines.weights.verification import WeightsMismatch
from actors.rollout.sglang.client import SglangClient
from tests.sglang.server import Server
from tests.sglang.test_engine_checksums import LAYOUTS
from tests.support.corruptions import Version, cases
from tests.support.weight_line import ENGINE, Halves, drawn

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]


@pytest.mark.behaviour("eleven corruptions in transit: ten are refused, one is ignored; the next sync is right")
async def test_corruptions_are_found(client: SglangClient, server: Server, contract_model: Path) -> None:
    version = Version(now=drawn(contract_model, 2), before=drawn(contract_model, 1))
    halves = Halves(client, server.url, contract_model)
    assert await halves.sync(version.now) == {}
    for kind, case in cases(version).items():
        assert await halves.sync(version.before) == {}, kind
        failed = await halves.sync(version.now, case.corruption)
        if not case.says:
            assert failed == {}, kind
            assert await halves.holds(version.now, LAYOUTS[server.layout]), kind
            continue
        assert list(failed) == [ENGINE], kind
        assert [part for part in case.says if part not in failed[ENGINE]] == [], kind
        assert isinstance(halves.refused, WeightsMismatch) == case.is_by_tensors, kind
    assert await halves.sync(version.now) == {}
    assert await halves.holds(version.now, LAYOUTS[server.layout])
    await halves.leave()
