"""User functions, named "module:function" or "path/file.py:function": loaded and checked once at the start."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, TypeVar

from runtime.functions.hidden_modules import PROJECTS, hidden_module, is_adapted, is_installed, module_in
from runtime.functions.table import UserFunction, at
from runtime.util.import_path import OURS
from runtime.util.tracebacks import user_frames

OWN: Final = '"module:function" or "path/file.py:function"'  # forms of a user function's name

T = TypeVar("T")


class PluginError(ValueError):
    """A plug-in cannot be used. Names the key, its value and what was expected."""

    def __init__(self, key: str, value: str, problem: str) -> None:
        super().__init__(f"{key} = {value!r}: {problem}")
        self.key = key
        self.value = value
        self.problem = problem


class Plugin(NamedTuple):
    """A user function that was loaded and checked."""

    function: Callable[..., Any]
    is_async: bool  # calling it returns an awaitable


def is_plugin(value: str) -> bool:
    """Return whether a value names a user function instead of a built-in."""
    return ":" in value


def load_plugin(
    key: str,
    value: str,
    *,
    parameters: Sequence[str],
    optional: Sequence[str] = (),
    base_dirs: Sequence[Path] = (),
    allow_async: bool = False,
) -> Plugin:
    """Load a user function and check that it accepts the arguments of its calls.

    Args:
        key: setting that names it, for messages.
        value: "module:function" or "path/file.py:function"; the function may be "Class.method" or a callable object.
        parameters: names of its positional arguments.
        optional: names of further arguments that it gets by name if it has them.
        base_dirs: directories to look up relative files in, in order; empty: the current directory.
        allow_async: whether it may be a coroutine function.

    Raises:
        PluginError: no such file, module or attribute; not callable; cannot be called with these parameters.
    """
    place, separator, attribute = value.rpartition(":")
    if not (separator and place and attribute):
        raise PluginError(key, value, _form_problem(value))
    module = _load_module(key, value, place, attribute, base_dirs)
    found = _find(key, value, module, attribute)
    if inspect.isclass(found):
        raise PluginError(key, value, f"{attribute} is a class; name a function or an object that can be called")
    if not callable(found):
        raise PluginError(key, value, f"{attribute} cannot be called: it is of type {type(found).__name__}")
    _check_parameters(key, value, found, parameters, optional)
    _refuse_generators(key, value, found, attribute)
    is_async = _is_async(found)
    if is_async and not allow_async:
        raise PluginError(key, value, f"{attribute} is async; a plain function is needed here")
    return Plugin(found, is_async)


def load_class(
    key: str, value: str, *, methods: Sequence[str], optional: Sequence[str] = (), base_dirs: Sequence[Path] = ()
) -> type[Any]:
    """Load a user class and check that it has the methods that are called.

    Args:
        key: setting that names it, for messages.
        value: "module:Class" or "path/file.py:Class".
        methods: names of the methods that it needs.
        optional: names of further methods that are called if it has them.
        base_dirs: directories to look up relative files in, in order; empty: the current directory.

    Raises:
        PluginError: no such file, module or attribute; not a class; a method is missing, async or a generator.
    """
    place, separator, attribute = value.rpartition(":")
    if not (separator and place and attribute):
        raise PluginError(key, value, _form_problem(value))
    found = _find(key, value, _load_module(key, value, place, attribute, base_dirs), attribute)
    if not inspect.isclass(found):
        raise PluginError(key, value, f"{attribute} is a {type(found).__name__}; name a class")
    for method in (*methods, *(name for name in optional if hasattr(found, name))):
        if not callable(getattr(found, method, None)):
            raise PluginError(key, value, f"{attribute} has no method {method}; needed: {', '.join(methods)}")
        if inspect.iscoroutinefunction(getattr(found, method)):
            raise PluginError(key, value, f"{attribute}.{method} is async; a plain method is needed here")
        _refuse_generators(key, value, getattr(found, method), f"{attribute}.{method}")
    return found


def load(
    function: UserFunction, key: str, value: str, base_dirs: Sequence[Path] = (), *, several: bool = False
) -> Plugin:
    """Load a user's function or class of a kind.

    Args:
        function: its kind.
        key: setting that names it, for messages.
        value: its name, perhaps behind the name of the project that it was written for.
        base_dirs: directories to look up relative files in, in order; empty: the current directory.
        several: whether a call gets several samples or groups.

    Raises:
        PluginError: it cannot be found, or cannot be called as its kind is.
    """
    if (project := project_of(value)) is not None:
        return at(f"{PROJECTS}.{project}.functions:load")(function, key, value, base_dirs, several=several)
    if function.methods:
        methods, further = function.methods, function.further_methods
        return Plugin(load_class(key, value, methods=methods, optional=further, base_dirs=base_dirs), is_async=False)
    parameters = function.of_several if several else function.parameters
    allow_async = function.may_wait or bool(function.waits_for)
    plugin = load_plugin(key, value, parameters=parameters, base_dirs=base_dirs, allow_async=allow_async)
    if function.waits_for and not plugin.is_async:
        raise PluginError(key, value, f"a plain function cannot wait for {function.waits_for}: write `async def`")
    return plugin


def find(
    function: UserFunction, key: str, value: str, base_dirs: Sequence[Path] = (), *, several: bool = False
) -> Callable[..., Any]:
    """Find a function of a kind: a built-in one if the name has no colon, or a user's.

    Raises:
        ValueError: no function has this name; PluginError if a user's function cannot be used.
    """
    if function.built_in and not is_plugin(value):
        return at(function.built_in)(value)
    return load(function, key, value, base_dirs, several=several).function


def find_built_in(what: str, name: str, known: Mapping[str, T]) -> T:
    """Find a built-in function by its name.

    Raises:
        ValueError: there is none; names the closest one, and all.
    """
    if name in known:
        return known[name]
    close = get_close_matches(name, known, n=1)
    hint = dotted_hint(name) or (f"did you mean {close[0]!r}?" if close else "")
    raise ValueError(f"no {what} {name!r}: {hint}{' ' if hint else ''}allowed: {', '.join(known)}, or {OWN}")


def project_of(value: str) -> str | None:
    """Return the project that a function was written for, "PROJECT:module:function"; None: for this one."""
    project, _, name = value.partition(":")
    return project if ":" in name and is_adapted(project) else None


def placed(value: str, place: Callable[[str], str]) -> str:
    """Return a user function's name with the place of its file changed; the name of one in a module is unchanged."""
    project = project_of(value)
    prefix = "" if project is None else f"{project}:"
    file, colon, attribute = value.removeprefix(prefix).rpartition(":")
    return f"{prefix}{place(file)}{colon}{attribute}" if file.endswith(".py") else value


