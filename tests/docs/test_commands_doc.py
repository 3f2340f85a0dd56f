"""docs/reference/commands.md has the `--help` of every command, as the command prints it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.snippets import snippets

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "commands.md"
COMMANDS = sorted(path.name for path in (ROOT / "bin").iterdir() if path.is_file() and not path.suffix)


def help_of(command: str) -> str:
    """Return what `--help` prints; Python commands run without the shell script that sets .venv up."""
    is_shell = command in {"setup", "test"}
    program = [str(ROOT / "bin" / command)]
    start = program if is_shell else [sys.executable, "-P", str(ROOT / "bin" / "physarum.py"), *program]
    ended = subprocess.run(
        [*start, "--help"],
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return ended.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_has_what_the_command_prints(command: str) -> None:
    blocks = [block for block in snippets(PAGE, "text") if block.startswith(f"usage: bin/{command} ")]
    printed = help_of(command)
    words = [block.split() for block in blocks]  # line breaks depend on the version of argparse
    assert words == [printed.split()], f"paste this into {PAGE.name}:\n{printed}"


def test_the_page_has_no_other_command() -> None:
    usages = [block.split()[1] for block in snippets(PAGE, "text")]
    assert sorted(usages) == [f"bin/{command}" for command in COMMANDS]
