"""Module search path: this project's modules first, modules of the user's folder last."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = ("actors", "bin", "messages", "runtime")  # packages; no user module may have one of these names
IS_CHECKOUT = (ROOT / "bin" / "setup").is_file()  # otherwise installed from a wheel, whose commands are on PATH
COMMAND = "physarum"
VERBS = {"start-topology": "start", "export-hf": "export"}  # of scripts in bin/ that have another name than their verb
SLOPPY = frozenset({"docs", "examples", "scripts", "test", "tests"})  # some distributions install these by mistake


def command_name(command: str) -> str:
    """Return the words that start a command, as the user started this one: "bin/ledger", or "physarum ledger".

    Args:
        command: name of a script of bin/; "" for the command itself, with a space where its verb follows.
    """
    program, first = (os.path.basename(word) for word in (*sys.argv, "", "")[:2])
    place = "bin/" if program == f"{COMMAND}.py" else ""
    has_verb = program == COMMAND or (place and first == COMMAND) or not command
    if not has_verb and (IS_CHECKOUT or command == program):
        return f"bin/{command}" if IS_CHECKOUT else command
    return f"{place}{COMMAND} {VERBS.get(command, command)}"


def user_folder_last() -> None:
    """Append the current folder to the search path, so that `module:function` settings find user modules.

    Processes start with `-P`, so that Python does not put that folder first. There, a messages.py would replace this
    project's `messages`.
    """
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)


def refuse_shadows() -> None:
    """Exit with an error message if a file on PYTHONPATH shadows a module that this project imports."""
    found = [
        f"PYTHONPATH: {path} takes the place of {name}" for name, path in shadows(os.environ.get("PYTHONPATH", ""))
    ]
    if found:
        sys.stderr.write("\n".join(found) + "; rename it, or take its folder out of PYTHONPATH\n")
        sys.exit(2)  # wrong input; runtime.util.exit_codes imports typing, which may be shadowed


def shadows(python_path: str) -> Iterator[tuple[str, Path]]:
    """Modules on PYTHONPATH that shadow modules of Python, of this project or of its dependencies, with their paths.

    Args:
        python_path: value of PYTHONPATH.
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
    """The modules and packages of a folder, as (name, path)."""
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
