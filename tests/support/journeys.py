"""Counts two journeys in the code: a sample's tokens, and a weight version.

    python -m tests.support.journeys   # lists all that is counted

Each journey names the rooms that it passes and how its payload is called in a field. All else is read from the code:

- a form is a class of these rooms, or an alias, with a field that holds the payload;
- a message is a message type of the journey: payloads of samples, and calls about weights, but no events;
- a file is a module of these rooms that defines or names a form or a message or starts a thread, the journey's own
  loops, and the modules of these rooms that these import, directly or not;
- a type is a data type (struct, dataclass, named tuple, enumeration) that such a file of an actor defines;
- a thread is a place in the trainer's files that starts a thread or a pool of threads, and the event loop.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
DATA_TYPES: Final = ("Struct", "Message", "NamedTuple", "TypedDict", "Enum", "StrEnum", "IntEnum")
STARTS_A_THREAD: Final = ("Thread", "ThreadPoolExecutor", "TorchThread", "Worker")


@dataclass(frozen=True)
class Journey:
    """What a journey passes."""

    rooms: tuple[str, ...]  # globs of modules
    field: str  # regular expression of a field, "name: annotation", that holds the payload
    messages: str  # regular expression of the names of its message types
    threads: tuple[str, ...]  # globs of the modules whose threads count
    loops: tuple[str, ...] = ()  # modules that carry the payload on, and name neither it nor a message


@dataclass(frozen=True)
class Counts:
    """Names of what a journey passes."""

    files: tuple[str, ...]
    forms: tuple[str, ...]
    messages: tuple[str, ...]
    types: tuple[str, ...]
    threads: tuple[str, ...]


JOURNEYS: Final = {
    "samples": Journey(
        rooms=(
            "actors/rollout/sglang/*.py",
            "actors/rollout/requests/*.py",
            "actors/rollout/samples/*.py",
            "actors/rollout/slime/*.py",
            "messages/samples.py",
            "messages/data.py",
            "actors/trainer/data/*.py",
        ),
        field=r"^_?((input|output|prompt|response|kept)_ids|ids|tokens|prefix|chunks)(_[A-Z])?: .*"
        r"(list|tuple|array|Array|Ints|bytes|buffer)",
        messages=r"^(SegmentsPublished|ColumnsPublished|ExpertsPublished)$",
        threads=("actors/rollout/requests/*.py", "actors/rollout/samples/*.py", "actors/rollout/slime/*.py"),
    ),
    "weights": Journey(
        rooms=(
            "actors/trainer/*.py",
            "actors/trainer/weights/*.py",
            "actors/trainer/weights/*.py",
            "actors/trainer/models/*.py",
            "actors/rollout/engines/**/*.py",
            "actors/rollout/weights/*.py",
            "runtime/models/*.py",
            "runtime/node/copying.py",
            "messages/calls.py",
        ),
        field=r"^(?!_?(device|spec)\b).*: .*(\bTensor\b|\bBucket\b|\bPart\b)",
        messages=r"^(?!WeightSyncEnded|Weights[A-Z])(Weight|Bucket|UpdateGroups|Members|Engines)",
        threads=(
            "actors/trainer/*.py",
            "actors/trainer/weights/*.py",
            "actors/trainer/weights/*.py",
            "actors/trainer/models/*.py",
        ),
        loops=("actors/rollout/engines/fleet.py",),
    ),
}


@dataclass(frozen=True)
class Module:
    """A module of ours, parsed."""

    path: str
    classes: dict[str, ast.ClassDef]
    aliases: dict[str, str]  # expression by name
    names: frozenset[str]  # all names that it uses
    imports: frozenset[str]  # modules by path, as "from" names them


@cache
def module_of(path: Path) -> Module:
    """Parse a module."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    aliases = {
        target.id: ast.unparse(node.value)
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Subscript)
    }
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    used |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    imports = {f"{str(node.module).replace('.', '/')}.py" for node in nodes if isinstance(node, ast.ImportFrom)}
    return Module(path.relative_to(ROOT).as_posix(), classes, aliases, frozenset(used), frozenset(imports))


