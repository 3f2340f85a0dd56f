"""Reads the fenced blocks of a documentation page, so that tests can run them."""

import re
from pathlib import Path

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def snippets(page: Path, language: str) -> list[str]:
    """The blocks of one language, in order."""
    return [body for name, body in FENCE.findall(page.read_text()) if name == language]
