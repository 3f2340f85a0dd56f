"""The contract: new weights, in each of the four ways, under load, and what becomes of requests meanwhile."""

from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import RequestRefused
from actors.rollout.sglang.labels import version_of
from messages import EngineState, Segment
from tests.sglang.rig import Rig, body_of, readers_of, request, until
from tests.sglang.router import Router
from tests.sglang.server import Server, Servers, checksum_of
from tests.sglang.test_answers import with_weights
from tests.support.sampled import Generated, taken
from tests.support.tiny_models import teacher_forced

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

PROMPT = [3, 4, 5]
LONG = 300
SLOW_S = 0.05  # of a step: 15 s for an answer, unless the test ends that
CLOSE, FAR = 1e-4, 1e-2  # natural log


def segment(generated: Generated) -> Segment:
    (answer,) = generated.answers
    return answer.segment


@pytest.mark.behaviour("new weights under load by drain, abort, retract and in_place: spans name them, log-probs agree")
@pytest.mark.parametrize(
    ("streamed", "mode"),
    [
        pytest.param(streamed, mode, id=f"{form}-{mode}", marks=() if in_ci else pytest.mark.nightly)
        for number, mode in enumerate(("drain", "abort", "retract", "in_place"))
        for streamed, form in ((False, "whole"), (True, "streamed"))
        for in_ci in [streamed is bool(number % 2)]  # each mode, and each form with two
    ],
)
async def test_update_under_load(
    make_rig: Any,
    session_router: Router,
    contract_model: Path,
    weights: dict[int, Path],
    mode: str,
    streamed: bool,
) -> None:
    found: list[Generated] = []
    async with make_rig(session_router, mode) as rig:
        await rig.slow_down(SLOW_S)

        async def ask() -> None:
            found.append(await rig.generate(request(PROMPT, LONG, streamed=streamed)))

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(ask)
            await rig.until_running(3)
            await rig.until_tokens(60)
            if mode == "drain":  # the update ends after the requests
                group.start_soon(rig.update, 2)
                await until(lambda: rig.fleet.engines[0].state is EngineState.UPDATING)
            else:
                await rig.update(2)
            await rig.slow_down(0)
    for generated in found:
        check_versions(generated, mode, contract_model, weights)


def check_versions(generated: Generated, mode: str, model: Path, weights: dict[int, Path]) -> None:
    """Compare each token's log-prob with those that transformers computes under the version that it is said to have."""
    packed = segment(generated)
    versions = np.array([span.version for span in packed.weight_spans for _ in range(span.start, span.end)])
    assert len(versions) == len(packed.response_ids)
    assert generated.cut_short == (mode == "abort") == (len(versions) < LONG)
    assert sorted(set(versions.tolist())) == ([1] if mode in ("drain", "abort") else [1, 2])
    sampled = np.asarray(packed.rollout_log_probs)
    ids = packed.response_ids.tolist()
    for version in set(versions.tolist()):
        expected = teacher_forced(with_weights(model, weights[version]), PROMPT, ids).numpy()
        difference = np.abs(sampled - expected)[versions == version]
        if mode == "in_place" and version == 2:  # its keys and values are partly those of the old weights
            assert difference.max() > FAR
        else:
            assert difference.max() < CLOSE


@pytest.mark.behaviour("weights are loaded by a server that drew its first ones")
async def test_update_after_dummy_load(
    servers: Servers, server: Server, client: SglangClient, weights: dict[int, Path], checksums: dict[int, str]
) -> None:
    assert servers.num_starts[server.layout] >= 1  # each with --load-format dummy
    await client.update_weights(server.url, str(weights[2]), "2@test")
    assert await client.weight_version(server.url) == "2@test"
    assert await client.checksum(server.url) == checksums[2] != checksums[1]


@pytest.mark.behaviour("a bad path is refused and keeps the old weights, their version and what they sample")
async def test_bad_path_keeps_the_old_weights(rig: Rig, tmp_path: Path) -> None:
    greedy = request(PROMPT, 20, temperature=0.0)
    (before,) = (await rig.generate(greedy)).answers
    for bad in (tmp_path / "nothing", tmp_path):
        with pytest.raises(RequestRefused):
            await rig.client.update_weights(rig.server.url, str(bad), "9@test")
    assert version_of(await rig.client.weight_version(rig.server.url) or "") == 1
    assert checksum_of(rig.server) == rig.checksums[1]
    (after,) = (await rig.generate(request(PROMPT, 20, temperature=0.0))).answers
    assert after.output_ids == before.output_ids


@pytest.mark.behaviour("a flush while requests are frozen in the cache is refused; the update before it has happened")
async def test_flush_while_busy(rig: Rig) -> None:
    await rig.slow_down(SLOW_S)
    asked = request(PROMPT, LONG)

    async def ask() -> None:
        await rig.client.generate(rig.fleet.serving.router, body_of(asked), readers_of(asked))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await rig.until_running(1)
        await rig.until_tokens(len(PROMPT) + 8)
        await rig.client.pause(rig.server.url, "in_place")
        with pytest.raises(RequestRefused, match=r"not flushed|cache"):
            await rig.client.update_weights(rig.server.url, str(rig.weights[2]), "2@test")
        assert version_of(await rig.client.weight_version(rig.server.url) or "") == 1
        assert await rig.client.checksum(rig.server.url) == rig.checksums[2]
        await rig.client.update_weights(rig.server.url, str(rig.weights[2]), "2@test", flush_cache=False)
        assert await rig.client.weight_version(rig.server.url) == "2@test"
        await rig.client.proceed(rig.server.url)
        await rig.slow_down(0)
    (answer,) = taken(asked)
    packed = answer.segment
    assert len(packed.response_ids) == LONG
    assert [span.version for span in packed.weight_spans] == [1, 2]
