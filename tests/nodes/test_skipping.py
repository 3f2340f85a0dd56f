"""Where no machine can be made, tests marked `nodes` say so: they are skipped, and in CI they fail."""

import os
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
        timeout=50,
        check=False,
    )
    assert "nodes: not run here, because " in done.stdout
    assert summary in done.stdout
    assert done.returncode == bool(required)
