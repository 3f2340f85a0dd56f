"""Where modules are found: ours first, those of the user's folder last."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = ("actors", "bin", "messages", "runtime")  # packages; no module of a user's has one of these names
SLOPPY = frozenset({"docs", "examples", "scripts", "test", "tests"})  # that some packages install by mistake


def user_folder_last() -> None:
    """Have modules of the current folder found after all others: `module:function` may name one, nothing else does.

    Our processes are started with `-P`, which keeps Python from putting that folder first, where a messages.py in it
    would take the place of our messages.
    """
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)


def refuse_shadows() -> None:
    """End this process with one line where a file on PYTHONPATH takes the place of a module that we import."""
    found = [
        f"PYTHONPATH: {path} takes the place of {name}" for name, path in shadows(os.environ.get("PYTHONPATH", ""))
    ]
    if found:
        sys.stderr.write("\n".join(found) + "; rename it, or take its folder out of PYTHONPATH\n")
        sys.exit(2)  # wrong input; runtime.exit_codes imports typing, which may be what is shadowed


def shadows(python_path: str) -> Iterator[tuple[str, Path]]:
    """Modules of Python and of our packages that PYTHONPATH has as well, and where: they would be found first.

    Args:
        python_path: the variable's value.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    installed = Path(sys.prefix) / "lib" / version / "site-packages"
    ours = {ROOT, installed.resolve(), Path(os.__file__).resolve().parent}
    needed = {*sys.stdlib_module_names, *(dict(_modules_in(installed)).keys() - SLOPPY)}
    for folder in python_path.split(os.pathsep) if python_path else ():
        place = Path(folder or ".").resolve()
        if place not in ours:
            yield from ((name, path) for name, path in _modules_in(place) if name in needed)


def _modules_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """The modules and packages of a folder, by name."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        name, _, suffix = entry.name.partition(".")
        if name.isidentifier() and (suffix == "py" or suffix.endswith("so")):
            yield name, folder / entry.name
        elif name.isidentifier() and not suffix and os.path.isfile(os.path.join(entry.path, "__init__.py")):
            yield name, folder / entry.name
