"""bin/start-topology, as a person starts it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil
import pytest

from actors.trainer.file_checksums import write_checksums
from bin.replay import main as replay
from bin.start_topology import main
from runtime.node.supervisor.guardian import MARK_VARIABLE
from tests.support.commands import called
from tests.support.cpu import imported

ROOT = Path(__file__).parents[2]
TOPOLOGY = ROOT / "topologies" / "laptop.toml"
COMMAND = ROOT / "bin" / "physarum.py"
DRIVER = ROOT / "tests" / "bin" / "driver.py"


class Started:
    """A started command whose output is read line by line."""

    def __init__(self, process: subprocess.Popen[str], output: IO[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._output = output

    def until(self, part: str) -> str:
        """Read to the first line that holds a text."""
        for line in self._output:
            self.lines.append(line.rstrip("\n"))
            if part in line:
                return line
        raise AssertionError(f"{part!r} was not said; said was: {self.lines}")

    def end(self, timeout_s: float = 40) -> int:
        """Read to the end, and return the exit code."""
        self.lines += [line.rstrip("\n") for line in self._output]
        return self.process.wait(timeout_s)


def arguments_of(run_dir: Path, *more: str) -> list[str]:
    return [str(TOPOLOGY), "--set", f"run.dir={run_dir.parent}", "--set", f"run.name={run_dir.name}", *more]


def environment(*players: list[str]) -> dict[str, str]:
    return {**os.environ, "PLAYERS": json.dumps(players), "PYTHONPATH": os.pathsep.join([str(ROOT), *PATH])}


PATH = [path for path in [os.environ.get("PYTHONPATH", "")] if path]


@contextmanager
def started(run_dir: Path, *players: list[str], more: tuple[str, ...] = ()) -> Iterator[Started]:
    """The command with players; killed at the end of the block if it still runs."""
    command = [sys.executable, str(DRIVER), *arguments_of(run_dir, *more)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(*players),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield Started(process, process.stdout)
        finally:
            if process.poll() is None:
                process.kill()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(COMMAND), "start-topology", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


def supervised(run_dir: Path) -> list[int]:
    """Processes that carry the mark of a node daemon of this run."""
    found: list[int] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK_VARIABLE, "").endswith(f"@{run_dir}"):
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def wait_for_none(run_dir: Path, timeout_s: float = 40) -> None:
    deadline = time.monotonic() + timeout_s
    while supervised(run_dir):
        assert time.monotonic() < deadline, f"left behind: {supervised(run_dir)}"
        time.sleep(0.02)


def test_a_finished_run_exits_with_0_and_a_summary(tmp_path: Path) -> None:
    with started(tmp_path / "r", ["3"]) as command:
        assert command.end() == 0
    text = "\n".join(command.lines)
    assert "run r finished" in text
    assert "steps     3 of" in text
    assert f"run dir   {tmp_path / 'r'}" in text
    assert "--fresh r" in text
    assert "metrics.jsonl" in text
    wait_for_none(tmp_path / "r")


def test_json_puts_one_line_on_standard_output(tmp_path: Path) -> None:
    command = [sys.executable, str(DRIVER), *arguments_of(tmp_path / "r", "--json")]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(["3"]), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert (result["run"], result["steps"], result["reward_last"], result["tokens"]) == ("r", 3, 0.5, 36)
    groups = {
        "issued": 3,
        "trained": 3,
        "skipped": 0,
        "dropped": 0,
        "failed": 0,
        "pooled": 0,
        "ready": 0,
        "in_flight": 0,
    }
    assert result["groups"] == groups
    assert 0 < result["time_to_first_rollout_s"] < result["seconds"] < 45
    assert "step " in done.stderr


def test_a_failed_run_exits_with_1_and_says_who_why_and_where(tmp_path: Path) -> None:
    with started(tmp_path / "r", ["1", "--then", "crash"]) as command:
        assert command.end() == 1
    text = "\n".join(command.lines)
    assert "run r failed: player.0: RuntimeError: the player stumbled" in command.lines[-1]
    assert f"log       {tmp_path / 'r' / 'logs' / 'player.0.jsonl'}" in text
    assert "last 20 lines:" in text
    assert command.lines[-2] == "  RuntimeError: the player stumbled"
    assert f"continue  cd {Path.cwd()} && " in text


def test_wrong_input_of_a_process_is_told_in_one_sentence(tmp_path: Path) -> None:
    with started(tmp_path / "r", ["0", "--then", "input_error"]) as command:
        assert command.end() == 2
    assert command.lines[-1] == "run r failed: player.0: no such data (exit code 2, input error)"


@pytest.mark.slow
def test_ctrl_c_stops_everything_without_a_kill_and_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOP_S", "600")
    with started(tmp_path / "r", ["2", "--then", "sleep"]) as command:
        command.until("step   2/")
        command.process.send_signal(signal.SIGINT)
        assert command.end() == 130
    assert supervised(tmp_path / "r") == []
    with started(tmp_path / "r", ["0"]) as command:
        command.until("resuming run r")
        assert command.end() == 0
    assert any(line.startswith("steps     2 of") for line in command.lines)


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOP_S", "600")
    with started(tmp_path / "r", ["1", "--then", "hang"]) as command:
        command.until("step   1/")
        command.process.send_signal(signal.SIGINT)
        command.until("stopping")
        command.process.send_signal(signal.SIGINT)
        assert command.end() == 130
    assert supervised(tmp_path / "r") == []


@pytest.mark.nightly  # CI kills the one of a whole run in tests/chaos/test_deaths.py
def test_killing_the_agent_leaves_nothing_and_the_run_resumes(tmp_path: Path) -> None:
    with started(tmp_path / "r", ["2", "--then", "sleep"], ["0", "--then", "family"]) as command:
        command.until("step   2/")
        while len(supervised(tmp_path / "r")) < 4:  # nats-server, two players, the child of one
            time.sleep(0.02)
        command.process.kill()
        wait_for_none(tmp_path / "r")
        command.end()
    with started(tmp_path / "r", ["0"]) as command:
        assert command.end() == 0


@pytest.mark.slow
def test_a_second_start_of_a_running_run_is_refused(tmp_path: Path) -> None:
    with started(tmp_path / "r", ["1", "--then", "sleep"]) as first:
        first.until("step   1/")
        with started(tmp_path / "r", ["1"]) as second:
            assert second.end() == 2
        assert "is in use" in second.lines[0]
        assert f"process {first.process.pid} on" in second.lines[0]
        first.process.send_signal(signal.SIGINT)
        assert first.end() == 130


@pytest.mark.slow
def test_a_finished_run_says_so_goes_on_with_more_steps_and_fresh_starts_it_over(tmp_path: Path) -> None:
    two, three = ("--set", "train.num_steps=2"), ("--set", "train.num_steps=3")
    with started(tmp_path / "r", ["2"], more=two) as command:
        assert command.end() == 0
    with started(tmp_path / "r", ["2"], more=two) as command:
        assert command.end() == 0
    assert command.lines[0].startswith("run r is finished: 2 steps")
    with started(tmp_path / "r", ["3"], more=three) as command:
        assert command.end() == 0
    assert "changed since the last start: train.num_steps: 2 → 3" in command.lines
    assert any(line.startswith("steps     3 of 3") for line in command.lines)
    for name in ((), ("other",)):
        with started(tmp_path / "r", ["1"], more=("--fresh", *name)) as command:
            assert command.end() == 2
    with started(tmp_path / "r", ["2"], more=(*two, "--fresh", "r")) as command:
        assert command.end() == 0
    assert any(line.startswith("steps     2 of 2") for line in command.lines)


@pytest.mark.slow
def test_a_finished_run_says_of_which_step_its_result_is(tmp_path: Path) -> None:
    """Its last checkpoint was damaged after it was saved: at its end, and when the command is given again."""
    steps = ("--set", "train.num_steps=2")
    root = tmp_path / "r" / "checkpoints" / "0001"
    with started(tmp_path / "r", ["1", "--then", "sleep"], more=steps) as command:
        command.until("step 1/")
        for step in (1, 2):
            path = root / f"step-{step:08d}"
            path.mkdir(parents=True)
            (path / "run.json").write_text('{"has_checksums": true}')
            write_checksums(path, {})
        (path / "run.json").write_text('{"has_checksums": tru_}')
        command.process.send_signal(signal.SIGINT)
        assert command.end() == 130
    told = [
        "result    of step 1, the newest checkpoint that can be loaded",
        f"          {path} is damaged: the sha256 of run.json differs from the one recorded when it was written",
    ]
    for _ in range(2):
        with started(tmp_path / "r", ["2"], more=steps) as command:
            assert command.end() == 0
        begin = command.lines.index(told[0])
        assert command.lines[begin : begin + 2] == told
    assert command.lines[0] == "run r is finished: 2 steps, reward 0.500"
    stored = json.loads((tmp_path / "r" / "result.json").read_bytes())
    assert stored["result"]["checkpoint"]["step"] == 1
    shutil.rmtree(path)
    with started(tmp_path / "r", ["2"], more=steps) as command:
        assert command.end() == 0
    assert told[0] in command.lines


@pytest.mark.slow
def test_a_changed_recipe_is_refused_and_another_number_of_steps_is_not(tmp_path: Path) -> None:
    """With fewer steps the streams become smaller: the server takes what the store still holds of larger ones."""
    with started(tmp_path / "r", ["2", "--then", "input_error"], more=("--set", "train.num_steps=100000")) as command:
        assert command.end() == 2
    with started(tmp_path / "r", ["0"], more=("--set", "rollout.temperature=0.5")) as command:
        assert command.end() == 2
    assert "  rollout.temperature: 1.0 → 0.5" in command.lines
    with started(tmp_path / "r", ["3"], more=("--set", "train.num_steps=3")) as command:
        assert command.end() == 0
    assert any("train.num_steps: 100000 → 3" in line for line in command.lines)
    assert any(line.startswith("steps     3 of 3") for line in command.lines)


def test_a_fixed_bus_port_in_use_is_wrong_input(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with started(tmp_path / "r", ["1"], more=("--set", f"bus.port={port}")) as command:
            assert command.end() == 2
    assert f"bus.port = {port}: the port cannot be opened" in command.lines[-1]


@pytest.mark.slow
def test_a_run_directory_that_cannot_be_made_is_wrong_input(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with started(tmp_path / "file" / "r", ["1"]) as command:
        assert command.end() == 2
    assert f"{tmp_path / 'file'} is a file, not a directory" in command.lines[-1]


@pytest.mark.slow
def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    with started(tmp_path / "r", ["3"]) as command:
        assert command.process.stdout is not None
        command.process.stdout.readline()
        command.process.stdout.close()
        assert command.process.wait(50) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "most"), [(["--help"], 500), ([TOPOLOGY, "--check"], 1000)])
def test_help_and_check_import_little(arguments: list[object], most: int) -> None:
    """Training imports some thousands of modules, and takes seconds for it."""
    found = imported([sys.executable, COMMAND, "start-topology", *arguments], cwd=ROOT)
    assert len(found) < most
    assert not found & {"torch", "transformers", "megatron.core", "ray"}


def test_an_option_of_nobody_is_told_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(TOPOLOGY), "--verry-fast"])
    assert capsys.readouterr().err.endswith("unrecognized arguments: --verry-fast\n")


@pytest.mark.parametrize(
    ("words", "form"),
    [
        (["train.num_steps=3", "run.name=a b"], "--set train.num_steps=3 --set 'run.name=a b'"),
        (["--train.num_steps=3"], "--set train.num_steps=3"),
        (["--train.num_steps", "3"], "--set train.num_steps=VALUE"),
        (["eval=[]"], "--set 'eval=[]'"),
    ],
)
def test_a_key_without_set_is_answered_with_what_to_write(
    words: list[str], form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (lambda: main([str(TOPOLOGY), *words]), lambda: replay(["dump", "--to", "filter", *words])):
        with pytest.raises(SystemExit) as ended:
            command()
        assert ended.value.code == 2
        shown = capsys.readouterr().err
        assert shown.endswith(f"unrecognized arguments: {' '.join(words)}\nTo override a key, write {form}\n")


def test_wrong_input_exits_with_2_and_names_the_key(tmp_path: Path) -> None:
    done = run(str(TOPOLOGY), "--set", "train.num_stepz=5")
    assert done.returncode == 2
    assert "num_stepz" in done.stderr
    done = called(main, tmp_path / "missing.toml")
    assert done.returncode == 2
    assert "missing.toml" in done.stderr
    done = called(main, TOPOLOGY, "--node", "n7")
    assert done.returncode == 2
    assert "no node 'n7'" in done.stderr
