"""docs/run/dumps-and-replay.md: its notebook cell, run as it stands there; every field of a line is named."""

import json
import re
import subprocess
import sys
from pathlib import Path

from runtime.data.dump_files import read_lines, write_pair
from tests.docs.snippets import snippets
from tests.runtime.data.test_dumps import example

PAGE = Path(__file__).parents[2] / "docs" / "run" / "dumps-and-replay.md"


def test_the_notebook_cell_reads_a_dump(tmp_path: Path) -> None:
    (cell,) = snippets(PAGE, "python")
    (tmp_path / "dump").mkdir()
    write_pair(tmp_path / "dump", 0, [example()], (1, 1))
    done = subprocess.run(
        [sys.executable, "-c", cell], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "78 [7 8] -1.0\n"


def test_every_field_of_a_line_is_named(tmp_path: Path) -> None:
    write_pair(tmp_path, 0, [example()], (1, 1))
    line = json.loads((tmp_path / "rollout_0.jsonl").read_text().splitlines()[1])
    assert len(read_lines(tmp_path, 0)) == 2
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in line if not re.search(rf"\b{name}\b", page) and name != "segment_texts"] == []
