"""Commands that pages show are ones that the commands of bin/ take."""

import importlib
import re
import shlex
from pathlib import Path
from typing import Final

import pytest

from runtime.util.exit_codes import EXIT_INPUT_ERROR, EXIT_OK

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    ROOT / "topologies/examples/README.md",
    *sorted((ROOT / "docs").glob("*/*.md")),
]
LINE: Final = re.compile(
    r"^ *(bin/(?:start-topology|ledger|credentials|reward-worker|export-hf|import-gguf|replay|report|watch|halt)) "
    r"([^#>\n]*)",
    re.MULTILINE,
)
NOT_HERE: Final = re.compile(r"\bFILE\b|\bNAME\b|\bDUMP\b")  # stands for the reader's own


def commands() -> list[str]:
    """The lines of code blocks that start with a command, each once."""
    found = (f"{command} {rest}".strip() for page in PAGES for command, rest in LINE.findall(page.read_text("utf-8")))
    return sorted({line for line in found if not NOT_HERE.search(line)})


@pytest.mark.parametrize("line", commands())
def test_a_command_of_a_page_is_taken(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A start is checked as far as any machine can; the others find no run or dump here, but take their arguments."""
    command, *arguments = shlex.split(line)
    main = importlib.import_module(command.replace("/", ".").replace("-", "_")).main
    if command == "bin/start-topology":
        monkeypatch.chdir(ROOT)
        kept = [
            argument for argument in arguments if argument not in {"--check", "--download", "--elsewhere", "--plan"}
        ]
        assert main([*kept, "--check", "--elsewhere"]) == EXIT_OK
    else:
        monkeypatch.chdir(tmp_path)
        assert main(arguments) == EXIT_INPUT_ERROR


def test_pages_show_each_command() -> None:
    assert {line.split()[0] for line in commands()} == {
        "bin/start-topology",
        "bin/ledger",
        "bin/credentials",
        "bin/export-hf",
        "bin/halt",
        "bin/import-gguf",
        "bin/replay",
        "bin/report",
        "bin/reward-worker",
        "bin/watch",
    }
