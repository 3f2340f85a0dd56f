"""What nodes record about the versions of what a run uses, and what a report reads of it."""

import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from runtime.node import versions
from runtime.node.versions import VERSIONS_FILE, record_versions, versions_in
from tests.build.topology import topology_with


def test_a_node_records_its_own_versions_and_those_of_each_interpreter(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!{sys.executable}\nimport os, json; print(json.dumps({{"sglang": os.environ["ASKED"]}}))\n')
    python.chmod(0o755)
    pool: dict[str, Any] = {"kind": "sglang", "num_engines": 1, "python": str(python), "env": {"ASKED": "0.5.9"}}
    record_versions(tmp_path, topology_with(engines={"policy": pool}), "local")
    found = versions_in(tmp_path)
    assert found["local: engines.policy: sglang"] == "0.5.9"
    assert found["local: Python"] == platform.python_version()
    assert {name: found[f"local: {name}"] for name in versions.PACKAGES} == {
        name: version(name) for name in versions.PACKAGES
    }
    assert found["local: nats-server"].startswith("v2.")
    assert "source" in found["local: physarum"]


def test_an_interpreter_that_does_not_answer_is_unknown(tmp_path: Path) -> None:
    pool: dict[str, Any] = {"kind": "sglang", "num_engines": 1, "python": "/none/python"}
    record_versions(tmp_path, topology_with(engines={"policy": pool}), "local")
    assert versions_in(tmp_path)["local: engines.policy: sglang"] == "unknown"


def test_a_resumed_run_shows_its_earlier_versions_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology, path = topology_with(), tmp_path / VERSIONS_FILE.format("local")
    installed = {name: "1" for name in versions.PACKAGES}
    monkeypatch.setattr(versions, "version", installed.__getitem__)
    record_versions(tmp_path, topology, "local")
    record_versions(tmp_path, topology, "local")
    assert path.read_bytes().count(b"\n") == 1
    installed["torch"] = "2"
    record_versions(tmp_path, topology, "local")
    found = versions_in(tmp_path)
    assert (found["local: torch"], found["local: msgspec"]) == ("2 (earlier 1)", "1")
    for number in range(3, 3 + versions.KEPT):
        installed["torch"] = str(number)
        record_versions(tmp_path, topology, "local")
    assert path.read_bytes().count(b"\n") == versions.KEPT


def test_a_directory_without_records_has_none(tmp_path: Path) -> None:
    (tmp_path / VERSIONS_FILE.format("n")).write_bytes(b"[]\n\xff\n")
    assert versions_in(tmp_path) == {}
