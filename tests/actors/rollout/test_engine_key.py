"""Engines and routers as a run starts them answer nobody without the run's key, apart from what is listed here."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.processes import process_specs
from actors.tiny_engine.http.server import TinyServer
from runtime.bus.addresses import ENGINE_KEY_VARIABLE, engine_key
from runtime.bus.bus import Bus
from runtime.node.supervisor.ports import free_port
from runtime.settings.load import load_topology
from runtime.settings.processes import ProcessSpec, with_address
from tests.fixtures.nats import eventually
from tests.support.tiny_client import EngineClient, generate_body
from tests.support.tiny_engine import ROOT, wait_until_200, write_config

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

KEY = "sw0rdf1sh"
ENGINE_OPEN = {"/health", "/health_generate"}  # as at SGLang's own server
ROUTER_OPEN = {  # sglang-router 0.3.2, docs/run/security.md: numbers and names, no prompt and no token
    "/liveness",
    "/readiness",
    "/health",
    "/health_generate",
    "/v1/models",
    "/get_server_info",
    "/engine_metrics",
}
ROUTER_CALLS = [
    *(("GET", path) for path in sorted(ROUTER_OPEN)),
    *(("GET", path) for path in ("/workers", "/get_loads", "/get_model_info", "/v1/tokenizers", "/ha/status")),
    *(("POST", path) for path in ("/workers", "/flush_cache", "/generate", "/v1/completions", "/v1/chat/completions")),
    *(("POST", path) for path in ("/v1/embeddings", "/v1/responses", "/v1/conversations", "/v1/tokenize", "/wasm")),
    ("DELETE", "/workers/00000000-0000-0000-0000-000000000000"),
]


@contextmanager
def process_of(spec: ProcessSpec, ready: str) -> Iterator[tuple[str, int]]:
    """A process of a run with a key: its URL and process id."""
    port = free_port()

    def filled(text: str) -> str:
        return with_address(text, "127.0.0.1", port)

    environment = {**os.environ, **spec.env, ENGINE_KEY_VARIABLE: KEY}
    process = subprocess.Popen(
        [filled(word) for word in spec.command],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until_200(f"http://127.0.0.1:{port}{ready}", process)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.communicate(timeout=10)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[str, int]]]:
    """An engine and a router of the laptop topology, on a tiny model."""
    directory: Path = tmp_path_factory.mktemp("guarded")
    write_config(directory)
    changes = [f"model.hf_checkpoint={directory}", "engines.policy.router=sglang-router"]
    topology = load_topology(ROOT / "topologies" / "laptop.toml", changes).topology
    specs = {spec.name: spec for spec in process_specs(topology, "local", directory)}
    with ExitStack() as stack:
        engine = specs["engine.policy.0"]
        command = ["dummy" if word == "auto" else word for word in engine.command]
        yield {
            "engine": stack.enter_context(
                process_of(ProcessSpec(name="engine", command=tuple(command), env=engine.env), "/health")
            ),
            "router": stack.enter_context(process_of(specs["router.policy"], "/liveness")),
        }


def with_key(url: str) -> EngineClient:
    return EngineClient(url, {"Authorization": f"Bearer {KEY}"})


def endpoints() -> list[tuple[str, str]]:
    server: Any = TinyServer.__new__(TinyServer)
    server._frontend = None
    found = [(method, path) for methods, paths, _ in server._endpoints() for method in methods for path in paths]
    return [*found, ("POST", "/generate"), ("GET", "/nothing")]


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}])
async def test_an_engine_refuses_every_call_without_the_key(
    servers: dict[str, tuple[str, int]], headers: dict[str, str]
) -> None:
    answered: set[str] = set()
    async with EngineClient(servers["engine"][0], headers) as client:
        for method, path in endpoints():
            answer = await client.request(method, path, generate_body())
            if answer.status != 401:
                answered.add(path)
    assert answered == ENGINE_OPEN


async def test_a_router_refuses_every_call_without_the_key_but_a_few_that_show_little(
    servers: dict[str, tuple[str, int]],
) -> None:
    answered: set[str] = set()
    async with EngineClient(servers["router"][0]) as client:
        for method, path in ROUTER_CALLS:
            answer = await client.request(method, path, {"url": "http://127.0.0.1:1", **generate_body()})
            if answer.status not in (401, 404) and not (path == "/get_model_info" and answer.status == 503):
                answered.add(path)
    assert answered == ROUTER_OPEN


async def test_with_the_key_a_request_passes_router_and_engine(servers: dict[str, tuple[str, int]]) -> None:
    engine, router = servers["engine"][0], servers["router"][0]
    async with with_key(engine) as own, with_key(router) as client:
        assert (await own.get("/ready")).status == 200
        await client.post("/workers", {"url": engine, "api_key": KEY})

        async def is_registered() -> bool:
            return any(worker["is_healthy"] for worker in (await client.get("/workers")).body["workers"])

        await eventually(is_registered)
        assert len((await client.generate(max_new_tokens=3))["output_ids"]) == 3
    async with EngineClient(router) as stranger:
        assert (await stranger.get("/get_model_info")).status == 401  # the engine says so


def test_the_key_is_on_no_command_line(servers: dict[str, tuple[str, int]]) -> None:
    for _, pid in servers.values():
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            assert not any(KEY in word for word in process.cmdline())


async def test_a_run_has_one_key(bus: Bus) -> None:
    first, second = await engine_key(bus.kv), await engine_key(bus.kv)
    assert first == second
    assert len(first.reveal()) >= 32
