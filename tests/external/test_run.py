"""Workers of the protocol page and bin/reward-worker grade a run; a viewer follows it.

In the middle, one worker sleeps and the two others are revoked.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import pytest

from runtime.node.supervisor.ports import free_port
from runtime.util.exit_codes import EXIT_INPUT_ERROR
from tests.support.page_programs import javascript_worker, python_program

ROOT = Path(__file__).parents[2]
STEPS = 12
GROUPS_PER_STEP = 64
RUN = "laptop"
GRADER = "judge"  # no actor of the run has it
ADDRESS = "127.0.0.1"  # of one machine alone; other addresses: tests/rights and tests/nodes
TOPOLOGY = """
include = "{root}/topologies/laptop.toml"
run.dir = "{folder}/runs"
bus.port = {port}
nodes.local = {{ address = "{address}", gpus = 0 }}
reward.external = ["judge"]
train.num_steps = {steps}

[[data]]
name = "reverse-digits"
path = "{root}/topologies/demo/data/reverse-digits/train.jsonl"
label_key = "label"
apply_chat_template = true
rm_type = "judge"
"""
LIMIT_S = 300

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]


def until(holds: Callable[[], bool], what: str, limit_s: float = 90) -> None:
    """Wait until a condition holds that another process brings about."""
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, f"not within {limit_s:g} s: {what}"
        time.sleep(0.05)


def start_command(folder: Path) -> list[str]:
    file = folder / "laptop.toml"
    file.write_text(TOPOLOGY.format(root=ROOT, folder=folder, address=ADDRESS, port=free_port(ADDRESS), steps=STEPS))
    return [sys.executable, "-P", str(ROOT / "bin/physarum.py"), "start-topology", str(file), "--json"]


class ExternalRun:
    """A run that external workers grade, with its directory."""

    def __init__(self, folder: Path, programs: ExitStack) -> None:
        self.folder = folder
        self.directory = folder / "runs" / RUN
        self._programs = programs

    def credentials(self, *arguments: str) -> str:
        """Call bin/credentials; return what it prints."""
        command = [sys.executable, "-P", str(ROOT / "bin/physarum.py"), "credentials", str(self.directory), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def accept(self, name: str, *kind: str) -> None:
        """Write a new credential for a client."""
        credential = self.folder / f"{name}.toml"
        credential.touch(mode=0o600)
        credential.write_text(self.credentials(*kind, "--name", name))

    def client(self, name: str, command: Sequence[str | Path]) -> subprocess.Popen[bytes]:
        """Start a program with its credential until the end of the test; its output is a file."""
        with (self.folder / f"{name}.txt").open("wb") as output:
            words = [str(self.folder / f"{name}.toml") if word == "CREDENTIAL" else str(word) for word in command]
            process = subprocess.Popen(words, cwd=self.folder, stdout=output, stderr=subprocess.STDOUT)
        self._programs.callback(lambda: (process.kill(), process.wait()))
        return process

    def printed(self, name: str) -> str:
        """What a program has printed."""
        return (self.folder / f"{name}.txt").read_text()

    def num_steps(self) -> int:
        """Number of trained steps."""
        metrics = self.directory / "metrics.jsonl"
        rows = metrics.read_text().splitlines() if metrics.exists() else []
        return sum(json.loads(row)["step"] > 0 for row in rows if row.endswith("}"))


@contextmanager
def started(folder: Path) -> Iterator[tuple[subprocess.Popen[str], ExternalRun]]:
    """Start the run for the duration of a block."""
    errors = (folder / "errors.txt").open("w")
    with (
        errors,
        ExitStack() as programs,
        subprocess.Popen(start_command(folder), cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True) as start,
    ):
        run = ExternalRun(folder, programs)
        try:
            accepts = (run.directory / "join.toml").exists
            until(lambda: accepts() or start.poll() is not None, "the bus of the run")
            assert start.poll() is None, (folder / "errors.txt").read_text()[-4000:]
            yield start, run
        finally:
            if start.poll() is None:
                start.kill()


def test_workers_of_the_page_grade_a_run_and_two_are_revoked(tmp_path: Path) -> None:
    grader = ("grader", "--grader", GRADER)
    python, viewer = (python_program(number, tmp_path) for number in (0, 1))
    javascript = javascript_worker(tmp_path / "js")
    (tmp_path / "mine.py").write_text("def grade(sample):\n    return float(sample.response == sample.label)\n")
    worker = [sys.executable, "-P", ROOT / "bin/physarum.py", "reward-worker", "CREDENTIAL", "mine.py:grade"]
    with started(tmp_path) as (start, run):
        for name, kind in {"alice": grader, "bob": grader, "carol": grader, "dave": ("viewer",)}.items():
            run.accept(name, *kind)
        alice, bob, carol = (
            run.client(name, command)
            for name, command in {
                "alice": [*python, "CREDENTIAL"],
                "bob": [*javascript, "CREDENTIAL"],
                "carol": worker,
            }.items()
        )
        run.client("dave", [*viewer, "CREDENTIAL"])
        until(lambda: run.num_steps() >= STEPS // 4, "a quarter of the steps", LIMIT_S)
        assert alice.poll() is None, run.printed("alice")
        for process in (alice, bob, carol):  # the run waits for them; bob gets the requests that the others hold
            process.send_signal(SIGSTOP)
        run.credentials("--revoke", "alice")
        alice.send_signal(SIGCONT)
        until(lambda: "Authorization Violation" in run.printed("alice"), "the refusal of the revoked worker", 20)
        run.credentials("--revoke", "carol")
        carol.send_signal(SIGCONT)
        assert carol.wait(30) == EXIT_INPUT_ERROR, run.printed("carol")
        assert "it was revoked, or is unknown" in run.printed("carol")
        assert run.num_steps() < STEPS
        bob.send_signal(SIGCONT)
        output, _ = start.communicate(timeout=LIMIT_S)
        assert bob.poll() is None, run.printed("bob")
        seen = [line.split(" ", 2) for line in run.printed("dave").splitlines() if line[:1].isdigit()]
    assert start.returncode == 0, (tmp_path / "errors.txt").read_text()[-4000:]
    result = json.loads(output)
    assert result["steps"] == STEPS
    groups = result["groups"]
    assert groups["issued"] == groups["trained"] == STEPS * GROUPS_PER_STEP  # none failed, none was lost
    sequences = [int(sequence) for sequence, _, _ in seen]
    assert sequences == sorted(set(sequences))
    trained = sum(subject.endswith(".event.batch.trained") for _, subject, _ in seen)
    assert STEPS - 1 <= trained <= STEPS  # the server may end before the viewer has asked for the last events
