"""Who may import whom, read from the sources, and what the light commands may load, seen in a fresh interpreter."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = {  # a top-level package, and which of ours it may import
    "messages": {"messages"},
    "runtime": {"runtime", "messages"},
    "actors": {"actors", "runtime", "messages"},
    "bin": {"bin", "actors", "runtime", "messages"},
}
OURS = {*LAYERS, "tests"}
FLOORS = {  # a room of runtime/, and its floor: it imports itself and lower floors; files of no room are the ground
    "util": 1,
    "bus": 2,
    "models": 2,
    "settings": 3,
    "ledger": 3,
    "data": 4,
    "report": 4,
    "process": 4,
    "node": 5,
}
CELLARS = ("runtime.node.supervisor", "runtime.node.claims")  # below their room: they import none of its modules
MESSAGES_MAY_USE = {"msgspec", "numpy"}
CONFINED = {  # an outside package, and the only places that may import it
    "torch": ("actors.trainer", "actors.tiny_engine"),
    "megatron": ("actors.trainer", "actors.tiny_engine"),
    "transformers": ("actors.trainer", "actors.tiny_engine", "actors.buffer"),
    "nats": ("runtime.bus.nats",),
    "sglang": ("actors.rollout.sglang.launch",),  # runs in the interpreter that has it; else reached over HTTP
}
WORDS_OF_NATS = re.compile(  # of JetStream's API and of what it stores, in any text but a docstring
    r"\$(JS|KV|G)\b|\bNats-[A-Z]|\bKV_|^[+-](ACK|NAK|TERM|WPI|NXT)\b|\b(STREAM|CONSUMER|DIRECT)\.[A-Z]|\bjetstream\b"
    r"|^(ack_policy|deliver_policy|durable_name|filter_subjects?|opt_start_(seq|time)|replay_policy|inactive_threshold)$"
)
SHARED = {"tiny_engine": "actors.rollout.sglang"}  # an actor, and what it may import of another: it serves SGLang's API
MAX_FUNCTION_LINES = 60
MAX_FUNCTION_LINES_P90 = 20
MAX_LINES = 1000
WHY_ONE_FILE = "Why one file:"  # a longer file says this in its docstring
HEAVY = ["aiohttp", "megatron", "nats", "torch", "transformers"]


@dataclass(frozen=True, eq=False)
class Source:
    """One of our modules, parsed."""

    module: str
    path: Path
    is_package: bool
    text: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of its tree."""
        return list(ast.walk(self.tree))


@dataclass(frozen=True)
class Import:
    """`line` of a module names `target`: a module, or a name in one; `now` tells one that runs on import."""

    target: str
    line: int
    now: bool


def sources_of(root: Path) -> dict[str, Source]:
    sources: dict[str, Source] = {}
    for path in sorted(path for layer in LAYERS for path in (root / layer).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        text = path.read_text()
        sources[module] = Source(module, path, is_package, text, ast.parse(text, str(path)))
    return sources


@cache
def imports_of(source: Source) -> tuple[Import, ...]:
    """Every import of a module, wherever it stands, those by importlib with a literal name included."""
    return tuple(_imports_of(source))


def _imports_of(source: Source) -> Iterator[Import]:
    waiting: list[tuple[ast.AST, bool]] = [(source.tree, True)]
    while waiting:
        node, now = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, now) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = source.module.split(".")[: -node.level + source.is_package or None]
                base = ".".join([*parents, *filter(None, [node.module])])
            yield from (Import(f"{base}.{alias.name}", node.lineno, now) for alias in node.names)
        elif isinstance(node, ast.Call) and name_of(node.func) in {"import_module", "__import__"}:
            yield from (Import(a.value, node.lineno, now) for a in node.args if isinstance(a, ast.Constant))
        is_later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_for_types(node)
        waiting.extend((child, now and not is_later) for child in ast.iter_child_nodes(node))


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and name_of(node.test) == "TYPE_CHECKING"


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def actor_of(module: str, sources: dict[str, Source]) -> str | None:
    """The actor folder that a module is in; None for the light modules directly under actors/ and for the others."""
    parts = module.split(".")
    if len(parts) < 2 or parts[0] != "actors":
        return None
    source = sources.get(".".join(parts[:2]))
    return parts[1] if source is None or source.is_package else None


def room_of(module: str, sources: dict[str, Source]) -> str | None:
    """The room of runtime/ that a module is in; None for the ground, which is every file of no room."""
    parts = module.split(".")
    is_file = len(parts) == 2 and (source := sources.get(module)) is not None and not source.is_package
    return None if len(parts) < 2 or is_file or parts[1] not in FLOORS else parts[1]


