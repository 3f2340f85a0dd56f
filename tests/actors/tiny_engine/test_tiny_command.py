"""python -m actors.tiny_engine: what it refuses, how it starts and ends."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.tiny_engine import ROOT, RunningEngine, post, running_engine, write_config

DUMMY = ("--load-format", "dummy")


def refused(*flags: str) -> str:
    """Run the command, which must end with 2 and one line on standard error; that line."""
    command = [sys.executable, "-m", "actors.tiny_engine", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200, check=False)
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    (line,) = ended.stderr.strip().splitlines()
    return line


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    assert "nowhere: no such directory" in refused("--model-path", str(tmp_path / "nowhere"))


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    assert "config.json: No such file" in refused("--model-path", str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "'MixtralForCausalLM' is not supported; supported: DeepseekV3"),
        ({"architectures": []}, "'missing' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"is_causal": False}, "is_causal false is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention' needs a sliding_window"),
        ({"model_type": "llama"}, "model_type 'llama' does not match architecture Qwen3ForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "lacks 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"dtype": "int8"}, "dtype 'int8'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_model_it_cannot_compute_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    write_config(tmp_path, **changes)
    assert message in refused("--model-path", str(tmp_path), "--port", "0", *DUMMY)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    write_config(tmp_path)
    assert "neither model.safetensors nor" in refused("--model-path", str(tmp_path), "--port", "0")


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    assert str(tmp_path) in refused("--model-path", str(tmp_path), "--port", "0")


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = refused("--model-path", str(tmp_path), "--port", port, *DUMMY)
    assert f"cannot listen on 127.0.0.1:{port}" in line
    assert "in use" in line


def test_a_context_longer_than_the_models_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path)
    assert "context has 512 tokens" in refused("--model-path", str(tmp_path), "--context-length", "513", *DUMMY)


def test_bad_flags_are_refused_with_the_range(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "actors.tiny_engine", "--model-path", str(tmp_path), "--port", "70000"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200, check=False)
    assert ended.returncode == 2
    assert "70000 is not in 0..65535" in ended.stderr


def test_help_answers_without_torch() -> None:
    program = "import sys; from actors.tiny_engine.__main__ import _parser; _parser(); print('torch' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=200, check=True
    )
    assert ended.stdout.strip() == "False"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_with_requests_running(tmp_path: Path, number: signal.Signals) -> None:
    write_config(tmp_path)
    with running_engine(tmp_path, *DUMMY) as engine, socket.create_connection(tuple_of(engine.url)) as greeting:
        greeting.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(30))  # as sglang-router greets
        greeting.settimeout(10)
        assert b" 400 " in greeting.recv(100)
        end_by(number, engine)


def end_by(number: signal.Signals, engine: RunningEngine) -> None:
    with socket.create_connection(tuple_of(engine.url)) as connection:
        post(f"{engine.url}/slow_down", {"forward_sleep_time": 0.1})  # 50 s
        body = json.dumps({"input_ids": [3], "sampling_params": {"max_new_tokens": 500}, "stream": True}).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: engine\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        connection.sendall(head + body)
        connection.settimeout(10)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        started = time.monotonic()
        engine.process.send_signal(number)
        _, errors = engine.process.communicate(timeout=200)
        assert time.monotonic() - started < 20.0
        assert engine.process.returncode == 0
        assert "Traceback" not in errors
        assert [json.loads(line)["event"] for line in errors.splitlines()] == ["engine_started"]


def tuple_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)