def located(key: str, value: str, base_dirs: Sequence[Path]) -> str:
    """Return a user function's name with the absolute path of its file.

    Raises:
        PluginError: no such file.
    """
    return placed(value, lambda file: str(find_file(key, value, Path(file), base_dirs)))


def file_of(value: str) -> str:
    """The file or module in a plug-in's name."""
    return value.removeprefix(f"{project_of(value)}:").rpartition(":")[0]


def dotted_hint(value: str) -> str | None:
    """Return a hint for a function named as `module.function`, or a file alone; None for other names."""
    if value.endswith(".py"):
        return f'did you mean "{value}:function"?'
    module, dot, function = value.rpartition(".")
    return f'did you mean "{module}:{function}"?' if dot and module and ":" not in value and "/" not in value else None


def _form_problem(value: str) -> str:
    hint = dotted_hint(value)
    return f"write {OWN}; {hint}" if hint else f"write {OWN}"


def _refuse_ours(key: str, value: str, place: str, attribute: str) -> None:
    top = place.partition(".")[0]
    if top in OURS:
        raise PluginError(key, value, f"{top} is a package of this program; {_file_form(place, attribute)}")


def _refuse_another(key: str, value: str, place: str, attribute: str, module: ModuleType) -> None:
    """Refuse a module of the current directory if another one of its name is found first."""
    own, origin = Path(place.replace(".", "/") + ".py"), module.__file__ if hasattr(module, "__file__") else None
    if own.is_file() and (origin is None or Path(origin).resolve() != own.resolve()):
        problem = (
            f"{place} is another module on the import path, {origin or 'built in'}; {_file_form(place, attribute)}"
        )
        raise PluginError(key, value, problem)


def _refuse_hidden(key: str, value: str, file: Path, folder: Path) -> None:
    """Refuse a user's file that imports a module beside it and would get another one."""
    if (hidden := hidden_module(file, folder)) is not None:
        raise PluginError(key, value, hidden.problem)


def _refuse_hidden_beside(key: str, value: str, place: str) -> None:
    """The same for a module of the search path, whose imports begin where its top package lies."""
    found = ((folder, own) for folder in map(Path, sys.path) if (own := module_in(folder, place)) is not None)
    folder, own = next(found, (Path(), None))
    if own is not None and not is_installed(folder):
        _refuse_hidden(key, value, own, folder)