def climbs(source: Source, target: str, sources: dict[str, Source]) -> str | None:
    """Why an import within runtime/ goes up, or None."""
    mine, theirs = room_of(source.module, sources), room_of(target, sources)
    if theirs is not None and mine != theirs and FLOORS.get(mine or "", 0) <= FLOORS[theirs]:
        return (
            f"{f'runtime.{mine}' if mine else 'the ground of runtime'} may not import runtime.{theirs}: imports go down"
        )
    for cellar in CELLARS:
        room, _, own = cellar.rpartition(".")
        if is_within(source.module, cellar) and is_within(target, room):
            module = target if target in sources else target.rpartition(".")[0]
            if module.count(".") == cellar.count(".") and not sources[module].is_package:
                return f"{own} may not import {module}: it lies below its room"
    return None


def forbidden(source: Source, found: Import, sources: dict[str, Source]) -> str | None:
    """Why an import is not allowed, or None."""
    layer, target = source.module.split(".")[0], found.target.split(".")[0]
    if target in OURS:
        if target not in LAYERS[layer]:
            return f"{layer} may not import {target}"
        mine, theirs = actor_of(source.module, sources), actor_of(found.target, sources)
        may_share = mine in SHARED and is_within(found.target, SHARED[mine])
        if mine is not None and theirs is not None and mine != theirs and not may_share:
            return f"actor {mine} may not import actor {theirs}: they share messages"
        if layer == target == "runtime":
            return climbs(source, found.target, sources)
    elif layer == "messages" and target not in sys.stdlib_module_names | MESSAGES_MAY_USE:
        return f"messages may not import {target}"
    elif target in CONFINED and not any(is_within(source.module, place) for place in CONFINED[target]):
        return f"{target} is for {' and '.join(CONFINED[target]) or 'nobody'}"
    return None


