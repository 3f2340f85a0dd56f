"""Prints the test files of what was changed since main: `just ready` runs them.

    python -m tests.support.changed [BASE]

A changed test file is one itself. A module has those that are named after it in the mirrored folder, or else all of
that folder that import it. A page has the tests of pages.
"""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Final

ROOT: Final = Path(__file__).parents[2]
OF_PAGES: Final = ("tests/test_wording.py", "tests/docs/test_pages.py", "tests/docs/test_maps.py")


def changed_files(base: str, root: Path = ROOT) -> list[str]:
    """Return the files that differ from where this branch left `base`, also those that are not committed."""
    asked = (("diff", "--name-only", "--merge-base", base), ("ls-files", "--others", "--exclude-standard"))
    names = (subprocess.run(("git", *words), cwd=root, capture_output=True, text=True, check=True) for words in asked)
    return sorted({name for done in names for name in done.stdout.splitlines()})


def found_tests(files: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the test files of changed files, each once."""
    return sorted({test for file in files for test in _tests_of(PurePosixPath(file), root)})


def _tests_of(file: PurePosixPath, root: Path) -> Iterator[str]:
    if file.suffix == ".md":
        yield from (test for test in OF_PAGES if (root / test).exists())
    if file.suffix != ".py":
        return
    if file.parts[0] == "tests":
        if file.name.startswith("test_") and (root / file).exists():
            yield str(file)
        return
    there = sorted((root / "tests" / file.parent).glob("test_*.py"))
    named = [path for path in there if path.stem == f"test_{file.stem}" or path.stem.startswith(f"test_{file.stem}_")]
    module = ".".join(file.with_suffix("").parts)
    importing = [path for path in there if module in path.read_text()]
    yield from (path.relative_to(root).as_posix() for path in named or importing)


if __name__ == "__main__":
    sys.stdout.write("".join(f"{test}\n" for test in found_tests(changed_files(*sys.argv[1:] or ["main"]))))
