"""Real tiny engines and routers for tests and benchmarks: tiny configs, server processes, free ports."""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from runtime.node.supervisor.ports import free_port, holder_of

ROOT: Final = Path(__file__).parents[2]
START_TIMEOUT_S: Final = 60.0  # importing torch alone takes 20 s on a loaded machine
END_TIMEOUT_S: Final = 5.0
POLL_S: Final = 0.02
PORTS: Final = 3  # tried one after the other

SMOLLM2: Final[dict[str, Any]] = {  # the shapes of SmolLM2-135M
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


class RunningEngine(NamedTuple):
    url: str
    process: subprocess.Popen[str]


def write_config(directory: Path, **changes: Any) -> None:
    """Write the config.json of a tiny Qwen3 without an end-of-text token."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "dtype": "float32",
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config | changes))


@contextlib.contextmanager
def running_engine(directory: Path, *flags: str) -> Iterator[RunningEngine]:
    """Run a tiny engine in a process of its own on a free port. Yields when ready; ends the process at exit."""
    with contextlib.ExitStack() as stack:
        for _ in range(PORTS):
            port = free_port()
            command = [sys.executable, "-m", "actors.tiny_engine", "--model-path", str(directory), "--port", str(port)]
            process = stack.enter_context(running([*command, *flags]))
            if _listens(process, port):
                break
        url = f"http://127.0.0.1:{port}"
        wait_until_200(f"{url}/ready", process)
        yield RunningEngine(url, process)


def _listens(process: subprocess.Popen[str], port: int) -> bool:
    """Wait until a server listens on its port, and return True, or has ended. Another one may have taken the port."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        if (holder_of(port) or "").startswith(f"process {process.pid} "):
            return True
        time.sleep(POLL_S)
    return False


@contextlib.contextmanager
def running_router(port: int, *worker_urls: str) -> Iterator[str]:
    """Run the real sglang-router, round robin and without retries, with its workers registered and ready."""
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    flags = ["--policy", "round_robin", "--disable-retries", "--log-level", "error"]
    flags += ["--prometheus-port", str(free_port())]
    with running([*command, *flags]) as process:
        url = f"http://127.0.0.1:{port}"
        wait_until_200(f"{url}/liveness", process)
        for worker in worker_urls:
            post(f"{url}/workers", {"url": worker})
        wait_until_200(f"{url}/readiness", process)
        yield url


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    silent = subprocess.DEVNULL  # drops the router's log: standard output belongs to the benchmark
    process = subprocess.Popen(command, stdout=silent, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def post(url: str, body: object) -> tuple[int, Any]:
    """POST JSON. Return the status and the body, decoded if it is JSON."""
    data = json.dumps(body).encode()
    return _fetch(urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"}))


def get(url: str) -> tuple[int, Any]:
    """GET, with the result of `post`."""
    return _fetch(urllib.request.Request(url))


def _fetch(request: urllib.request.Request) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            status, data = response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            status, data = error.code, error.read()
    try:
        return status, json.loads(data)
    except ValueError:
        return status, data.decode()


def wait_until_200(url: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"{process.args} ended with {process.returncode}: {process.communicate()[1]}")
        with contextlib.suppress(OSError):
            if get(url)[0] == 200:
                return
        time.sleep(POLL_S)  # between two polls: the process does not report when it is ready
    raise AssertionError(f"{url} was not ready within {START_TIMEOUT_S} s")