def words_of_nats(source: Source) -> Iterator[tuple[int, str]]:
    """Line and text of each string of a module that speaks JetStream's language."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {id(n.body[0].value) for n in source.nodes if isinstance(n, documented) and ast.get_docstring(n)}
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in docstrings:
            text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
            if WORDS_OF_NATS.search(text):
                yield node.lineno, text


def long_functions(sources: dict[str, Source]) -> Iterator[str]:
    """The functions that are too long, and the ninetieth percentile if it is."""
    functions = (
        (source.module, node)
        for source in sources.values()
        for node in source.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    sizes = sorted(((node.end_lineno or 0) - node.lineno + 1, f"{name}.{node.name}") for name, node in functions)
    for size, name in sizes:
        if size > MAX_FUNCTION_LINES:
            yield f"{name}: {size} lines; a function has at most {MAX_FUNCTION_LINES}"
    if sizes and (p90 := sizes[len(sizes) * 9 // 10][0]) > MAX_FUNCTION_LINES_P90:
        yield f"one function of ten has {p90} lines or more; at most {MAX_FUNCTION_LINES_P90}"


def violations(root: Path) -> list[str]:
    """Every rule broken in a tree, as `file:line: why`."""
    sources = sources_of(root)
    found: list[str] = []
    for source in sources.values():
        where = source.path.relative_to(root)
        refused = ((item.line, forbidden(source, item, sources)) for item in imports_of(source))
        found.extend(f"{where}:{line}: {why}" for line, why in refused if why)
        if not is_within(source.module, "runtime.bus.nats"):
            spoken = words_of_nats(source)
            found.extend(f"{where}:{line}: {text!r} is a word of NATS, for runtime.bus.nats" for line, text in spoken)
        num_lines = source.text.count("\n")
        if num_lines > MAX_LINES and WHY_ONE_FILE not in (ast.get_docstring(source.tree) or ""):
            found.append(f"{where}:1: {num_lines} lines; over {MAX_LINES} a docstring says '{WHY_ONE_FILE} ...'")
    found += long_functions(sources)
    return found + [f"import cycle: {' -> '.join(cycle)}" for cycle in cycles(sources)]


def cycles(sources: dict[str, Source]) -> list[list[str]]:
    """Chains of imports that run on import and come back to where they began; one chain per cycle found."""
    edges = {module: sorted(direct_targets(source, sources)) for module, source in sources.items()}
    done: set[str] = set()
    found: list[list[str]] = []

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
        elif module not in done:
            for target in edges[module]:
                visit(target, [*path, module])
            done.add(module)

    for module in edges:
        visit(module, [])
    return found


def direct_targets(source: Source, sources: dict[str, Source]) -> set[str]:
    """Which of our modules an import of this one runs: `from a import b` runs a.b if that is a module, else a."""
    targets = {item.target for item in imports_of(source) if item.now}
    modules = {target if target in sources else target.rpartition(".")[0] for target in targets}
    return {module for module in modules if module in sources and module != source.module}


def test_every_import_follows_the_layers() -> None:
    assert violations(ROOT) == []


BAD_TREE = {
    "messages/base.py": "import torch\n",
    "messages/late.py": "def f():\n    from runtime import bus\n",
    "runtime/bus/__init__.py": "import nats\nfrom actors.reward import actor\n",
    "runtime/bus/kv.py": '"""Of $JS."""\nWORD = b"$JS.API"\n\n\ndef f():\n    "Nats-Msg-Id"\n    return f"KV_{f}"\n',
    "runtime/bus/nats/store.py": "import nats\nAPI = '$JS.API'\nfrom runtime import ground\n",
    "runtime/roster.py": "import nats.js\n",
    "runtime/ground.py": "from runtime import roster\nfrom runtime.bus import kv\n",
    "runtime/settings/load.py": "from runtime.bus import kv\nfrom runtime.ledger import fold\n",
    "runtime/settings/reading/toml.py": "import runtime.settings.load, runtime.node\nx = {'ack_policy': '+ACK'}\n",
    "runtime/ledger/fold.py": "def later():\n    from runtime.data.rows import x\n",
    "runtime/data/rows.py": "from runtime.ledger import fold\nfrom runtime.report import lines\n",
    "runtime/report/lines.py": "from runtime import process\n",
    "runtime/process/__init__.py": "from runtime.node.claims import claim\n",
    "runtime/node/__init__.py": "",
    "runtime/node/daemon.py": "from runtime.settings import recipe\n",
    "runtime/node/claims/__init__.py": "",
    "runtime/node/claims/claim.py": "from runtime.node.daemon import agent\nfrom runtime.settings.load import x\n",
    "runtime/node/supervisor/spawn.py": "from runtime.node import stalls\nfrom runtime.node.claims import claim\n",
    "runtime/node/stalls.py": "from runtime.report import lines\n",
    "actors/filter/lengths.py": "def longest():\n"
    + "    x = 1\n" * 60
    + "\n\ndef rather_long():\n"
    + "    x = 1\n" * 20,
    "runtime/__init__.py": "",
    "actors/__init__.py": "",
    "actors/registry.py": "from actors.reward import actor\nfrom actors.filter import actor as other\n",
    "actors/reward/__init__.py": "",
    "actors/reward/actor.py": "from actors.filter import rules\nfrom actors import filter\nimport transformers\n",
    "actors/filter/__init__.py": "",
    "actors/filter/actor.py": "from ..reward import actor\nfrom actors import registry\n",
    "actors/trainer/__init__.py": "import torch, transformers\nfrom megatron.core import x\n",
    "actors/rollout/__init__.py": "import importlib\nimportlib.import_module('sglang.srt')\n",
    "actors/rollout/actor.py": "import torch\n",
    "actors/tiny_engine/engine/thread.py": "import torch\n",
    "actors/buffer/prompts/source.py": "import transformers\nfrom bin import start_topology\n",
    "bin/start_topology.py": "import actors.registry, runtime.bus\nimport tests.conftest\n",
    "runtime/one.py": "from runtime.two import y\n",
    "runtime/two.py": "import runtime.one\n",
    "runtime/three.py": "def later():\n    import runtime.four\n",
    "runtime/four.py": "import runtime.three\n",
    "runtime/long.py": "x = 1\n" * 1001,
    "runtime/excused.py": '"""Long.\n\nWhy one file: one table.\n"""\n' + "x = 1\n" * 1001,
}
EXPECTED = {
    "messages/base.py:1: messages may not import torch",
    "messages/late.py:2: messages may not import runtime",
    "runtime/bus/__init__.py:1: nats is for runtime.bus.nats",
    "runtime/bus/__init__.py:2: runtime may not import actors",
    "runtime/roster.py:1: nats is for runtime.bus.nats",
    "runtime/bus/kv.py:2: '$JS.API' is a word of NATS, for runtime.bus.nats",
    "runtime/bus/kv.py:7: 'KV_' is a word of NATS, for runtime.bus.nats",
    "runtime/ground.py:2: the ground of runtime may not import runtime.bus: imports go down",
    "runtime/settings/load.py:2: runtime.settings may not import runtime.ledger: imports go down",
    "runtime/settings/reading/toml.py:1: runtime.settings may not import runtime.node: imports go down",
    "runtime/settings/reading/toml.py:2: 'ack_policy' is a word of NATS, for runtime.bus.nats",
    "runtime/settings/reading/toml.py:2: '+ACK' is a word of NATS, for runtime.bus.nats",
    "runtime/ledger/fold.py:2: runtime.ledger may not import runtime.data: imports go down",
    "runtime/data/rows.py:2: runtime.data may not import runtime.report: imports go down",
    "runtime/report/lines.py:1: runtime.report may not import runtime.process: imports go down",
    "runtime/process/__init__.py:1: runtime.process may not import runtime.node: imports go down",
    "runtime/node/claims/claim.py:1: claims may not import runtime.node.daemon: it lies below its room",
    "runtime/node/supervisor/spawn.py:1: supervisor may not import runtime.node.stalls: it lies below its room",
    "actors.filter.lengths.longest: 61 lines; a function has at most 60",
    "one function of ten has 61 lines or more; at most 20",
    "actors/reward/actor.py:1: actor reward may not import actor filter: they share messages",
    "actors/reward/actor.py:2: actor reward may not import actor filter: they share messages",
    "actors/reward/actor.py:3: transformers is for actors.trainer and actors.tiny_engine and actors.buffer",
    "actors/filter/actor.py:1: actor filter may not import actor reward: they share messages",
    "actors/rollout/__init__.py:2: sglang is for actors.rollout.sglang.launch",
    "actors/rollout/actor.py:1: torch is for actors.trainer and actors.tiny_engine",
    "actors/buffer/prompts/source.py:2: actors may not import bin",
    "bin/start_topology.py:2: bin may not import tests",
    "runtime/long.py:1: 1001 lines; over 1000 a docstring says 'Why one file: ...'",
    "import cycle: actors.registry -> actors.filter.actor -> actors.registry",
    "import cycle: runtime.one -> runtime.two -> runtime.one",
}


def test_every_rule_is_seen_broken_in_a_bad_tree(tmp_path: Path) -> None:
    for name, text in BAD_TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = violations(tmp_path)
    assert len(found) == len(set(found))
    assert set(found) == EXPECTED


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=25, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["runtime.settings.topology", "bin.start_topology"])
def test_help_and_check_load_nothing_heavy(module: str) -> None:
    code = f"import sys; sys.path.insert(0, '.'); import {module}; print(*sorted(sys.modules.keys() & set({HEAVY})))"
    assert run_python(code) == ""


def test_base_packages_import_where_there_is_no_torch() -> None:
    light = ("messages", "runtime", "actors.buffer", "actors.filter", "actors.reward")
    modules = [module for module in sources_of(ROOT) if any(is_within(module, package) for package in light)]
    code = f"""
