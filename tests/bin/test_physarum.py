"""One command has a verb for each thing to do; the scripts of bin/ stand for one each and say their own names."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bin import start_topology
from bin.entry import command_path
from bin.physarum import DOES
from runtime.util import import_path
from runtime.util.import_path import VERBS, command_name
from tests.support.commands import SCRIPTS, called

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-P", str(ROOT / "bin" / "physarum.py"))
OF_OPTIONS = {"check", "plan"}  # verbs that stand for an option of start-topology
HEAVY = {"aiohttp", "anyio", "msgspec", "nats", "numpy", "structlog", "torch", "transformers"}


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def test_each_verb_has_a_script_and_each_script_a_verb() -> None:
    assert len({(ROOT / "bin" / name).read_text() for name in SCRIPTS}) == 1
    assert {VERBS.get(name, name) for name in SCRIPTS} == DOES.keys() - OF_OPTIONS


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The scripts of a checkout whose set-up does nothing, and whose interpreter prints its arguments."""
    folder = tmp_path / "a checkout"
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / "bin").mkdir()
    for name in ("physarum", *SCRIPTS):
        shutil.copy(ROOT / "bin" / name, folder / "bin")
    for place, text in (("bin/setup", "true"), (".venv/bin/python", "printf '%s\\n' \"$@\"; exit 7")):
        (folder / place).write_text(f"#!/bin/sh\n{text}\n")
        (folder / place).chmod(0o755)
    return folder


@pytest.mark.parametrize("name", ["physarum", *SCRIPTS])
def test_a_script_passes_its_name_and_arguments_on(name: str, checkout: Path, tmp_path: Path) -> None:
    done = run(str(checkout / "bin" / name), "a b", "", "--set", "x='*'", cwd=tmp_path)
    own = [str(checkout / "bin/physarum.py"), str(checkout / "bin" / name)]
    assert done.stdout.splitlines() == ["-P", *own, "a b", "", "--set", "x='*'"]
    assert (done.returncode, done.stderr) == (7, "")


def test_a_link_to_a_script_may_have_any_name(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").symlink_to(checkout / "bin" / "watch")
    (tmp_path / "yours").symlink_to("mine")
    done = run(str(tmp_path / "yours"), cwd=ROOT)
    assert done.stdout.splitlines()[2] == str(checkout / "bin/watch")


@pytest.mark.parametrize("verb", DOES)
def test_each_verb_answers_help_with_its_words(verb: str, tmp_path: Path) -> None:
    done = run(*COMMAND, "physarum", verb, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: bin/physarum {verb} ")


def test_help_is_the_map_and_loads_nothing_heavy() -> None:
    shown = run(*COMMAND, "physarum", "--help", cwd=ROOT)
    assert shown.returncode == 0
    assert [line.split()[0] for line in shown.stdout.splitlines() if line.startswith("  ")] == list(DOES)
    traced = run(sys.executable, "-X", "importtime", *COMMAND[1:], "physarum", "--help", cwd=ROOT)
    loaded = {line.rpartition("|")[2].strip() for line in traced.stderr.splitlines()}
    assert not {name.partition(".")[0] for name in loaded} & HEAVY
    assert not {name for name in loaded if name.startswith(("actors.", "messages"))}
    assert {name for name in loaded if name.startswith("bin.")} == {"bin.entry"}


@pytest.mark.parametrize("words", [[], ["wacht"], ["--wacht"]])
def test_a_wrong_verb_is_answered_with_those_that_there_are(words: list[str]) -> None:
    done = run(*COMMAND, "physarum", *words, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert ", ".join(DOES) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", ["check", "plan"])
def test_a_verb_is_the_option_of_its_name(verb: str, tmp_path: Path) -> None:
    words = ("laptop", "--set", f"run.dir={tmp_path}")
    by_verb = called(getattr(start_topology, verb), *words, cwd=tmp_path)
    by_option = called(start_topology.main, f"--{verb}", *words, cwd=tmp_path)
    assert (by_verb.returncode, by_verb.stdout, by_verb.stderr) == (
        by_option.returncode, by_option.stdout, by_option.stderr,
    )  # fmt: skip
    assert by_verb.returncode == 0, by_verb.stderr
    refused = called(getattr(start_topology, verb), "laptop", "--json", cwd=tmp_path)
    assert refused.returncode == 2


@pytest.mark.parametrize(
    ("argv", "is_checkout", "expected"),
    [
        (["/r/bin/physarum.py", "/r/bin/ledger", "x"], True, ("bin/start-topology", "bin/ledger")),
        (["/r/bin/physarum.py", "bin/physarum", "ledger"], True, ("bin/physarum start", "bin/physarum ledger")),
        (["/r/actors/host.py", "/runs/physarum"], True, ("bin/start-topology", "bin/ledger")),
        (["/v/bin/physarum", "start", "x"], True, ("physarum start", "physarum ledger")),  # an editable installation
        (["/v/bin/physarum", "start", "x"], False, ("physarum start", "physarum ledger")),
        (["/v/bin/start-topology", "x"], False, ("start-topology", "physarum ledger")),
        (["/v/actors/host.py", "/runs/physarum"], False, ("physarum start", "physarum ledger")),
        ([""], False, ("physarum start", "physarum ledger")),
    ],
)
def test_printed_commands_fit_how_the_user_started(
    argv: list[str], is_checkout: bool, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(import_path, "IS_CHECKOUT", is_checkout)
    assert (command_name("start-topology"), command_name("ledger")) == expected
    program, *verb = command_path("ledger", ROOT)
    assert (Path(program).name, verb) == (Path(expected[1].split()[0]).name, expected[1].split()[1:])
    assert Path(program).is_absolute() == (not expected[1].startswith("bin/"))
    assert command_path("ledger", Path("/"))[0].startswith("/")