def modules_in(globs: Iterable[str]) -> list[Module]:
    """Parse the modules of rooms, without the `__init__.py` of packages."""
    paths = {path for each in globs for path in ROOT.glob(each) if path.name != "__init__.py"}
    return [module_of(path) for path in sorted(paths)]


def is_data_type(node: ast.ClassDef) -> bool:
    """Whether a class only holds data."""
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    decorators = {ast.unparse(each).partition("(")[0] for each in node.decorator_list}
    return bool(bases & set(DATA_TYPES)) or "dataclass" in decorators


def fields_of(node: ast.ClassDef) -> Iterator[str]:
    """Yield the declared fields of a class, and those that its methods set, as "name: annotation"."""
    for each in ast.walk(node):
        if isinstance(each, ast.AnnAssign):
            yield f"{ast.unparse(each.target).removeprefix('self.')}: {ast.unparse(each.annotation)}"


def forms_in(modules: Iterable[Module], field: str) -> set[str]:
    """Find the types that hold a payload."""
    holds = re.compile(field)
    forms: set[str] = set()
    for module in modules:
        forms |= {name for name, node in module.classes.items() if any(map(holds.search, fields_of(node)))}
        forms |= {name for name, text in module.aliases.items() if holds.search(f"{name}: {text}")}
    return forms


def messages_like(pattern: str) -> set[str]:
    """Find message types by name."""
    classes = {name: node for module in modules_in(["messages/*.py"]) for name, node in module.classes.items()}
    return {
        name
        for name, node in classes.items()
        if re.search(pattern, name) and "Message" in {ast.unparse(base) for base in node.bases}
    }


def threads_in(modules: Iterable[Module]) -> list[str]:
    """Find the places that start threads: the module, and the line's name of the thread."""
    found: dict[str, str] = {}  # by the thread's name: ranks of two kinds may have threads of one name
    for module in modules:
        tree = ast.parse((ROOT / module.path).read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for call in calls:
            name = ast.unparse(call.func).rpartition(".")[2]
            named = [key.value for key in call.keywords if key.arg in ("name", "thread_name_prefix")]
            if name in STARTS_A_THREAD and named:
                found.setdefault(ast.unparse(named[0]), module.path)
    return [f"{path}: {name}" for name, path in found.items()]


def with_imported(paths: set[str], modules: Iterable[Module]) -> set[str]:
    """Add the modules that others import."""
    by_path = {module.path: module for module in modules}
    found, new = set(paths), set(paths)
    while new:
        new = {each for path in new for each in by_path[path].imports if each in by_path} - found
        found |= new
    return found


def count(journey: Journey) -> Counts:
    """Count a journey in the code."""
    modules = modules_in(journey.rooms)
    forms, messages = forms_in(modules, journey.field), messages_like(journey.messages)
    on_the_way = {module.path for module in modules if (set(module.classes) | module.names) & (forms | messages)}
    threads = threads_in(modules_in(journey.threads))
    on_the_way |= {*journey.loops, *(thread.partition(":")[0] for thread in threads)}
    files = with_imported(on_the_way, modules)
    types = {
        f"{module.path}: {name}"
        for module in modules
        for name, node in module.classes.items()
        if module.path in files and module.path.startswith("actors/") and is_data_type(node)
    }
    in_order = [tuple(sorted(each)) for each in (files, forms, messages, types, threads)]
    return Counts(*in_order[:4], ("loop", *in_order[4]))


if __name__ == "__main__":
    for name, journey in JOURNEYS.items():
        found = count(journey)
        for what in ("files", "forms", "messages", "types", "threads"):
            print(name, what, *getattr(found, what), sep="\n  ")  # noqa: T201 - a command
