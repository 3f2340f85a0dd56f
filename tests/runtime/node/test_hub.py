"""Models that are named as on the hub: found in its cache, asked for, or refused with the reason."""

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from actors.processes import process_specs
from bin.start_topology import main
from runtime.node.checks.hub import with_cached
from runtime.settings.load import load_topology

ROOT = Path(__file__).resolve().parents[3]
LAPTOP = ROOT / "topologies" / "laptop.toml"
MODEL = ROOT / "topologies/demo/models/reverse-digits"
NAME = "demo-models/reverse-digits"
COMMIT = "a" * 40
SAYS = f'note: model.hf_checkpoint = "{NAME}": '


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put_into(cache: Path) -> Path:
    """The demo model as the hub's own tools lay it down."""
    repository = cache / "models--demo-models--reverse-digits"
    snapshot = repository / "snapshots" / COMMIT
    shutil.copytree(MODEL, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


def check(*overrides: str) -> int:
    given = (f"model.hf_checkpoint={NAME}", "run.name=named-in-the-hub", *overrides)  # runs/laptop may be somebody's
    return main([str(LAPTOP), "--check", *(word for item in given for word in ("--set", item))])


class Hub(http.server.BaseHTTPRequestHandler):
    """Knows one model and lists its files."""

    def do_GET(self) -> None:
        known = self.path.startswith(f"/api/models/{NAME}")
        files = [{"rfilename": "config.json", "size": 1 << 10}, {"rfilename": "model.safetensors", "size": 3 << 30}]
        body = json.dumps({"id": NAME, "modelId": NAME, "siblings": [*files, {"rfilename": "x.bin", "size": 1}]})
        self.send_response(200 if known else 404)
        if not known:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(body.encode() if known else b"{}")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with served(Hub, monkeypatch) as url:
        yield url


@contextmanager
def served(handler: type[http.server.BaseHTTPRequestHandler], monkeypatch: pytest.MonkeyPatch) -> Generator[str]:
    """Serve a hub and name it to the hub's tools."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield url
        finally:
            server.shutdown()
            thread.join()


def test_a_name_in_the_hubs_cache_becomes_a_path_for_every_actor(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = put_into(cache)
    assert check() == 0
    assert capsys.readouterr().err == f"{SAYS}found in the hub's cache, {snapshot}\n"
    overrides = (f"model.hf_checkpoint={NAME}", f"model.ref_load={NAME}", "engines.policy.kind=sglang")
    topology = with_cached(load_topology(LAPTOP, (*overrides[:1], overrides[2])), print).topology
    assert topology.model.hf_checkpoint == str(snapshot)
    (engine,) = [spec for spec in process_specs(topology, "local", cache) if spec.name.startswith("engine.")]
    assert str(snapshot) in engine.command


def test_a_cache_without_the_weights_is_no_model_for_who_needs_them(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = put_into(cache)
    assert check("model.random_init=false") == 2
    assert "HF_HUB_OFFLINE forbids a download" in capsys.readouterr().err
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-1.safetensors").write_bytes(b"")
    loaded = load_topology(LAPTOP, (f"model.hf_checkpoint={NAME}", "model.random_init=false"))
    assert with_cached(loaded, print).topology.model.hf_checkpoint == NAME
    (snapshot / "model-2.safetensors").write_bytes(b"")
    assert with_cached(loaded, print).topology.model.hf_checkpoint == str(snapshot)


def test_a_missing_name_is_refused_with_where_it_was_looked_for(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check() == 2
    assert capsys.readouterr().err == (
        f'--set: model.hf_checkpoint = "{NAME}": no such directory, not in the hub\'s cache ({cache}), '
        "and HF_HUB_OFFLINE forbids a download; "
        "a directory works too, and bin/import-gguf writes one from a GGUF file\n"
    )


def test_the_check_says_what_a_start_would_download_and_downloads_nothing(
    cache: Path, hub: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check("model.random_init=false") == 0
    assert capsys.readouterr().err == (
        f"{SAYS}a start downloads 2 files of 3.0 GiB from {hub} to {cache}; a check does not download it\n"
    )
    assert not cache.exists()


class Mirror(http.server.BaseHTTPRequestHandler):
    """Serves the demo model as the hub does: its list of files, and each file of the commit."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        names = sorted(path.name for path in MODEL.iterdir())
        path = self.path.partition("?")[0]
        resolved = f"/{NAME}/resolve/{COMMIT}/"
        if path == f"/api/models/{NAME}/tree/{COMMIT}":
            sizes = {name: (MODEL / name).stat().st_size for name in names}
            files = [{"type": "file", "path": name, "size": size, "oid": name} for name, size in sizes.items()]
            body = json.dumps(files).encode()
        elif path.startswith(f"/api/models/{NAME}"):
            siblings = [{"rfilename": name} for name in names]
            body = json.dumps({"id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": siblings}).encode()
        elif path.startswith(resolved) and path.removeprefix(resolved) in names:
            body = (MODEL / path.removeprefix(resolved)).read_bytes()
        else:
            self.send_error(404)
            return
        self.send_response(200)
        headers = {"ETag": f'"{len(body)}"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(body))}
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_model_is_downloaded_before_the_run_and_a_start_needs_no_network_then(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(LAPTOP), "--download", "--set", f"model.hf_checkpoint={NAME}"]
    with served(Mirror, monkeypatch) as url:  # a process of its own: the hub's tools read the variable when imported
        environment = {**os.environ, "HF_ENDPOINT": url, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-P", str(ROOT / "bin" / "physarum.py"), "start-topology", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    place = Path(said.rpartition(", ")[2].strip())
    assert said.startswith(f'model.hf_checkpoint = "{NAME}": downloaded, {cache}')
    assert (place / "config.json").read_bytes() == (MODEL / "config.json").read_bytes()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert check() == 0
    assert capsys.readouterr().err == f"{SAYS}found in the hub's cache, {place}\n"
    assert main(words) == 0
    assert "found in the hub's cache" in capsys.readouterr().out
    assert main([str(LAPTOP), "--download"]) == 0
    assert capsys.readouterr().out == "the topology names no model as on the hub\n"
    assert main([*words, "--set", "model.hf_checkpoint=demo-models/other"]) == 2
    assert "HF_HUB_OFFLINE forbids a download" in capsys.readouterr().err


def test_a_name_that_the_hub_has_not_is_refused_by_check_and_start(
    cache: Path, hub: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(LAPTOP), "--set", "model.hf_checkpoint=demo-models/other", "--set", f"run.dir={tmp_path / 'runs'}"]
    for words in ([*command, "--check"], command):
        assert main(words) == 2
        assert f"and {hub} has no such model; a private one needs HF_TOKEN" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_hub_that_cannot_be_reached_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert check() == 2
    assert f"not in the hub's cache ({cache}), and http://127.0.0.1:9 did not answer: " in capsys.readouterr().err


def test_code_of_a_model_runs_only_when_asked() -> None:
    for trusted in (False, True):
        overrides = ("engines.policy.kind=sglang", f"model.trust_remote_code={str(trusted).lower()}")
        topology = load_topology(LAPTOP, overrides).topology
        (engine,) = [spec for spec in process_specs(topology, "local", ROOT) if spec.name.startswith("engine.")]
        assert ("--trust-remote-code" in engine.command) == trusted