import importlib, sys
sys.path.insert(0, ".")
for absent in ("torch", "megatron", "safetensors.torch", "sglang", "sglang_router"):
    sys.modules[absent] = None
for module in {modules}:
    if not module.endswith("__main__"):
        importlib.import_module(module)
"""
    run_python(code)


LIFE_CYCLE = {"PayloadsMissing", "GroupsClosed", "VerdictGiven"}  # events that change groups: fold says what they did
ONLY_SAYS = {"runtime.report.lines"}  # matches on them for the words of a failure


def life_cycle_matches(source: Source) -> Iterator[tuple[int, str]]:
    """Where a module asks an event whether it is one of those that change groups."""
    for node in ast.walk(source.tree):
        names: list[ast.expr] = []
        if isinstance(node, ast.MatchClass):
            names = [node.cls]
        elif isinstance(node, ast.Call) and name_of(node.func) == "isinstance":
            names = [name for name in ast.walk(node.args[1]) if isinstance(name, ast.Name | ast.Attribute)]
        yield from ((node.lineno, name_of(name)) for name in names if name_of(name) in LIFE_CYCLE)


def test_the_ledger_alone_knows_what_changes_a_group() -> None:
    found = [
        f"{module}:{line}: {name}"
        for module, source in sources_of(ROOT).items()
        if not is_within(module, "runtime.ledger") and module not in ONLY_SAYS
        for line, name in life_cycle_matches(source)
    ]
    assert found == []


def test_a_copy_of_the_life_cycle_is_seen() -> None:
    text = (
        "match event:\n    case GroupsClosed():\n        pass\nisinstance(event, BatchReady | messages.VerdictGiven)\n"
    )
    source = Source("actors.copy", Path(), False, text, ast.parse(text))
    assert list(life_cycle_matches(source)) == [(4, "VerdictGiven"), (2, "GroupsClosed")]
