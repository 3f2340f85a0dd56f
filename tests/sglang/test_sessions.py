"""The contract: weights that come bucket by bucket, from groups and in the call; refusals, and what follows them."""

from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import RequestRefused
from actors.rollout.sglang.memory import EngineMemory
from actors.rollout.sglang.updates import WeightUpdates
from tests.sglang.rig import Rig, body_of, readers_of, request
from tests.sglang.sending import LIMIT_S, Sender, buckets_of, payload_of, segments_of, sender
from tests.sglang.server import TWO_PROCESSES, Server
from tests.sglang.test_answers import with_weights
from tests.sglang.test_weights import CLOSE, FAR, LONG, PROMPT, SLOW_S
from tests.support.sampled import Sampled, taken
from tests.support.tiny_models import teacher_forced

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

PROBE = [3, 4, 5, 9, 17, 30, 2, 11]
NORM = "model.norm.weight"


class Half:
    """The rollout actor's half of sessions with one server that holds the first weights."""

    def __init__(self, client: SglangClient, server: Server, model: Path, weights: dict[int, Path]) -> None:
        self.client = client
        self.server = server
        self.updates = WeightUpdates(client)
        self.weights = weights
        self._model = model

    async def begin(self) -> None:
        await self.updates.begin_update(self.server.url, timeout_s=LIMIT_S)

    async def end(self) -> None:
        await self.updates.end_update(self.server.url, timeout_s=LIMIT_S)

    async def version(self) -> str | None:
        return await self.client.weight_version(self.server.url)

    async def session(self, group: Sender, version: int, **options: Any) -> None:
        """Bring a version in two buckets."""
        await self.begin()
        first, last = buckets_of(self.weights[version], 2)
        await group.send(first, **options)
        await group.send(last, **options, flush_cache=True, label=f"{version}@sent")
        await self.end()

    async def check(self, version: int, checksums: dict[int, str]) -> None:
        """The engine holds a version, and computes with it: its checksum and log-probs, those of transformers."""
        assert await self.client.checksum(self.server.url) == checksums[version]
        (_, *found) = await self.client.prompt_log_probs(self.server.url, PROBE)
        for each in self.weights:
            expected = teacher_forced(with_weights(self._model, self.weights[each]), PROBE[:1], PROBE[1:]).numpy()
            difference = np.abs(np.array(found, dtype=np.float64) - expected)
            assert difference.max() < CLOSE if each == version else difference.max() > FAR


@pytest.fixture
async def half(
    client: SglangClient, server: Server, contract_model: Path, weights: dict[int, Path], checksums: dict[int, str]
) -> Half:
    await client.update_weights(server.url, str(weights[1]), "1@clean")
    half = Half(client, server, contract_model, weights)
    await half.check(1, checksums)
    return half


@pytest.mark.behaviour("weights by broadcast, tensor by tensor and as one buffer, equal the same from files")
@pytest.mark.parametrize("flattened", [False, True], ids=["each", "flattened"])
async def test_weights_come_by_broadcast(half: Half, checksums: dict[int, str], flattened: bool) -> None:
    async with sender(half.client, half.server) as group:
        await half.begin()
        first, last = buckets_of(half.weights[2], 2)
        await group.send(first, flattened=flattened)
        assert await half.version() == "1@clean"
        await group.send(last, flattened=flattened, flush_cache=True, label="2@sent")
        assert await half.version() == "2@sent"
        await half.end()
        await half.check(2, checksums)
        await group.leave()


@pytest.mark.behaviour("weights in the call, as a list and as one buffer, equal the same from files")
@pytest.mark.parametrize("flattened", [False, True], ids=["list", "flattened"])
async def test_weights_come_in_the_call(half: Half, checksums: dict[int, str], flattened: bool) -> None:
    await half.begin()
    num_ranks = 2 if half.server.layout == TWO_PROCESSES else 1
    for bucket, label in zip(buckets_of(half.weights[2], 2), (None, "2@sent"), strict=True):
        payloads = [payload_of(bucket, flattened=flattened)] * num_ranks
        await half.updates.update_from_tensor(
            half.server.url, payloads, flattened=flattened, label=label, timeout_s=LIMIT_S
        )
    await half.end()
    assert await half.version() == "2@sent"
    await half.check(2, checksums)


@pytest.mark.behaviour("weights in shared memory whose name is in the call equal the same from files")
async def test_weights_come_by_name(half: Half, checksums: dict[int, str]) -> None:
    num_ranks = 2 if half.server.layout == TWO_PROCESSES else 1
    await half.begin()
    for bucket in buckets_of(half.weights[2], 2):
        with segments_of(bucket, num_ranks) as payloads:
            await half.updates.update_from_tensor(half.server.url, payloads, timeout_s=LIMIT_S)
    await half.end()
    await half.check(2, checksums)


