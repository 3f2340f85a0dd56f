"""Checks a pool's SGLang arguments in the topology against those that its SGLang installation accepts.

The installation is queried once; the result is cached.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from runtime.settings.reading.config import Problem
from runtime.settings.tables.engines import EngineConfig
from runtime.settings.topology import sglang_arguments
from runtime.util.files import user_cache, write_atomically

LAUNCH: Final = str(Path(__file__).with_name("launch.py"))  # passes the run's API key to servers
FOREIGN: Final = {"PYTHONSAFEPATH": "1"}  # like -P, for interpreters too old for that option
TRIED_VERSIONS: Final = ("0.5.23",)  # SGLang versions that tests/sglang runs against
CLOSE: Final = 0.6  # minimum similarity for "did you mean"
IDENTITY_TIMEOUT_S: Final = 60.0
CACHE: Final = "server-arguments"  # of the user
DESCRIBE_TIMEOUT_S: Final = 300.0  # imports torch and the whole server: 30 s on a loaded machine
SHOWN_CHOICES: Final = 12
IDENTITY: Final = """
import importlib.metadata, importlib.util, json, os
found = importlib.util.find_spec("sglang")
place = list(found.submodule_search_locations)[0]
arguments = os.path.join(place, "srt", "server_args.py")
print("\\n" + json.dumps([importlib.metadata.version("sglang"), place, os.stat(arguments).st_mtime_ns]))
"""


class ArgumentsUnknown(Exception):
    """An interpreter did not report which arguments its SGLang accepts."""


class Argument(msgspec.Struct, frozen=True):
    """One argument of the server."""

    names: tuple[str, ...]
    kind: str  # flag, int, float, str, json, other
    many: bool = False  # takes several values
    choices: tuple[str, ...] | None = None


class InstalledServer(msgspec.Struct, frozen=True):
    """An installed SGLang: version and arguments."""

    version: str
    arguments: tuple[Argument, ...]


def engine_problems(key: str, engine: EngineConfig, *, cache: Path | None = None) -> Iterator[Problem]:
    """Yield the arguments that a pool's SGLang would refuse, and untested SGLang versions.

    Args:
        key: settings key of the pool, "engines.policy".
        engine: of kind sglang, started by the run.
        cache: directory for cached arguments; None: the user's cache directory.
    """
    python = engine.python or sys.executable
    try:
        server = ask(python, engine.env, cache or user_cache(CACHE))
    except ArgumentsUnknown as error:
        yield Problem.of(f"{key}.python", python, f"the arguments of this SGLang cannot be read: {error}")
        return
    if server.version.partition("+")[0] not in TRIED_VERSIONS:
        message = f"has SGLang {server.version}; allowed: {', '.join(TRIED_VERSIONS)}"
        yield Problem.of(f"{key}.python", python, message)
    for name, spelled, value in sglang_arguments(engine):
        if (message := _refusal(server, name, value)) is not None:
            yield Problem.of(f"{key}.sglang.{spelled}", value, message)


def ask(python: str, env: Mapping[str, str], cache: Path) -> InstalledServer:
    """Return the version and arguments of an interpreter's SGLang, from the cache unless the installation changed.

    Raises:
        ArgumentsUnknown: the interpreter does not start, has no SGLang, or cannot import it.
    """
    version, place, changed = _last_line(_output_of(python, env, "-c", IDENTITY, timeout_s=IDENTITY_TIMEOUT_S))
    identity = json.dumps([shutil.which(python), place, changed, sorted(env.items())])
    kept = cache / f"sglang-{version}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"
    try:
        return msgspec.json.decode(kept.read_bytes(), type=InstalledServer)
    except (OSError, msgspec.MsgspecError):
        printed = _last_line(_output_of(python, env, LAUNCH, "describe", timeout_s=DESCRIBE_TIMEOUT_S))
    server = InstalledServer(version=version, arguments=msgspec.convert(printed, tuple[Argument, ...]))
    try:
        cache.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, msgspec.json.encode(server))
    except OSError:  # without a writable cache each start takes half a minute longer, but works
        pass
    return server


def _output_of(python: str, env: Mapping[str, str], *words: str, timeout_s: float) -> str:
    environment = {**os.environ, **env, **FOREIGN}
    try:
        done = subprocess.run(
            [python, *words], env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ArgumentsUnknown(str(error)) from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ArgumentsUnknown(lines[-1])
    return done.stdout


def _last_line(printed: str) -> Any:
    """Decode the last line of the output; imports may print before it."""
    try:
        return json.loads(printed.strip().rpartition("\n")[2])
    except ValueError as error:
        raise ArgumentsUnknown(f"it printed {printed[-200:]!r}") from error


def _refusal(server: InstalledServer, name: str, value: object) -> str | None:
    """Return why the server would refuse an argument, or None."""
    known = {spelling: argument for argument in server.arguments for spelling in argument.names}
    argument = known.get(name)
    if argument is None:
        close = get_close_matches(name, known, n=1, cutoff=CLOSE)
        meant = f", did you mean {close[0]}?" if close else ""
        return f"SGLang {server.version} has no such argument{meant}; allowed: those of sglang.launch_server --help"
    values = cast("list[object]", value) if argument.many and isinstance(value, list) else [value]
    if all(_fits(argument, item) for item in values):
        return None
    return f"allowed: {_allowed(argument)}"


def _fits(argument: Argument, value: object) -> bool:
    if argument.kind == "flag" or isinstance(value, bool):
        return argument.kind == "flag" and isinstance(value, bool)
    if argument.choices is not None:
        return str(value) in argument.choices
    match argument.kind:
        case "int":
            return isinstance(value, int)
        case "float":
            return isinstance(value, int | float)
        case "json":
            return isinstance(value, list | dict) or _is_json(value)
        case "str":
            return isinstance(value, str | dict) or (isinstance(value, list) and not argument.many)
        case _:
            return True  # parsed by one of SGLang's own functions


def _is_json(value: object) -> bool:
    try:
        json.loads(str(value))
    except ValueError:
        return False
    return isinstance(value, str)


def _allowed(argument: Argument) -> str:
    one = {"flag": "true or false", "int": "an int", "float": "a float", "json": "a table or a list"}
    what = one.get(argument.kind, "a string")
    if argument.choices is not None:
        shown = ", ".join(map(repr, argument.choices[:SHOWN_CHOICES]))
        what = f"one of {shown}" + (", ..." if len(argument.choices) > SHOWN_CHOICES else "")
    return f"a list, each {what}" if argument.many else what