def _file_form(place: str, attribute: str) -> str:
    return f'for a file of your own write "{place.replace(".", "/")}.py:{attribute}"'


def _load_module(key: str, value: str, place: str, attribute: str, base_dirs: Sequence[Path]) -> ModuleType:
    if place.endswith(".py"):
        path = find_file(key, value, Path(place), base_dirs)
        _refuse_hidden(key, value, path, path.parent)
        return _guarded_import(key, value, lambda: _import_file(path), missing=None, folder=path.parent)
    if "/" in place:
        raise PluginError(key, value, f"{place} does not end in .py")
    _refuse_ours(key, value, place, attribute)
    _refuse_hidden_beside(key, value, place)
    module = _guarded_import(key, value, lambda: importlib.import_module(place), missing=place)
    _refuse_another(key, value, place, attribute, module)
    return module


def find_file(key: str, value: str, path: Path, base_dirs: Sequence[Path]) -> Path:
    """Find the file of a user function.

    Raises:
        PluginError: there is none; names the places.
    """
    path = path.expanduser()
    candidates = [path] if path.is_absolute() else [base / path for base in base_dirs or (Path.cwd(),)]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    raise PluginError(key, value, f"no such file; looked for {', '.join(str(candidate) for candidate in candidates)}")


def _guarded_import(
    key: str, value: str, load: Callable[[], ModuleType], *, missing: str | None, folder: Path | None = None
) -> ModuleType:
    try:
        return load()
    except ModuleNotFoundError as error:
        if missing is not None and error.name is not None and f"{missing}.".startswith(f"{error.name}."):
            raise PluginError(key, value, f"no module named {error.name!r}") from error
        problem = f"importing it failed: {error}{_place(error)}{_where_it_lies(error, folder)}"
        raise PluginError(key, value, problem) from error
    except (Exception, SystemExit) as error:
        # a user module may raise anything, and many scripts end in sys.exit
        raise PluginError(key, value, f"importing it failed: {type(error).__name__}: {error}{_place(error)}") from error


def _where_it_lies(error: ModuleNotFoundError, folder: Path | None) -> str:
    """A hint if the module that was not found lies beside the user's file, or in the folder above."""
    top = (error.name or "").partition(".")[0]
    for place in (folder, folder.parent) if folder is not None and top else ():
        if (place / f"{top}.py").is_file() or (place / top).is_dir():
            return f"; to import {top}, start in {place}, or with PYTHONPATH={place}"
    return ""


def _place(error: BaseException) -> str:
    """The line of the user's module that failed, for the end of a message. A syntax error names it itself."""
    own = None if isinstance(error, SyntaxError) else user_frames(error)
    return "" if own is None else f" ({own.tb_frame.f_code.co_filename}, line {own.tb_lineno})"


def _import_file(path: Path) -> ModuleType:
    """Import a file under a unique name, once per process."""
    name = f"physarum_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _find(key: str, value: str, module: ModuleType, attribute: str) -> Any:
    found: Any = module
    for name in attribute.split("."):
        if not hasattr(found, name):
            close = get_close_matches(name, [public for public in dir(found) if not public.startswith("_")], n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise PluginError(key, value, f"there is no {name!r} in it{hint}")
        found = getattr(found, name)
    return found


def _check_parameters(
    key: str, value: str, function: Callable[..., Any], parameters: Sequence[str], optional: Sequence[str]
) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # some C functions have no signature; the first call shows an error
    try:
        signature.bind(*parameters, **{name: name for name in optional if name in signature.parameters})
    except TypeError as error:
        called = f"({', '.join(parameters)})"
        raise PluginError(key, value, f"takes {_without_types(signature)} but is called with {called}") from error


def _without_types(signature: inspect.Signature) -> str:
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def _refuse_generators(key: str, value: str, function: Callable[..., Any], attribute: str) -> None:
    """Refuse a function with `yield`: it returns a generator, not a value."""
    calls = (function, getattr(type(function), "__call__"))  # noqa: B004, B009 - of an object that can be called
    if any(inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call) for call in calls):
        raise PluginError(key, value, f"{attribute} is a generator: write it without yield")


def _is_async(function: Callable[..., Any]) -> bool:
    call = getattr(type(function), "__call__")  # noqa: B004, B009 - of an object that can be called
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
