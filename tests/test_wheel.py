"""The wheel has all code, data and commands: installed outside the repository, it trains a shipped topology.

With the packages of the base alone it has a reward worker.
"""

import json
import os
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from bin.physarum import DOES
from runtime.bus.nats.certificate import own_certificate

ROOT = Path(__file__).parent.parent
SHIPPED = ("actors", "bin", "messages", "runtime", "topologies")
GENERATORS = "topologies/demo/*.py"  # they write the demo data, which is shipped itself
KEPT = {"start-topology", "from-slime", "export-hf", "reward-worker"}  # names that hide no other program
LIMIT_S = 300
BASE_MB = 100  # of our packages and those that they need, without Python and pip
CREDENTIAL = """
kind = "grader"
run = "r"
name = "alice"
url = "nats://127.0.0.1:1"
tls_name = "bus.physarum"
user = "alice"
password = "x"
expires = "2099-01-01T00:00:00Z"
inbox = "_INBOX.r.alice"
stream = "phy-r-work"
grader = "math"
token = "math"
durable = "score-math"
certificate = %s
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S)]


def call(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def tracked() -> list[str]:
    """The files of the shipped packages that are in git."""
    return call("git", "ls-files", *SHIPPED, cwd=ROOT).splitlines()


def scripts() -> set[str]:
    """The scripts of bin/, which have no suffix."""
    return {Path(name).name for name in tracked() if name.startswith("bin/") and not Path(name).suffix}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built without a network from a copy of the tracked files."""
    place = tmp_path_factory.mktemp("wheel")
    for name in ["pyproject.toml", "README.md", "LICENSE", *tracked()]:
        target = place / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(place)]
    call(sys.executable, "-m", "pip", "wheel", *options, str(place / "source"), cwd=place)
    (built,) = place.glob("physarum-*.whl")
    return built


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of an environment with the wheel; other packages come from the environment of the tests."""
    place = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(place, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    options = ["--quiet", "--no-deps", "--no-index", "--no-warn-script-location"]
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install"]
    call(*pip, *options, str(wheel), cwd=place)
    paths = "".join(f"{path}\n" for path in site.getsitepackages())
    (place / "lib" / version / "site-packages" / "packages_of_the_tests.pth").write_text(paths)
    return place / "bin"


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what it needs by default, in the versions of the lock."""
    place = tmp_path_factory.mktemp("base") / "venv"
    venv.create(place, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install"]
    call(*pip, "--quiet", "--constraint", str(ROOT / "requirements" / "laptop.lock"), str(wheel), cwd=place)
    return place


def test_the_wheel_has_every_tracked_file_of_its_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {name for name in tracked() if not Path(name).match(GENERATORS)}
    assert packed == expected - {f"bin/{name}" for name in scripts()}


def test_an_installed_command_trains_a_shipped_topology(commands: Path, tmp_path: Path) -> None:
    settings = ("--set", "train.num_steps=3", "--set", "engines.policy.router=sglang-router")
    settings += ("--set", "rollout.rollout_batch_size=16")
    shown = call(commands / "physarum", "start", "laptop", *settings, cwd=tmp_path)
    assert "runs/laptop, dispatcher sglang-router (round_robin)\n" in shown
    assert f"{commands / 'physarum'} start laptop" in shown, shown  # the command that starts it again
    run_dir = tmp_path / "runs" / "laptop"
    result = json.loads((run_dir / "result.json").read_text())["result"]
    topology = json.loads((run_dir / "topology.json").read_text())
    assert result["steps"] == 3
    assert result["groups"]["issued"] == result["groups"]["trained"] == 3 * 16
    assert topology["model"]["hf_checkpoint"].startswith(str(commands.parent))
    assert "trained" in call(commands / "physarum", "ledger", "laptop", cwd=tmp_path)  # exit code 0: the books close
    call(commands / "physarum", "export", "laptop", "--out", "model", cwd=tmp_path)
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_an_installed_command_finds_the_functions_of_a_shipped_example(commands: Path, tmp_path: Path) -> None:
    assert "valid" in call(commands / "physarum", "check", "examples/own-reward", cwd=tmp_path)


def test_every_installed_command_answers_help_with_its_name(commands: Path, tmp_path: Path) -> None:
    for name in KEPT:
        assert call(commands / name, "--help", cwd=tmp_path).startswith(f"usage: {name} ")
    for verb in DOES:
        assert call(commands / "physarum", verb, "--help", cwd=tmp_path).startswith(f"usage: physarum {verb} ")
    assert not {path.name for path in commands.iterdir()} & (scripts() - KEPT - {"physarum"})
    call(commands / "physarum", "describe-settings", cwd=tmp_path)
    assert (tmp_path / "docs" / "reference" / "settings.md").exists()


def test_the_base_package_is_small_and_has_a_reward_worker(base: Path, tmp_path: Path) -> None:
    (packages,) = base.glob("lib/python3*/site-packages")
    size_mb = sum(path.stat().st_size for path in packages.rglob("*") if path.is_file()) / 1e6
    assert size_mb < BASE_MB, {path.name: path.stat().st_size for path in packages.iterdir()}
    command = base / "bin" / "physarum"
    assert call(command, "reward-worker", "--help", cwd=tmp_path).startswith("usage: physarum reward-worker ")
    credential = tmp_path / "alice.toml"
    credential.touch(mode=0o600)
    credential.write_text(CREDENTIAL % json.dumps(own_certificate(tmp_path / "bus").pem()))
    (tmp_path / "mine.py").write_text("def grade(sample):\n    return 1.0\n")
    with subprocess.Popen(
        [command, "reward-worker", credential, "mine.py:grade"], cwd=tmp_path, stderr=subprocess.PIPE
    ) as worker:
        assert worker.stderr is not None
        first = worker.stderr.readline().decode()  # the grader is loaded, and a connection was tried
        worker.terminate()
    assert "not connected, trying again" in first
    assert worker.returncode == 0


def test_a_start_names_the_missing_extra(base: Path, tmp_path: Path) -> None:
    command = [base / "bin" / "physarum", "start", "laptop"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith(', not installed here: pip install "physarum[run]"\n'), done.stderr
    assert "Traceback" not in done.stderr
