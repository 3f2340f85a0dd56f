"""bin/setup in a copy of the tree, with a tiny lock and an index of its own: first use, and what may go wrong in it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from bin.setup_venv import compiling
from tests.bin.package_index import PackageIndex, serve_index

ROOT = Path(__file__).parent.parent.parent
LIGHT = (
    "runtime/__init__.py",
    "runtime/util/exit_codes.py",
    "runtime/util/files.py",
    "runtime/settings/__init__.py",
    "runtime/settings/devices.py",
)
COMMAND = """import mould, sys
print("mould", mould.version, *sys.argv[2:])  # the first one is the link by which bin/physarum was called
raise SystemExit(7)
"""


@dataclass
class Checkout:
    """A copy of what set-up needs, and how a person calls it."""

    root: Path
    index: PackageIndex
    cache: Path

    @property
    def environment(self) -> dict[str, str]:
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTHON", "VIRTUAL_ENV"))
        }
        return kept | {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": self.index.url,
            "PIP_CACHE_DIR": str(self.cache),
            "PIP_RETRIES": "1",
            "PHYSARUM_PYTHON": sys.executable,
        }

    def lock(self, *lines: str, name: str = "laptop.lock") -> None:
        (self.root / "requirements" / name).write_text("# a lock\n" + "\n".join(lines) + "\n")

    def call(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.root / command[0]), *command[1:]],
            env=self.environment | environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def start(self, *command: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [str(self.root / command[0]), *command[1:]],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


@contextmanager
def packages(folder: Path) -> Iterator[PackageIndex]:
    folder.mkdir()
    with serve_index(folder) as index:
        index.add("mould", "1.0", requires="spore")
        index.add("mould", "2.0")
        index.add("spore", "1.0")
        yield index


def new_checkout(folder: Path, index: PackageIndex) -> Checkout:
    root = folder / "a checkout"
    (root / "requirements").mkdir(parents=True)
    for name in ("bin/setup", "bin/setup_venv.py", "bin/start-topology", "bin/physarum", *LIGHT):
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "bin" / "physarum.py").write_text(COMMAND)
    (root / "requirements" / "cuda.lock").write_text("# nothing\n")
    checkout = Checkout(root, index, folder / "cache")
    checkout.lock("mould==1.0", "spore==1.0")
    return checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    with packages(tmp_path / "index") as index:
        yield new_checkout(tmp_path, index)


@dataclass
class Ready:
    """A checkout that was set up by two calls at once, and what they answered."""

    checkout: Checkout
    answers: dict[str, tuple[int, str, str]]  # exit code, output, errors
    num_downloads: set[int]


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ready]:
    """Set up once: making an environment takes four seconds of a core."""
    folder = tmp_path_factory.mktemp("ready")
    with packages(folder / "index") as index:
        checkout = new_checkout(folder, index)
        index.hold()
        with checkout.start("bin/start-topology", "one", "--json") as first:
            assert index.asked.wait(90)
            with checkout.start("bin/start-topology", "two") as second:
                assert second.stderr is not None
                waits = second.stderr.readline()
                index.let_go()
                one = first.communicate(timeout=120)
                two = second.communicate(timeout=120)
        answers = {"first": (first.returncode, *one), "second": (second.returncode, two[0], waits + two[1])}
        yield Ready(checkout, answers, set(index.num_downloads.values()))


@pytest.fixture
def copy(ready: Ready, tmp_path: Path) -> Checkout:
    """A copy of the set-up checkout, in another place."""
    root = tmp_path / "else where"
    shutil.copytree(ready.checkout.root, root, symlinks=True)
    return replace(ready.checkout, root=root)


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.mark.slow
def test_of_two_first_calls_at_once_one_sets_up_and_both_run_and_later_calls_only_run(
    ready: Ready, tmp_path: Path
) -> None:
    checkout = ready.checkout
    code, output, errors = ready.answers["first"]
    assert (code, output) == (7, "mould 1.0 one --json\n"), errors
    assert "making .venv with Python" in errors
    assert "installing the 2 packages of requirements/laptop.lock" in errors

    code, output, errors = ready.answers["second"]
    assert (code, output) == (7, "mould 1.0 two\n"), errors
    assert "waiting for another bin/setup of this checkout" in errors.splitlines()[0]
    assert ".venv is up to date" in errors
    assert ready.num_downloads == {1}

    link = tmp_path / "start"
    link.symlink_to(checkout.root / "bin" / "start-topology")
    later = subprocess.run(
        [link, "x"], cwd=tmp_path, env=checkout.environment, capture_output=True, timeout=200, check=False
    )
    assert (later.returncode, later.stdout, later.stderr) == (7, b"mould 1.0 x\n", b"")

    again = checkout.call("bin/setup", PHYSARUM_PYTHON="/nowhere")  # it looks for no interpreter: a stamp is compared
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "setup: .venv is up to date\n")


@pytest.mark.slow
def test_after_a_failed_download_ctrl_c_and_kill_9_the_next_call_begins_anew(checkout: Checkout) -> None:
    with socket.socket() as unused:  # bound, not listening: a connection is refused
        unused.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{unused.getsockname()[1]}/simple"
        failed = checkout.call("bin/start-topology", PIP_INDEX_URL=closed)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "could not install requirements/laptop.lock" in failed.stderr
    assert "No matching distribution found for mould==1.0" in failed.stderr
    assert "the package index did not answer" in failed.stderr
    assert f"pip's output is in {checkout.root}/.venv.log" in failed.stderr
    assert "Connection refused" in (checkout.root / ".venv.log").read_text()

    checkout.index.hold()
    with checkout.start("bin/start-topology") as process:
        assert checkout.index.asked.wait(90)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=200)
    assert process.returncode == 130, errors
    assert errors.endswith("setup: interrupted; the next call continues\n")
    checkout.index.let_go()

    checkout.index.hold()
    with checkout.start("bin/setup") as process:
        assert checkout.index.asked.wait(90)
        pip = descendants(process.pid)
        assert pip
        process.kill()
        process.communicate(timeout=200)
    assert psutil.wait_procs(pip, timeout=5)[1] == []
    checkout.index.let_go()

    again = checkout.call("bin/start-topology")
    assert "removing an unfinished .venv" in again.stderr
    assert again.stdout == "mould 1.0\n"


@pytest.mark.slow
def test_a_moved_checkout_is_repaired_without_the_index_and_an_incomplete_lock_is_refused(
    ready: Ready, copy: Checkout
) -> None:
    moved = copy.call("bin/start-topology", PIP_INDEX_URL="http://127.0.0.1:9")
    assert f".venv was moved here from {ready.checkout.root}; repairing it" in moved.stderr
    assert moved.stdout == "mould 1.0\n"
    assert copy.call("bin/start-topology", PIP_INDEX_URL="http://127.0.0.1:9").stderr == ""
    pip = subprocess.run([copy.root / ".venv/bin/pip", "--version"], capture_output=True, text=True, check=True)
    assert str(copy.root) in pip.stdout

    copy.lock("mould==1.0")
    incomplete = copy.call("bin/setup")
    assert incomplete.returncode == 1
    assert "could not verify the packages" in incomplete.stderr
    assert "mould 1.0 requires spore, which is not installed" in incomplete.stderr


@pytest.mark.slow
def test_changed_lock_updates_what_is_there(copy: Checkout) -> None:
    assert copy.call("bin/setup").returncode == 0
    copy.lock("mould==2.0")
    updated = copy.call("bin/start-topology")
    assert updated.stdout == "mould 2.0\n"
    assert "the lock has changed; updating .venv" in updated.stderr
    assert "removing what the lock no longer has: spore" in updated.stderr
    assert not list(copy.root.glob(".venv/lib/*/site-packages/spore*"))


@pytest.mark.slow
def test_sglang_has_an_environment_of_its_own_whose_lock_overrules_what_it_asks_for(checkout: Checkout) -> None:
    checkout.index.add("sglang", "1.0", requires="a-kernel-for-gpus")
    checkout.lock("sglang==1.0", "spore==1.0", name="sglang.lock")
    made = checkout.call("bin/setup", "--sglang")
    assert made.returncode == 0, made.stderr
    assert "making .venv-sglang with Python" in made.stderr
    assert (checkout.root / ".venv-sglang.log").exists()
    assert not (checkout.root / ".venv").exists()
    assert not list(checkout.root.glob(".venv-sglang/lib/*/site-packages/physarum.pth"))
    again = checkout.call("bin/setup", "--sglang")
    assert (again.returncode, again.stderr) == (0, "setup: .venv-sglang is up to date\n")
    assert checkout.call("bin/setup", "--sglang", "--if-needed").stderr == ""

    checkout.lock("sglang==1.0", "mould==1.0", name="sglang.lock")
    incomplete = checkout.call("bin/setup", "--sglang")
    assert incomplete.returncode == 1
    assert "mould 1.0 requires spore, which is not installed" in incomplete.stderr
    assert "a-kernel-for-gpus" not in incomplete.stderr


@pytest.mark.slow
def test_libraries_of_torch_s_cuda_build_are_those_of_the_lock_that_names_them(checkout: Checkout) -> None:
    """.venv-sglang-upstream has another torch, and so other libraries. SGLang gets all that it asks for there."""
    for version in ("1.0", "2.0"):
        checkout.index.add("torch", version, requires=f"nvidia-spore=={version}")
        checkout.index.add("nvidia-spore", version)
    checkout.index.add("sglang", "1.0", requires="torch==2.0")
    checkout.lock("nvidia-spore==1.0", name="cuda.lock")
    checkout.lock("nvidia-spore==2.0", "sglang==1.0", "torch==2.0", name="sglang-upstream.lock")
    setup = ("-I", str(checkout.root / "bin" / "setup_venv.py"), ".venv-sglang-upstream")
    made = checkout.call(sys.executable, *setup)
    assert made.returncode == 0, made.stderr
    assert "nvidia_spore-1.0-py3-none-any.whl" not in checkout.index.num_downloads
    assert ".venv-sglang-upstream is up to date" in checkout.call(sys.executable, *setup).stderr

    checkout.lock("torch==1.0", name="mlflow.lock")
    assert checkout.call("bin/setup", "--with", "mlflow").returncode == 0
    assert checkout.index.num_downloads["nvidia_spore-1.0-py3-none-any.whl"] == 1

    checkout.lock("nvidia-spore==2.0", "sglang==1.0", "torch==1.0", name="sglang-upstream.lock")
    forced = checkout.call(sys.executable, *setup)
    assert forced.returncode == 1
    assert "sglang 1.0 has requirement torch==2.0, but you have torch 1.0" in forced.stderr


def test_environment_made_by_hand_is_not_removed(checkout: Checkout) -> None:
    (checkout.root / ".venv").mkdir()
    (checkout.root / ".venv" / "mine").touch()
    refused = checkout.call("bin/setup")
    assert refused.returncode == 1
    assert "was not made by bin/setup; move or remove it" in refused.stderr
    assert (checkout.root / ".venv" / "mine").exists()


def test_no_python_new_enough_is_said_clearly(checkout: Checkout, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    for name in ("python3", "python3.14", "python3.13", "python3.12", "python3.11"):
        (old / name).write_text("#!/bin/sh\n[ $1 = --version ] && echo Python 3.9.2 && exit\nexit 1\n")
        (old / name).chmod(0o755)
    refused = checkout.call("bin/setup", PHYSARUM_PYTHON="", PATH=f"{old}:{os.environ['PATH']}")
    assert refused.returncode == 1
    assert "no Python 3.11 or newer found (python3 is Python 3.9.2)" in refused.stderr

    named = checkout.call("bin/setup", PHYSARUM_PYTHON=str(old / "python3"))
    assert named.returncode == 1
    assert f"PHYSARUM_PYTHON={old}/python3 is not a Python 3.11 or newer" in named.stderr


@pytest.mark.parametrize("command", ["setup", "test"])
def test_help_and_wrong_arguments_are_answered_without_setting_up(command: str) -> None:
    path = str(ROOT / "bin" / command)
    shown = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=10, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"usage: bin/{command}")
    wrong = subprocess.run([path, "--wrong"], capture_output=True, text=True, timeout=10, check=False)
    assert wrong.returncode == 2
    assert "unknown argument --wrong" in wrong.stderr


def test_tests_of_packages_and_model_families_are_compiled_when_they_are_imported(tmp_path: Path) -> None:
    packages = tmp_path / "tests" / "lib" / "site-packages"
    now = ["torch/nn/module.py", "torch/testing/close.py", "transformers/models/auto/auto.py", "attest/__init__.py"]
    later = ["torch/testing/_internal/all.py", "numpy/tests/test_add.py", "transformers/models/llama/modeling.py"]
    for name in (*now, *later):
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text("x = 1\n")
    subprocess.run([sys.executable, *compiling(packages)], check=True, timeout=200)
    assert {path.parent.parent / path.name.split(".")[0] for path in packages.rglob("*.pyc")} == {
        (packages / name).with_suffix("") for name in now
    }
