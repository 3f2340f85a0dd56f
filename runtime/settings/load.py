"""Loads a topology file: reads and checks it, and resolves its paths."""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from runtime.functions.load import PluginError, located, placed
from runtime.models.dtypes import StoredDtype, dtype_on_cpu, stored_dtype
from runtime.settings.halves import half_of
from runtime.settings.reading.access import Access
from runtime.settings.reading.config import Problem, TopologyError
from runtime.settings.reading.schema import Declaration, functions_in, with_values
from runtime.settings.reading.toml import SET, Loaded, convert, load_tables
from runtime.settings.rules.validate import validate
from runtime.settings.slices import split_slice
from runtime.settings.tables.trainer import TrainerConfig
from runtime.settings.tables.training import ModelConfig
from runtime.settings.topology import Topology
from runtime.util.secrets import Login, split_login

IMPORT_PATH: Final = "PYTHONPATH"
LEFT_OUT: Final = "left-out"  # in place of a model that a stranger's file names


class LoadedTopology(msgspec.Struct, frozen=True, kw_only=True):
    """A valid topology and the origin of its keys. Paths that exist on this machine are absolute."""

    topology: Topology  # without any secret
    loaded: Loaded
    bus_login: Login | None = None  # taken from bus.url


def load_topology(path: Path, overrides: Sequence[str] = (), *, foreign: bool = False) -> LoadedTopology:
    """Read, merge, decode and check a topology file. Open no data file and require no GPU.

    A relative path in a file is looked up next to that file, then next to `path`, then in the current directory. A path
    from an override is looked up in the current directory, then next to `path`. The first match wins, and the path
    becomes absolute. A path without a match stays as it is: it may be a hub name or exist on another node. `run.dir`
    and `run.dump_details` are relative to the current directory.

    Args:
        path: the file.
        overrides: `key=value` each.
        foreign: whether a stranger may have written the file: then only its harmless keys are taken.

    Raises:
        TopologyError: lists every problem, each with file, key, value and allowed values.
    """
    return checked(load_tables(path, overrides, Topology, foreign=foreign))


def checked(loaded: Loaded) -> LoadedTopology:
    """Decode and check merged tables, as `load_topology` does.

    Raises:
        TopologyError: lists every problem, each with file, key, value and allowed values.
    """
    bus_login = _take_login(loaded)
    topology = half_of(convert(loaded, Topology))
    problems = [*validate(topology), *_two_logins(topology, bus_login)]
    if problems:
        problems = [*_missing_files(topology, loaded), *problems]
        raise TopologyError([msgspec.structs.replace(item, file=loaded.origin(item.key)) for item in problems])
    found = LoadedTopology(topology=_find_paths(topology, loaded), loaded=loaded, bus_login=bus_login)
    return with_topology(found, found.topology)


def without_rules(loaded: Loaded) -> LoadedTopology:
    """Decode merged tables of a replay that starts no run and opens neither model nor data. No rule is checked.

    Raises:
        TopologyError: an unknown key, or a wrong type or value.
    """
    model = {"hf_checkpoint": LEFT_OUT, **loaded.tables.get("model", {})}
    loaded = msgspec.structs.replace(loaded, tables={**loaded.tables, "model": model, "eval": []})
    return LoadedTopology(topology=_find_paths(convert(loaded, Topology), loaded), loaded=loaded)


def with_topology(loaded: LoadedTopology, topology: Topology) -> LoadedTopology:
    """Replace the topology by one with more resolved paths, and derive defaults that depend on them."""
    found = default_dtype(loaded.loaded, topology.model)
    if found is not None:
        topology = msgspec.structs.replace(topology, model=msgspec.structs.replace(topology.model, dtype=found.dtype))
    return msgspec.structs.replace(loaded, topology=topology)


def default_dtype(loaded: Loaded, model: ModelConfig) -> StoredDtype | None:
    """Find model.dtype of a recipe that does not set it, in its model directory.

    A run without a trainer generates samples for the trainer of the whole topology, and so in its dtype.

    Returns:
        None if the recipe sets it, or if the setting's default applies: for drawn weights and toys on the CPU, and for
        a directory that is missing or unreadable, which reading the model reports later.
    """
    if "dtype" in loaded.tables.get("model", {}):
        return None
    directory = Path(model.hf_checkpoint)
    if loaded.tables.get("trainer", {}).get("device", TrainerConfig().device) == "cuda":
        return stored_dtype(directory, has_weights=not model.random_init)
    return None if model.random_init else dtype_on_cpu(directory)


