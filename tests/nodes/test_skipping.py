"""Where no machine can be made, tests marked `nodes` say so: they are skipped, and in CI they fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEST = "import pytest\n\n@pytest.mark.nodes\ndef test_needs_machines():\n    raise SystemError('it ran')\n"


@pytest.mark.slow
@pytest.mark.parametrize(("required", "summary"), [("", "1 skipped"), ("required", "1 error")])
def test_no_machine_is_a_skip_with_its_reason_and_in_ci_a_failure(tmp_path: Path, required: str, summary: str) -> None:
    path = tmp_path / "test_one.py"
    path.write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-c", "pyproject.toml", "-m", "nodes"]
    environment = os.environ | {"PATH": str(tmp_path), "PHYSARUM_NODES": required}  # without nsenter
    done = subprocess.run(
        [*command, str(path)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=50, check=False
    )
    assert "nodes: not run here, because [Errno 2] No such file or directory: 'nsenter'" in done.stdout
    assert summary in done.stdout
    assert done.returncode == bool(required)
