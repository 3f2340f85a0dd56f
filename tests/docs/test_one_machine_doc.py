"""docs/run/one-machine.md: the commands for two nodes of one machine."""

import json
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from runtime.node.supervisor.ports import free_port

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "run" / "one-machine.md"


@pytest.mark.nightly
def test_two_loopback_addresses_stand_for_two_machines(tmp_path: Path) -> None:
    section = PAGE.read_text().split("## Two nodes on one machine\n")[1].split("\n## ")[0]
    commands = [shlex.split(line) for line in section.splitlines() if line.startswith("    bin/start-topology")]
    assert [words[words.index("--node") + 1] for words in commands] == ["n0", "n1"]
    more = [f"run.dir={tmp_path}", "train.num_steps=3", f"bus.port={free_port()}"]
    outputs: list[str] = []
    with ExitStack() as programs:
        started: list[subprocess.Popen[str]] = []
        for _, *words in commands:
            start = [sys.executable, "-P", str(ROOT / "bin/physarum.py"), "start-topology", *words, "--json"]
            start += [word for setting in more for word in ("--set", setting)]
            process = subprocess.Popen(start, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            started.append(programs.enter_context(process))
            programs.callback(process.kill)
        for process in started:
            output, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors[-3000:]
            outputs.append(output)
    assert json.loads(outputs[0])["steps"] == 3
