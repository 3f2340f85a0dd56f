"""Finds modules beside a user's file that its imports do not reach, since another module has their name.

This program's packages, the standard library and installed packages come before a user's folder. So `import messages`
in a user's file means this program's package, even with a messages.py beside the file.
"""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from runtime.util.import_path import OURS

MAX_FILES: Final = 500  # of a user's modules that are read
PROJECTS: Final = "runtime.compat"  # packages of other projects, whose functions run here too


class HiddenModule(NamedTuple):
    """A module that a user's file imports and does not get."""

    name: str
    importer: Path  # the file with the import
    line: int
    path: Path  # the module beside it
    taken_by: str  # which module the import gets

    @property
    def problem(self) -> str:
        """Describe it, as the end of an error message."""
        return (
            f"{self.importer}, line {self.line}, imports {self.name}, and gets {self.taken_by}, not {self.path} "
            "beside it: rename that file"
        )


def hidden_module(file: Path, folder: Path) -> HiddenModule | None:
    """Find the first module in a folder that a user's file, or a module of the folder that it imports, does not get.

    Args:
        file: of the user's function.
        folder: where its absolute imports begin.
    """
    left, seen = [file], {file}
    reached: set[str] = set()  # imported names that get what lies in the folder
    while left and len(seen) < MAX_FILES:
        importer = left.pop()
        for name, line in _imports(importer):
            if name in reached:
                continue
            reached.add(name)
            top = name.partition(".")[0]
            own = module_in(folder, top)
            if own is None or is_adapted(top):
                continue
            found = _origin(top)
            if found is not None and not _is_same(found, own):
                return HiddenModule(top, importer, line, own, _owner(top, found))
            if top in OURS:  # the folder is this program's: what its own modules import is no user's
                continue
            further = {path for part in _prefixes(name) if (path := module_in(folder, part)) is not None}
            left += further - seen
            seen |= further
    return None


def is_adapted(project: str) -> bool:
    """Whether functions written for a project run here, and get its modules from this program.

    The project has a package of its name in runtime/compat, whose `functions.load` adapts its functions.
    """
    place = f"{PROJECTS}.{project}"
    return project.isidentifier() and all(map(importlib.util.find_spec, (PROJECTS, place, f"{place}.functions")))


def is_installed(folder: Path) -> bool:
    """Whether a folder holds installed packages or Python's own modules, not a user's."""
    return folder.name in ("site-packages", "dist-packages") or folder == Path(ast.__file__).parent


def _imports(file: Path) -> Iterator[tuple[str, int]]:
    """Yield the absolute imports of a file with their lines; of `from a import b` both "a" and "a.b"."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):  # the import itself says so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module is not None:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[: count + 1]) for count in range(len(parts)))


def module_in(folder: Path, name: str) -> Path | None:
    """The file of a module of a folder; a folder without __init__.py is no module of its own."""
    place = folder.joinpath(*name.split("."))
    return next((path for path in (place.with_name(f"{place.name}.py"), place / "__init__.py") if path.is_file()), None)


def _origin(name: str) -> str | None:
    """The file that an import of a name gets, "built-in" or "frozen"; None: no such module."""
    loaded = sys.modules.get(name)
    try:
        spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return None
    if spec is None:
        return getattr(loaded, "__file__", None)
    return spec.origin or ", ".join(spec.submodule_search_locations or ()) or None


def _is_same(origin: str, own: Path) -> bool:
    return Path(origin).resolve() == own.resolve()


def _owner(name: str, origin: str) -> str:
    if name in OURS:
        return "a package of this program"
    return "a module of Python" if name in sys.stdlib_module_names else origin
