"""Models that are named as on the hub: found in its cache, asked for, or refused with the reason."""

import http.server
import json
import shutil
import threading
from collections.abc import Iterator
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
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield url
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
        "and HF_HUB_OFFLINE forbids a download\n"
    )


def test_the_check_says_what_a_start_would_download_and_downloads_nothing(
    cache: Path, hub: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check("model.random_init=false") == 0
    assert capsys.readouterr().err == (
        f"{SAYS}a start downloads 2 files of 3.0 GiB from {hub} to {cache}; a check does not download it\n"
    )
    assert not cache.exists()


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
