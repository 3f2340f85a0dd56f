"""Weights that are proven: 20 updates in a row, each against other servers, and a server that only says yes."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import anyio
import pytest
from aiohttp import web

from actors.rollout.engines.weights.loads import Loads
from actors.rollout.engines.weights.proof import TOLERANCE, WeightsMismatch, probe_difference
from actors.rollout.engines.weights.prover import Prover
from actors.rollout.engines.weights.updater import Mode, Updater
from actors.rollout.sglang.client import SglangClient
from messages import WeightProbe, WeightsAnnounced
from runtime.checksums import checksums_of
from tests.sglang.server import EMBEDDED, TP1, Server, checksum_of, start, wait_until_up
from tests.support.embedded_engine import post
from tests.support.rollout import announcement
from tests.support.tiny_models import QWEN2, QWEN3, teacher_forced, write_model, write_weights

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
    *(pytest.param(EMBEDDED, model, True, marks=pytest.mark.sglang, id=f"embedded, {model}") for model in MODELS),
    pytest.param(TP1, "biases, tied head", False, marks=pytest.mark.sglang_all, id="sglang"),
    *(pytest.param(TP1, model, True, marks=pytest.mark.sglang_all, id=f"sglang, fresh, {model}") for model in MODELS),
]


def announced(version: int, directory: Path) -> WeightsAnnounced:
    """As a trainer announces a directory; its forward pass is transformers'."""
    log_probs = teacher_forced(directory, [TOKENS[0]], list(TOKENS[1:])).tolist()
    probe = WeightProbe(token_ids=TOKENS, log_probs=(0.0, *log_probs))
    return announcement(version, path=str(directory), checksum=checksums_of(directory).total, probe=probe)


def versions(root: Path, model: Path, changes: dict[str, Any]) -> Iterator[tuple[int, Path]]:
    """Directories of random weights, every tensor drawn anew."""
    for version in range(1, NUM_UPDATES + 1):
        directory = write_model(root / f"v{version}", seed=version, **changes)
        write_weights(directory, model, seed=100 + version)
        yield version, directory


@contextmanager
def running(layout: str, model: Path, directory: Path, *flags: str) -> Iterator[Server]:
    """A server of its own, for as long as the block lasts."""
    server = start(layout, model, directory, *flags)
    try:
        wait_until_up(server)
        yield server
    finally:
        server.stop()


class Second:
    """The server that is compared with: kept, and replaced by a freshly started one where that is wanted."""

    def __init__(self, layout: str, model: Path, logs: Path) -> None:
        self._layout = layout
        self._model = model
        self._logs = logs
        self._server: Server | None = None

    def checksum(self, directory: Path, *, fresh: bool) -> str:
        """What it holds once it has loaded a directory: when it started, or now."""
        if fresh or self._server is None:
            self.stop()
            started_on = ("--model-path", str(directory), "--load-format", "auto") if fresh else ()
            self._server = start(self._layout, self._model, self._logs, *started_on)
            wait_until_up(self._server)
        if not fresh:
            body = {"model_path": str(directory), "load_format": "auto"}
            status, answer = post(f"{self._server.url}/update_weights_from_disk", body)
            assert status == 200, answer
        return checksum_of(self._server)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None


async def nothing_to_interrupt(_: str) -> None:
    await anyio.sleep_forever()


def prover_of(client: SglangClient, mode: Mode) -> Prover:
    updater = Updater(client, mode)
    updater.interrupt_by(nothing_to_interrupt)
    return Prover(client, updater, Loads(), verify="always", trainer_dtype="float32")


@pytest.mark.behaviour("20 updates: each is proven, changes the probe, and equals what another server has from disk")
@pytest.mark.parametrize(("layout", "kind", "fresh"), CASES)
async def test_twenty_updates_are_proven(layout: str, kind: str, fresh: bool, tmp_path: Path) -> None:
    changes = MODELS[kind]
    model = write_model(tmp_path / "model", tokenizer=True, **changes)
    second = Second(layout, model, tmp_path)
    with running(layout, model, tmp_path) as server:
        try:
            async with aiohttp.ClientSession() as session:
                client, before = SglangClient(session), None
                provers = {mode: prover_of(client, mode) for mode in MODES}
                for version, directory in versions(tmp_path, model, changes):
                    told = announced(version, directory)
                    assert told.probe is not None
                    prover = provers[MODES[version % len(MODES)]]
                    label = await prover.bring("engine-0", server.url, told, first=False)
                    assert await client.weight_version(server.url) == label
                    if before is not None:
                        assert probe_difference(before, list(told.probe.log_probs)) > TOLERANCE
                    before = told.probe
                    expected = await anyio.to_thread.run_sync(
                        lambda directory=directory, version=version: second.checksum(
                            directory, fresh=fresh and version in FRESH
                        )
                    )
                    assert await client.checksum(server.url) == expected
                await check_that_a_yes_is_not_believed(client, server, model, tmp_path, changes)
        finally:
            second.stop()


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


async def check_that_a_yes_is_not_believed(
    client: SglangClient, server: Server, model: Path, root: Path, changes: dict[str, Any]
) -> None:
    """Of an engine whose weights are known, by its checksum; of one that nobody knows yet, by the probe."""
    known, other = (write_model(root / name, **changes) for name in ("known", "other"))
    write_weights(known, model, seed=200)
    write_weights(other, model, seed=201)
    prover = prover_of(client, "in_place")
    await prover.bring("engine-0", server.url, announced(1, known), first=True)
    async with swallowing(server) as url:
        with pytest.raises(WeightsMismatch, match="it loaded nothing"):
            await prover.bring("engine-0", url, announced(2, other), first=False)
        with pytest.raises(WeightsMismatch, match="log-probs of the probe differ"):
            await prover_of(client, "drain").bring("engine-0", url, announced(2, other), first=True)
    label = await prover.bring("engine-0", server.url, announced(2, other), first=False)
    assert await client.weight_version(server.url) == label
