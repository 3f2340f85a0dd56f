"""A module beside a user's file that its import would not get is refused with its name, for every kind of function."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import actors.preflight  # noqa: F401 - here once, not in the process of each check
from bin.start_topology import main
from runtime.functions.load import Plugin, PluginError, load_plugin

LAPTOP = Path(__file__).resolve().parents[3] / "topologies/laptop.toml"
OWN = "def helper():\n    return 1.0\n"
USER = "def grade(sample):\n    return helper()\n"


@pytest.fixture(autouse=True)
def own_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return folder


def on_path(folder: Path) -> Path:
    """What `user_folder_last` does with the current folder."""
    sys.path.append(str(folder))
    importlib.invalidate_caches()
    return folder


def loaded(name: str) -> Plugin:
    return load_plugin("reward.custom", name, parameters=("sample",))


@pytest.mark.parametrize(
    ("name", "is_package", "reachable"),
    [
        *(
            (name, False, True)
            for name in ("messages", "runtime", "actors", "bin", "random", "json", "types", "msgspec")
        ),
        *((name, True, False) for name in ("messages", "random", "numpy")),
    ],
)
@pytest.mark.parametrize("form", ["file", "module"])
def test_a_hidden_module_is_named(tmp_path: Path, name: str, form: str, is_package: bool, reachable: bool) -> None:
    folder = write(tmp_path / "mine", my_rewards=f"from {name} import helper\n\n\n{USER}")
    path = folder / (f"{name}/__init__.py" if is_package else f"{name}.py")
    path.parent.mkdir(exist_ok=True)
    path.write_text(OWN)
    if reachable or form == "module":
        on_path(folder)
    with pytest.raises(PluginError) as refused:
        loaded(f"{folder}/my_rewards.py:grade" if form == "file" else "my_rewards:grade")
    said = str(refused.value)
    assert f"my_rewards.py, line 1, imports {name}, and gets " in said
    assert f"not {path} beside it: rename that file" in said


@pytest.mark.parametrize(
    "code",
    [
        "import messages as m\n",
        "import messages.more\n",
        "def grade(sample):\n    import messages\n",
        "try:\n    import messages\nexcept ImportError:\n    messages = None\n",
        "import helpers\n",  # which imports it
        "from helpers.more import x\n",
    ],
)
def test_an_import_anywhere_counts(tmp_path: Path, code: str) -> None:
    folder = write(tmp_path / "mine", my_rewards=code + USER, messages=OWN)
    if "helpers.more" in code:
        write(folder, **{"helpers/__init__": "", "helpers/more": "import messages\nx = 1\n"})
    else:
        write(folder, helpers="import messages\n")
    on_path(folder)
    with pytest.raises(PluginError, match="imports messages, and gets a package of this program, not "):
        loaded(f"{folder}/my_rewards.py:grade")


def test_the_second_of_two_modules_with_one_name_is_named_and_not_confused(tmp_path: Path) -> None:
    one = on_path(write(tmp_path / "one", rewards_one=f"from utils_of_mine import helper\n{USER}", utils_of_mine=OWN))
    two = write(tmp_path / "two", rewards_two=f"from utils_of_mine import helper\n{USER}", utils_of_mine=OWN)
    assert loaded(f"{one}/rewards_one.py:grade").function(None) == 1.0
    with pytest.raises(PluginError, match=f"gets {one}/utils_of_mine.py, not {two}/utils_of_mine.py beside it"):
        loaded(f"{two}/rewards_two.py:grade")


def test_what_an_import_reaches_is_not_refused(tmp_path: Path) -> None:
    folder = on_path(
        write(tmp_path / "mine", my_rewards=f"from my_helper import helper\nimport json\n{USER}", my_helper=OWN)
    )
    (folder / "json").mkdir()  # no package: Python takes its own
    (folder / "datasets").mkdir()
    write(folder, messages=OWN)  # beside it, but not imported
    assert loaded(f"{folder}/my_rewards.py:grade").function(None) == 1.0
    assert loaded("my_rewards:grade").function(None) == 1.0
    ours = write(tmp_path / "ours", uses_ours=f"from messages import Plane\nhelper = float\n{USER}")
    assert loaded(f"{ours}/uses_ours.py:grade").function is not None


KINDS = (
    *("data.0.rm_type", "rollout.dynamic_filter", "rollout.custom_generate", "rollout.custom_rollout"),
    *("rollout.over_sampling_filter", "rollout.buffer_filter", "data.0.source", "data.0.source_class"),
    *("algorithm.loss.function", "algorithm.estimator.function", "eval.0.custom_evaluation", "eval.0.custom_metrics"),
)


GENERATED = ("data.0.path=none", "rollout.shuffle=false")
FURTHER = {
    "data.0.source": GENERATED,
    "data.0.source_class": GENERATED,
    "rollout.over_sampling_filter": ("rollout.over_sampling_batch_size=4096",),
    "algorithm.loss.function": ("algorithm.loss.type=custom",),
    "algorithm.estimator.function": ("algorithm.estimator.type=custom",),
}


@pytest.mark.parametrize("key", KINDS)
def test_a_check_names_it_for_every_kind_of_function(
    tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import messages\n\n\ndef mine(*given):\n    return messages.helper()\n\n\nclass Rows:\n    pass\n"
    folder = write(tmp_path / "mine", my_functions=code, messages=OWN)
    name = f"{folder}/my_functions.py:{'Rows' if key.endswith('class') else 'mine'}"
    given = [f"{key}={name}", "run.name=hidden-module"]
    given += FURTHER.get(key, ())
    assert main([str(LAPTOP), "--check", *(word for item in given for word in ("--set", item))]) == 2
    said = capsys.readouterr().err
    assert f"imports messages, and gets a package of this program, not {folder}/messages.py beside it" in said, said
