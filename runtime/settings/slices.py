"""Slices of data files as settings write them: "rows.jsonl@[0:9]"."""

import re
from pathlib import Path
from typing import Final

SLICE: Final = re.compile(r"^(?P<file>.+)(?P<rows>@\[[^\[\]]*\])$", re.DOTALL)


def split_slice(path: str) -> tuple[str, str]:
    """A path as its file and its slice of rows: "rows.jsonl@[0:9]" is ("rows.jsonl", "@[0:9]").

    The slice is "" where there is none, or where a file has that very name.
    """
    match = SLICE.match(path)
    if match is None or Path(path).exists():
        return path, ""
    return match["file"], match["rows"]
