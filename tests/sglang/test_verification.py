"""A server that says yes and does nothing; updates that are proven are in test_updates.py."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from aiohttp import web

from actors.rollout.engines.weights.updater import Mode
from actors.rollout.engines.weights.verification import WeightsMismatch
from actors.rollout.sglang.client import SglangClient
from messages import WeightProbe, WeightsAnnounced
from runtime.models.checksums import checksums_of
from tests.sglang.server import TINY, TP1, Server, start, wait_until_up
from tests.support.rollout import announcement
from tests.support.tiny_models import QWEN2, QWEN3, teacher_forced, write_weights
from tests.support.weight_line import carried_out, verifier_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

NUM_UPDATES: Final = 20
FRESH: Final = (1, 10, 20)  # after these the second server is one that was started on the directory
TOKENS: Final = tuple((7 * place) % 60 + 2 for place in range(64))
MODES: Final[tuple[Mode, ...]] = ("drain", "abort", "retract", "in_place")
MODELS: Final[dict[str, dict[str, Any]]] = {
    "biases, tied head": {**QWEN2, "tie_word_embeddings": True},
    "norms of queries and keys": QWEN3,
}
CASES = [
    *(pytest.param(TINY, model, True, marks=pytest.mark.sglang, id=f"tiny, {model}") for model in MODELS),
    pytest.param(TP1, "biases, tied head", False, marks=pytest.mark.nightly, id="sglang"),
    *(pytest.param(TP1, model, True, marks=pytest.mark.nightly, id=f"sglang, fresh, {model}") for model in MODELS),
]


def announced(version: int, directory: Path) -> WeightsAnnounced:
    """As a trainer announces a directory; its forward pass is transformers'."""
    log_probs = teacher_forced(directory, [TOKENS[0]], list(TOKENS[1:])).tolist()
    probe = WeightProbe(token_ids=TOKENS, log_probs=(0.0, *log_probs))
    return announcement(version, path=str(directory), checksum=checksums_of(directory).total, probe=probe)


@contextmanager
def running(layout: str, model: Path, directory: Path, *flags: str) -> Iterator[Server]:
    """A server of its own, for as long as the block lasts."""
    server = start(layout, model, directory, *flags)
    try:
        wait_until_up(server)
        yield server
    finally:
        server.stop()


@asynccontextmanager
async def swallowing(server: Server) -> AsyncGenerator[str]:
    """The server behind one that does not pass weights on: it takes their name, and says that it did all."""
    async with aiohttp.ClientSession() as session:

        async def forward(request: web.Request) -> web.Response:
            path, data = request.path, await request.read()
            if path == "/update_weights_from_disk":
                label = (await request.json())["weight_version"]
                relabel = {"new_version": label, "abort_all_requests": False}
                async with session.post(f"{server.url}/update_weight_version", json=relabel) as answer:
                    assert answer.status == 200
                return web.json_response({"success": True, "message": "", "num_paused_requests": 0})
            async with session.request(request.method, server.url + path, data=data, headers=JSON) as answer:
                return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


JSON: Final = {"Content-Type": "application/json"}


@pytest.mark.behaviour("a server that says yes and loads nothing is found: one that is known, and one that is not")
async def test_a_yes_is_not_believed(
    client: SglangClient, server: Server, contract_model: Path, tmp_path: Path
) -> None:
    """Of an engine whose weights are known, by its checksum; of one that nobody knows yet, by the probe."""
    known, other = (copied(contract_model, tmp_path / name) for name in ("known", "other"))
    write_weights(known, contract_model, seed=200)
    write_weights(other, contract_model, seed=201)
    verifier = verifier_of(client, "in_place")
    await carried_out(verifier.update("engine-0", server.url, announced(1, known), first=True))
    async with swallowing(server) as url:
        with pytest.raises(WeightsMismatch, match="it did not load these"):
            await carried_out(verifier.update("engine-0", url, announced(2, other), first=False))
        with pytest.raises(WeightsMismatch, match="log-probs of the probe differ"):
            await carried_out(verifier_of(client, "drain").update("engine-0", url, announced(2, other), first=True))
    _, label, _ = await carried_out(verifier.update("engine-0", server.url, announced(2, other), first=False))
    assert await client.weight_version(server.url) == label


def copied(model: Path, directory: Path) -> Path:
    """A directory with the model's config, for other weights."""
    directory.mkdir()
    (directory / "config.json").write_bytes((model / "config.json").read_bytes())
    return directory
