"""SGLang as a run starts it: arguments by its own list, the key, seeds and limits."""

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.processes import process_specs
from actors.rollout.sglang.server_arguments import engine_problems
from runtime.bus.addresses import ENGINE_KEY_VARIABLE
from runtime.settings.load import load_topology
from runtime.settings.processes import with_address
from runtime.settings.tables.engines import EngineConfig
from tests.sglang.server import (
    ROOT,
    SGLANG_START_S,
    SHIM,
    TP1,
    Server,
    port_for_slow_start,
    sglang_python,
    wait_until_up,
)

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(2 * SGLANG_START_S)]

KEY = "sw0rdf1sh"
OPEN = {"/health", "/ready"}  # without a key; they say whether it is up
ENV = {"PYTHONPATH": str(SHIM), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
CPU: dict[str, Any] = {
    **{"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "none"},
    **{"disable_overlap_schedule": True, "skip_server_warmup": True, "sleep_on_idle": True},
}
TYPED: dict[str, Any] = {
    "enable_mixed_chunk": False,
    "log_requests_target": ["stdout"],
    "preferred_sampling_params": {"top_p": 1.0},
    "stream_interval": 8,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("asked")


def problems(cache: Path, arguments: dict[str, Any]) -> list[str]:
    engine = EngineConfig(python=sglang_python(), env=ENV, sglang=arguments)
    return [str(problem) for problem in engine_problems("engines.policy", engine, cache=cache)]


def test_the_servers_own_list_accepts_what_it_takes_and_refuses_the_rest(cache: Path) -> None:
    assert problems(cache, CPU | TYPED) == []
    wrong = {"mem_fraction_statik": 0.5, "mem_fraction_static": "half", "skip_server_warmup": 1, "dtype": "float31"}
    found = problems(cache, wrong)
    assert "no such argument, did you mean mem_fraction_static?" in found[0]
    assert [line.rpartition(": ")[0].partition(" = ")[0] for line in found[1:]] == [
        f"engines.policy.sglang.{name}" for name in list(wrong)[1:]
    ]
    assert all("allowed: " in line for line in found)


@pytest.fixture(autouse=True)
def leaves_no_child_process() -> None:
    """Seen once the module's server is stopped, by the session's own look."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An engine of the laptop topology."""
    pool = {"kind": "sglang", "concurrency": 4, "max_total_tokens": 4096, "python": sglang_python(), "env": ENV}
    overrides = [f"engines.policy={toml({**pool, 'sglang': CPU | TYPED})}", "run.seed=77", "rollout.max_context_len=58"]
    topology = load_topology(ROOT / "topologies" / "laptop.toml", overrides).topology
    directory = tmp_path_factory.mktemp("launched")
    (spec,) = [spec for spec in process_specs(topology, "local", directory) if spec.name == "engine.policy.0"]
    port = port_for_slow_start()
    words = [with_address(word, "127.0.0.1", port) for word in spec.command]
    environment = {**os.environ, **spec.env, ENGINE_KEY_VARIABLE: KEY}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
    server = Server(TP1, f"http://127.0.0.1:{port}", directory / "log", [process])
    try:
        wait_until_up(server)
        yield server
    finally:
        server.stop()


def status(url: str, body: object = None, key: str | None = None) -> int:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_it_answers_nobody_without_the_key_of_the_run(server: Server) -> None:
    url = server.url
    asked = ["/health", "/ready", "/model_info", "/server_info", "/v1/loads", "/v1/models"]
    posted = ["/generate", "/pause_generation", "/continue_generation", "/update_weights_from_disk", "/weights_checker"]
    for key in (None, "wrong"):
        open_to_all = {path for path in asked if status(url + path, key=key) != 401}
        open_to_all |= {path for path in posted if status(url + path, {}, key) != 401}
        assert open_to_all == OPEN
    body = {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 2, "sampling_seed": 5}}
    assert status(f"{url}/generate", body, KEY) == 200


def test_the_key_is_on_no_command_line(server: Server) -> None:
    processes = server.tree()
    assert len(processes) > 1
    assert not [word for process in processes for word in process.cmdline() if KEY in word]


def test_it_has_the_seed_the_limits_and_every_argument_in_its_type(server: Server) -> None:
    request = urllib.request.Request(f"{server.url}/server_info", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        told = json.load(answer)
    expected = {"random_seed": 77, "max_total_tokens": 4096, "context_length": 64, "max_running_requests": 4, **TYPED}
    assert {name: told[name] for name in expected} == expected


def toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(item)}" for name, item in value.items()) + "}"
    return json.dumps(value)
