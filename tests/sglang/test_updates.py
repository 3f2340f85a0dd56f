"""20 updates in a row by each transport: each is proven, and equals what another server has of the same files."""

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
import pytest
from safetensors.torch import save_file

from actors.rollout.engines.weights.updater import Mode
from actors.rollout.engines.weights.verification import FLOORS, probe_difference
from actors.rollout.sglang.client import SglangClient
from messages import WeightProbe
from runtime.models.checksums import checksums_of
from tests.sglang.server import TINY, TP1, TWO_PROCESSES, Server, Servers, checksum_of, kept_servers, wait_until_up
from tests.sglang.server import start as start_server
from tests.support.rollout import announcement
from tests.support.tiny_engine import post, write_config
from tests.support.tiny_models import QWEN2, QWEN3, QWEN3_MOE, teacher_forced, write_tokenizer
from tests.support.weight_line import ENGINE, Halves, Tensors, Transport, carried_out, drawn, verifier_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(1200)]

NUM_UPDATES: Final = 20
FRESH: Final = (1, NUM_UPDATES)  # these the other server has loaded when it started
TOKENS: Final = tuple((7 * place) % 60 + 2 for place in range(64))
CLOSE: Final = 1e-3  # of each log-prob
MODES: Final[tuple[Mode, ...]] = ("drain", "abort", "retract", "in_place")
MODELS: Final[dict[str, dict[str, Any]]] = {
    "qwen3, tied": {**QWEN3, "tie_word_embeddings": True},
    "qwen2, biases": QWEN2,
    "qwen3-moe": QWEN3_MOE,
}
CASES: Final = [
    pytest.param((TINY, "qwen3, tied"), marks=pytest.mark.sglang, id="tiny, qwen3, tied"),
    pytest.param((TINY, "qwen2, biases"), marks=pytest.mark.nightly, id="tiny, qwen2, biases"),
    *(
        pytest.param((layout, name), marks=pytest.mark.nightly, id=f"{layout}, {name}")
        for layout in (TP1, TWO_PROCESSES)
        for name in MODELS
    ),
]


@dataclass
class Version:
    """Weights, what transformers makes of them, and what an engine that read them from files says."""

    number: int
    directory: Path
    tensors: Tensors
    probe: WeightProbe
    checksum: str


@dataclass
class Case:
    """An engine, which is kept over the transports, and the weights that it is given."""

    model: Path
    servers: Servers
    layout: str
    versions: list[Version]

    @property
    def server(self) -> Server:
        return self.servers.get(self.layout)

    def pids(self) -> set[int]:
        return self.servers.pids()


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    layout, name = request.param
    root = tmp_path_factory.mktemp("updates")
    model = root / "model"
    write_config(model, **MODELS[name])
    write_tokenizer(model)
    versions = written(root, model)
    for version, checksum in zip(versions, said_of(layout, model, versions, root), strict=True):
        version.checksum = checksum
    with kept_servers(model, root) as servers:
        servers.get(layout)
        yield Case(model, servers, layout, versions)


def written(root: Path, model: Path) -> list[Version]:
    """Random weights, every tensor drawn anew, as files too."""
    versions: list[Version] = []
    for number in range(1, NUM_UPDATES + 1):
        directory, tensors = root / f"v{number}", drawn(model, number)
        directory.mkdir()
        (directory / "config.json").write_bytes((model / "config.json").read_bytes())
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        log_probs = teacher_forced(directory, [TOKENS[0]], list(TOKENS[1:])).tolist()
        versions.append(
            Version(number, directory, tensors, WeightProbe(token_ids=TOKENS, log_probs=(0.0, *log_probs)), "")
        )
    return versions


def said_of(layout: str, model: Path, versions: list[Version], logs: Path) -> Iterator[str]:
    """What another server of the layout says of each version: kept, but for those on which it is started."""
    server: Server | None = None
    try:
        for version in versions:
            started_on = ("--model-path", str(version.directory), "--load-format", "auto")
            if version.number in FRESH or server is None:
                if server is not None:
                    server.stop()
                server = start_server(layout, model, logs, *started_on)
                wait_until_up(server)
            else:
                body = {"model_path": str(version.directory), "load_format": "auto"}
                status, answer = post(f"{server.url}/update_weights_from_disk", body)
                assert status == 200, answer
            yield checksum_of(server)
    finally:
        if server is not None:
            server.stop()


@pytest.fixture
async def client() -> AsyncGenerator[SglangClient]:
    async with aiohttp.ClientSession() as session:
        yield SglangClient(session)


async def check(client: SglangClient, case: Case, version: Version, label: str) -> None:
    """The engine holds a version, and computes with it."""
    url = case.server.url
    assert await client.weight_version(url) == label
    assert await client.checksum(url) == version.checksum
    found = np.array((await client.prompt_log_probs(url, TOKENS))[1:], dtype=np.float64)
    assert np.abs(found - np.array(version.probe.log_probs[1:])).max() < CLOSE


def test_each_version_is_another(case: Case) -> None:
    for before, version in zip(case.versions, case.versions[1:], strict=False):
        assert probe_difference(before.probe, list(version.probe.log_probs)) > FLOORS["float32"]
    assert len({version.checksum for version in case.versions}) == NUM_UPDATES


async def test_twenty_updates_from_files(case: Case, client: SglangClient) -> None:
    verifiers = [verifier_of(client, mode) for mode in MODES]
    for version in case.versions:
        told = announcement(
            version.number,
            path=str(version.directory),
            checksum=checksums_of(version.directory).total,
            probe=version.probe,
        )
        verifier = verifiers[version.number % len(MODES)]
        _, label, _ = await carried_out(verifier.update(ENGINE, case.server.url, told, first=False))
        await check(client, case, version, label)


@pytest.mark.parametrize("transport", ["collective", "ipc"])
async def test_twenty_updates_in_sessions(case: Case, client: SglangClient, transport: Transport) -> None:
    """No file is read, and all bytes go this way."""
    log_before = case.server.log.read_text()
    halves = Halves(client, case.server.url, case.model, transport=transport)
    for version in case.versions:
        assert await halves.sync(version.tensors, probe=version.probe) == {}
        assert halves.sent.size_bytes == sum(tensor.nbytes for tensor in version.tensors.values())
        await check(client, case, version, halves.label)
    await halves.leave()
    logged = case.server.log.read_text()[len(log_before) :].lower()
    assert "update_weights_from_disk" not in logged
    assert "safetensors" not in logged
