"""Reads the fenced blocks of a documentation page, so that tests can run them."""

import re
from pathlib import Path

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def snippets(page: Path, language: str) -> list[str]:
    """The blocks of one language, in order."""
    return [body for name, body in FENCE.findall(page.read_text()) if name == language]


def snippet(page: Path, language: str, text: str) -> str:
    """The one block of a language that has a text, such as the name of its file in the first line."""
    (found,) = [body for body in snippets(page, language) if text in body]
    return found