def _take_login(loaded: Loaded) -> Login | None:
    """Remove the login from bus.url before any table is shown or stored, and return it."""
    bus: dict[str, Any] | Any = loaded.tables.get("bus")
    url = bus.get("url") if isinstance(bus, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if not isinstance(url, str):
        return None
    try:
        bus["url"], login = split_login(url)
    except ValueError as error:
        raise TopologyError([Problem(key="bus.url", message=str(error), file=loaded.origin("bus.url"))]) from error
    return login


def _two_logins(topology: Topology, login: Login | None) -> Iterator[Problem]:
    if login is not None and topology.bus.credentials is not None:
        yield Problem.of(
            "bus.credentials", topology.bus.credentials, "bus.url contains a login too; give only one of them"
        )


def _missing_files(topology: Topology, loaded: Loaded) -> Iterator[Problem]:
    """Yield the user functions whose files do not exist, to be named before other problems of the settings.

    Without other problems a start checks every function itself, on the node that calls it.
    """
    for key, value, _ in functions_in(topology):
        try:
            located(key, value, places(loaded, key))
        except PluginError as error:
            yield Problem.of(key, value, error.problem)


def places(loaded: Loaded, key: str) -> tuple[Path, ...]:
    """Return the directories to look up the relative path of a key in, in order."""
    origin = loaded.origin(key)
    beside = Path(os.path.realpath(loaded.files[-1].parent))
    found = (Path.cwd(), beside) if origin == SET else (Path(os.path.realpath(Path(origin).parent)), beside, Path.cwd())
    return tuple(dict.fromkeys(found))


def _find_paths(topology: Topology, loaded: Loaded) -> Topology:
    finder = _Finder(loaded)
    return with_values(topology, finder.found)


class _Finder:
    """Makes the paths of a topology absolute where they exist."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded

    def found(self, key: str, value: Any, declaration: Declaration) -> Any:
        """Return a setting's value with its paths made absolute, by what the setting declares."""
        access = declaration.access
        if isinstance(value, dict) and access is not Access.HARMLESS:
            entries = cast("dict[str, Any]", value).items()
            return {name: self._text(f"{key}.{name}", entry, access) for name, entry in entries}
        if isinstance(value, tuple) and access is Access.PROGRAM:  # a program and its arguments
            return tuple(self._text(key, word, access) for word in cast("tuple[Any, ...]", value))
        return self._text(key, value, access)

    def _text(self, key: str, value: Any, access: Access | None) -> Any:
        if not isinstance(value, str):
            return value
        match access:
            case Access.READ:
                return self.data_file(key, value)
            case Access.SECRET_FILE:
                return self.path(key, value)
            case Access.WRITE:
                return os.path.realpath(value)
            case Access.FUNCTION:
                return placed(value, partial(self.path, key))
            case Access.PROGRAM:
                return self.interpreter(key, value)
            case Access.CODE if key.endswith(f".{IMPORT_PATH}"):
                return self.import_path(key, value)
            case _:
                return value

    def path(self, key: str, value: str) -> str:
        candidates = (place / value for place in places(self._loaded, key))
        return next((os.path.realpath(candidate) for candidate in candidates if candidate.exists()), value)

    def data_file(self, key: str, value: str) -> str:
        found = self.path(key, value)
        file, rows = split_slice(found)
        return f"{self.path(key, file)}{rows}" if rows else found

    def import_path(self, key: str, value: str) -> str:
        """Resolve the directories in a process's PYTHONPATH like other paths."""
        return os.pathsep.join(self.path(key, place) if place else "" for place in value.split(os.pathsep))

    def interpreter(self, key: str, value: str) -> str:
        """Return an absolute interpreter path, without resolving links: a virtual environment's link leads out of it.

        A bare name stays as it is; it is looked up on PATH later.
        """
        if "/" not in value:
            return value
        candidates = (place / Path(value).expanduser() for place in places(self._loaded, key))
        return next((str(candidate.absolute()) for candidate in candidates if candidate.exists()), value)
