"""Row slices of data files in settings: "rows.jsonl@[0:9]"."""

import re
from pathlib import Path
from typing import Final

SLICE: Final = re.compile(r"^(?P<file>.+)(?P<rows>@\[[^\[\]]*\])$", re.DOTALL)


def split_slice(path: str) -> tuple[str, str]:
    """Split a path into its file and its row slice: "rows.jsonl@[0:9]" gives ("rows.jsonl", "@[0:9]").

    The slice is "" if there is none, or if a file has exactly this name.
    """
    match = SLICE.match(path)
    if match is None or Path(path).exists():
        return path, ""
    return match["file"], match["rows"]
