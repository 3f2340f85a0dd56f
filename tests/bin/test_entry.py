"""What all commands share: whose modules are found, and how they end."""

import os
import pty
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from actors.processes import process_specs
from actors.reward.grades import GraderSpec, Hello
from actors.reward.process import GraderProcess
from bin.entry import Screen
from bin.start_topology import main
from runtime.settings.load import load_topology
from tests.support.commands import SCRIPTS, called

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-P", str(ROOT / "bin" / "physarum.py"))
LAPTOP = ROOT / "topologies" / "laptop.toml"
TAKEN = ("actors", "bin", "messages", "runtime", "statistics", "structlog", "yaml")  # ours and others'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder, in which modules have the names of ours, and one has a name of its own."""
    for name in TAKEN:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the user was taken for ours')\n")
    (tmp_path / "my_rewards.py").write_text("def grade(sample):\n    return 0.5\n")
    return tmp_path


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    without = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(command, cwd=cwd, env=without, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", ["engine.policy.0", "router.policy", "trainer", "rollout"])
def test_a_process_of_a_run_finds_our_modules_whatever_the_users_are_called(folder: Path, name: str) -> None:
    """Found first were those of the current folder: a run failed after it had restarted each process ten times."""
    topology = load_topology(LAPTOP, ["engines.policy.router=sglang-router"]).topology
    specs = {spec.name: spec for spec in process_specs(topology, "local", folder / "run")}
    command, env = specs[name].command, {**os.environ, **specs[name].env}
    module = next(at for at, word in enumerate(command) if word == "-m" or word.endswith("/launch.py")) + 2
    shown = subprocess.run(
        [*command[:module], "--help"], cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert "usage:" in shown.stdout


@pytest.mark.parametrize("command", SCRIPTS)
def test_a_command_finds_our_modules_whatever_the_users_are_called(folder: Path, command: str) -> None:
    shown = run([*COMMAND, command, "--help"], folder)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(f"usage: bin/{command}")


@pytest.mark.anyio
async def test_a_grader_of_the_current_folder_is_found_by_its_modules_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    process = await GraderProcess.start(Hello(graders=(GraderSpec(name="my_rewards:grade"),)))
    await process.kill()


def test_check_finds_a_module_of_the_current_folder(folder: Path) -> None:
    checked = check(folder, "my_rewards:grade")
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("messages:reward", "messages is a package of this program; for a file of your own write"),
        ("runtime.reward:reward", "runtime is a package of this program; for a file of your own write"),
        ("statistics:reward", "statistics is another module on the import path, "),
    ],
)
def test_check_names_the_file_form_for_a_module_that_another_hides(folder: Path, value: str, problem: str) -> None:
    checked = check(folder, value)
    assert checked.returncode == 2
    assert "data.0.rm_type" in checked.stderr
    assert problem in checked.stderr
    assert f'write "{value.partition(":")[0].replace(".", "/")}.py:reward"' in checked.stderr


def check(folder: Path, rm_type: str) -> subprocess.CompletedProcess[str]:
    words = (str(LAPTOP), "--check", "--set", f"data.0.rm_type={rm_type}")
    return run([*COMMAND, "start-topology", *words], folder)


@pytest.mark.parametrize(
    "arguments",
    [
        ["bin/physarum.py", "start-topology", "--help"],
        ["bin/physarum.py", "describe-settings", "--docs", "/nowhere", "--check"],
    ],
)
def test_a_reader_that_goes_away_is_no_error(arguments: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        ended = subprocess.run(
            [sys.executable, "-P", *arguments],
            cwd=ROOT,
            env={key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"},
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(write_end)
    assert "Traceback" not in ended.stderr
    assert "BrokenPipeError" not in ended.stderr


def test_a_screen_that_cannot_be_written_takes_what_is_shown_all_the_same() -> None:
    with open("/dev/full", "w") as full:
        screen = Screen(full)
        screen.show("one")
        assert not screen.is_read
        screen.show_all(["two", "three"])


def test_on_a_terminal_a_line_is_rewritten_until_another_is_shown() -> None:
    leader, follower = pty.openpty()
    try:
        with open(follower, "w") as terminal:
            screen = Screen(terminal)
            screen.rewrite("1 of 16 groups")
            screen.rewrite("2 of 16 groups")
            screen.show("step 1/3\x1b[2J")
            screen.show("step 2/3")
            shown = ""
            while "step 2/3\r\n" not in shown:
                shown += os.read(leader, 4096).decode()
    finally:
        os.close(leader)
    taken_back = "\r\x1b[K"
    assert shown == f"1 of 16 groups{taken_back}2 of 16 groups{taken_back}step 1/3\\x1b[2J\r\nstep 2/3\r\n"


@pytest.mark.parametrize(("terminal", "can"), [("xterm", True), ("dumb", False)])
def test_only_a_terminal_that_can_takes_a_line_back(monkeypatch: pytest.MonkeyPatch, terminal: str, can: bool) -> None:
    monkeypatch.setenv("TERM", terminal)
    leader, follower = pty.openpty()
    try:
        with open(follower, "w") as stream, open(os.devnull, "w") as null:
            assert Screen(stream).can_rewrite == can
            assert not Screen(null).can_rewrite
    finally:
        os.close(leader)


STALLS = """
import pathlib, sys, time

class Stalls:
    def find_spec(self, name, path=None, target=None):
        if name == "bin.entry":
            pathlib.Path({mark!r}).touch()
            for _ in range(6000):  # a signal just before one long sleep would be seen at its end
                time.sleep(0.01)

sys.meta_path.insert(0, Stalls())
"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_ctrl_c_while_a_command_imports_is_one_line(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "imports"
    (tmp_path / "sitecustomize.py").write_text(STALLS.format(mark=str(mark)))
    command = [*COMMAND, name, "--help"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while not mark.exists():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=200)
    assert (process.returncode, said) == (130, ("", "interrupted\n"))


@pytest.mark.slow
@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_a_command_without_standard_streams_does_its_work(closed: tuple[int, ...], tmp_path: Path) -> None:
    words = " ".join(f"{number}{'<' if number == 0 else '>'}&-" for number in closed)
    for name, arguments, code in (
        ("start-topology", f"{LAPTOP} --plan", 0),
        ("ledger", str(tmp_path), 2),
        ("credentials", f"{tmp_path} --list", 2),
        ("export-hf", f"{tmp_path} --out {tmp_path / 'out'}", 2),
        ("replay", f"{tmp_path} --to filter", 2),
        ("reward-worker", f"{tmp_path / 'alice.toml'} my_rewards.py:grade", 2),
    ):
        command = f"{shlex.join(COMMAND)} {name} {arguments} {words}"
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("key", ["run.dir", "run.dump_details"])
@pytest.mark.parametrize("more", [["--check"], []])
def test_a_link_in_a_circle_is_named(key: str, more: list[str], tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    places = ("--set", f"run.dir={tmp_path}", "--set", f"{key}={tmp_path / 'loop'}")
    done = called(main, LAPTOP, *more, *places, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert f"{tmp_path / 'loop'} is a symbolic link that leads nowhere, or in a circle" in done.stderr


def test_a_topology_file_that_is_a_link_in_a_circle_is_named(tmp_path: Path) -> None:
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    done = called(main, tmp_path / "loop.toml", "--check", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{tmp_path / 'loop.toml'}: cannot be read: Too many levels of symbolic links\n"