@pytest.mark.behaviour("two groups, each with a sender of its own, bring the parts of one version")
async def test_two_groups(half: Half, checksums: dict[int, str]) -> None:
    first, last = buckets_of(half.weights[2], 2)
    async with sender(half.client, half.server) as one, sender(half.client, half.server) as other:
        await half.begin()
        await other.send(last)
        await one.send(first, label="2@sent")
        await half.end()
        await half.check(2, checksums)
        await one.leave()
        await half.session(other, 1)  # the other group is whole
        await half.check(1, checksums)
        await other.leave()


@pytest.mark.behaviour("what is out of order is refused, and the server goes on: sessions, groups")
async def test_what_is_out_of_order(half: Half, checksums: dict[int, str]) -> None:
    (bucket,) = buckets_of(half.weights[2], 1)
    url = half.server.url
    stranger = Sender(half.updates, half.server, "unknown", None)
    with pytest.raises(RequestRefused, match="begin_weight_update"):
        await stranger.tell(bucket)
    with pytest.raises(RequestRefused, match="begin_weight_update"):
        await half.updates.update_from_tensor(url, [payload_of(bucket, flattened=False)], timeout_s=LIMIT_S)
    with pytest.raises(RequestRefused, match="no weight-update session"):
        await half.end()
    with pytest.raises(RequestRefused, match="does not exist"):
        await stranger.leave()
    await half.begin()
    with pytest.raises(RequestRefused, match="already open"):
        await half.begin()
    with pytest.raises(RequestRefused, match="unknown"):
        await stranger.tell(bucket)
    await half.end()
    assert await half.version() == "1@clean"
    await half.check(1, checksums)


@pytest.mark.behaviour(
    "a bucket that does not fit is refused but for names of no layer; the next session makes it good"
)
async def test_buckets_that_do_not_fit(half: Half, checksums: dict[int, str]) -> None:
    async with sender(half.client, half.server) as group:
        await half.begin()
        for name in (NORM, "model.layers.0.self_attn.q_proj.foo"):
            with pytest.raises(RequestRefused, match="discard"):
                await group.send([(name, torch.zeros(3))], label="9@sent")
        await group.send([("model.foo", torch.zeros(3))])
        await half.end()
        assert await half.version() == "1@clean"
        await half.session(group, 2)
        await half.check(2, checksums)
        await group.leave()


@pytest.mark.behaviour(
    "a sender that is gone before a broadcast ends the call; the session is closed, a new group works"
)
async def test_a_sender_that_is_gone(half: Half, checksums: dict[int, str]) -> None:
    (bucket,) = buckets_of(half.weights[2], 1)
    async with sender(half.client, half.server, "again") as group:
        await half.begin()
        async with anyio.create_task_group() as tasks:

            async def told() -> None:
                with pytest.raises(RequestRefused, match="Failed to receive"):
                    await group.tell(bucket)

            tasks.start_soon(told)
            await anyio.sleep(0.3)  # mostly it waits by then; if not, it is refused all the same
            assert await half.version() == "1@clean"  # who answers does not wait
            group.die()
        with pytest.raises(RequestRefused, match="already open"):
            await half.begin()
        await half.end()
        await group.leave()
        await half.check(1, checksums)
    async with sender(half.client, half.server, "again") as group:
        await half.session(group, 2)
        await half.check(2, checksums)
        await group.leave()


@pytest.mark.behaviour("a session while requests are put back: spans name the versions, log-probs are those of each")
async def test_a_session_under_load(rig: Rig, contract_model: Path) -> None:
    half = Half(rig.client, rig.server, contract_model, rig.weights)
    await rig.slow_down(SLOW_S)
    found: list[Sampled] = []

    async def ask() -> None:
        asked = request(PROMPT, LONG)
        await rig.client.generate(rig.fleet.serving.router, body_of(asked), readers_of(asked))
        found.extend(taken(asked))

    async with sender(rig.client, rig.server) as group:
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask)
            await rig.until_running(3)
            await rig.until_tokens(60)
            await rig.client.pause(rig.server.url, "retract")
            await half.session(group, 2)
            assert await rig.client.checksum(rig.server.url) == rig.checksums[2]
            await rig.client.proceed(rig.server.url)
            await rig.slow_down(0)
        await group.leave()
    for answer in found:
        packed = answer.segment
        assert [span.version for span in packed.weight_spans] == [1, 2]
        for span in packed.weight_spans:
            held = with_weights(contract_model, rig.weights[span.version])
            expected = teacher_forced(held, PROMPT, packed.response_ids.tolist()).numpy()
            difference = np.abs(np.asarray(packed.rollout_log_probs) - expected)[span.start : span.end]
            assert difference.max() < CLOSE


@pytest.mark.behaviour("memory is released, weights are resumed and sent, then the cache is resumed")
async def test_weights_are_sent_before_the_cache_is_resumed(half: Half, checksums: dict[int, str]) -> None:
    memory = EngineMemory(half.client, half.server.url)
    async with sender(half.client, half.server) as group:
        await half.client.pause(half.server.url, "retract")
        await memory.release("kv_cache", "weights")
        await memory.resume("weights")
        await half.session(group, 2)
        await memory.resume("kv_cache")
        await half.client.proceed(half.server.url)
        await half.check(2, checksums)
        await group.leave()
