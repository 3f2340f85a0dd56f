"""Without the adapters of other projects all else works: a copy without their folders imports, checks and is tested."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.settings.reading.toml import shipped_topologies

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # a copy without byte code, and all modules imported
OF_OTHERS = (
    "runtime/compat",
    "bin/slime_scripts",
    "actors/rollout/slime",
    "tests/runtime/compat",
    "tests/bin/slime_scripts",
    "tests/actors/rollout/slime",
)
THEIR_OWN = (  # in other rooms
    "actors/trainer/plugins/slime.py",
    "tests/test_parity.py",
    "tests/actors/test_slime_functions.py",
    "tests/actors/trainer/plugins/test_slime_plugins.py",
    "tests/actors/trainer/step/test_slime_recipes.py",
)
COPIED = (
    *("actors", "bin", "messages", "runtime", "topologies", "tests", "docs", "requirements", "findings"),
    *("pyproject.toml", "justfile", "llms.txt", "LICENSE"),
    *("AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md"),
)
OF_THE_WHOLE_TREE = (  # they compare pages and contracts with files, of which this copy lacks some
    "tests/test_layers.py::test_imports_follow_the_contracts",
    "tests/test_layers.py::test_every_contract_is_seen_broken",
    "tests/docs/test_maps.py::test_every_path_that_a_map_names_exists",
    "tests/docs/test_ratchet.py::test_the_number_of_the_page_is_that_of_the_code",
    "tests/support/test_verified.py::test_the_page_has_each_test_file_that_ci_leaves_out",
)
CHOSEN = (  # those that read keys, and names of graders
    "tests/runtime/settings/test_topology.py",
    "tests/runtime/settings/test_rules.py",
    "tests/runtime/settings/reading",
    "tests/actors/reward/graders/test_builtin.py",
)
IMPORTS = """
import importlib, pathlib, sys
folders = map(pathlib.Path, ("messages", "runtime", "actors", "bin"))
for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
    if path.name not in ("__main__.py", "launch.py", "setup_venv.py"):
        importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
print(*sorted(name for name in sys.modules if name.startswith("runtime.compat")))
"""
LOADS = """
import sys
from pathlib import Path
from runtime.settings.load import load_topology
print(*(load_topology(Path(name)).topology.run.name for name in sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree without the folders of other projects, as a repository: results name their commit."""
    place = tmp_path_factory.mktemp("without")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / name, symlinks=True)  # with its byte code
        else:
            shutil.copy(ROOT / name, place / name)
    for name in OF_OTHERS:
        shutil.rmtree(place / name)
    for name in THEIR_OWN:
        (place / name).unlink()
    author = ("-c", "user.name=tests", "-c", "user.email=tests@example.org")
    for words in (("init", "-q"), ("add", "pyproject.toml"), (*author, "commit", "-q", "-m", "a copy")):
        subprocess.run(["git", *words], cwd=place, check=True, timeout=60)
    return place


def run(copy: Path, *words: str, timeout_s: float = 590) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=copy, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def test_every_module_can_be_imported(copy: Path) -> None:
    done = run(copy, "-c", f"import sys; sys.path.insert(0, '.')\n{IMPORTS}")
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_every_shipped_topology_is_accepted(copy: Path) -> None:
    names = shipped_topologies()
    done = run(copy, "-c", f"import sys; sys.path.insert(0, '.')\n{LOADS}", *names)
    assert len(done.stdout.split()) == len(names) > 0, done.stderr
    done = run(copy, "-P", "bin/physarum.py", "start-topology", "examples/own-reward", "--check", "--elsewhere")
    assert done.returncode == 0, done.stderr


def test_an_unknown_key_is_refused_with_ours(copy: Path) -> None:
    words = (
        "laptop",
        "--check",
        "--elsewhere",
        "--set",
        "rollout.rollout_batch_sise=1",
        "--set",
        "optimizer.lr-decay=1",
    )
    done = run(copy, "-P", "bin/physarum.py", "start-topology", *words)
    assert done.returncode == 2
    assert "did you mean rollout_batch_size?" in done.stderr
    assert "slime" not in done.stderr


def test_chosen_tests_of_each_room_pass(copy: Path) -> None:
    done = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CHOSEN)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_all_tests_but_their_own_pass(copy: Path) -> None:
    left_out = ("slow", "chaos", "sglang", "grid", "gpu", "bench", "nodes", "nightly", "observe")
    marks = " and ".join(f"not {mark}" for mark in left_out)
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "-m", marks, "tests"]
    done = run(copy, *words, *(f"--deselect={test}" for test in OF_THE_WHOLE_TREE), timeout_s=3590)
    assert done.returncode == 0, done.stdout[-4000:]
