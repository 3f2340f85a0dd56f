"""Where no machine can be made, tests marked `nodes` say so: they are skipped, and in CI they fail."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "[pytest]\nmarkers = nodes\n"
TEST = "import pytest\n\n@pytest.mark.nodes\ndef test_needs_machines():\n    raise SystemError('it ran')\n"


@pytest.mark.parametrize(("required", "summary"), [("", "1 skipped"), ("required", "1 error")])
def test_no_machine_is_a_skip_with_its_reason_and_in_ci_a_failure(tmp_path: Path, required: str, summary: str) -> None:
    (tmp_path / "pytest.ini").write_text(CONFIG)
    (tmp_path / "test_one.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "tests.fixtures.machines", "-p", "no:cacheprovider"]
    environment = os.environ | {"PATH": str(tmp_path), "PHYSARUM_NODES": required}  # without nsenter
    done = subprocess.run(
        [*command, "-c", str(tmp_path / "pytest.ini"), str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "nodes: not run here, because " in done.stdout
    assert summary in done.stdout
    assert done.returncode == bool(required)
    assert ("PHYSARUM_NODES=skip bin/test --all" in done.stdout) is bool(required)


@pytest.mark.parametrize(("given", "passed_on"), [(None, "required"), ("skip", "skip")])
def test_all_of_ci_requires_machines_unless_the_developer_skips_them(
    tmp_path: Path, given: str | None, passed_on: str
) -> None:
    (tmp_path / "bin").mkdir()
    shutil.copy(ROOT / "bin" / "test", tmp_path / "bin")
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    for tool in (tmp_path / "bin" / "setup", tools / "python", tools / "ruff", tools / "pyright"):
        tool.write_text('#!/bin/sh\necho "PHYSARUM_NODES=$PHYSARUM_NODES $*"\n')
        tool.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PHYSARUM_NODES"}
    if given is not None:
        environment["PHYSARUM_NODES"] = given
    done = subprocess.run(
        [tmp_path / "bin" / "test", "--all"], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout
    (stage,) = [line for line in done.stdout.splitlines() if line.endswith(" tests/nodes") and "PHYSARUM" in line]
    assert stage.startswith(f"PHYSARUM_NODES={passed_on} ")
