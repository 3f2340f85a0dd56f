"""Rules of the tree: import contracts, import cycles, sizes, and what light commands load in a fresh interpreter."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("messages", "runtime", "actors", "bin")
MESSAGES_MAY_USE = {"messages", "msgspec", "numpy"}
WORDS_OF_NATS = re.compile(  # of JetStream's API and of what it stores, in any text but a docstring
    r"\$(JS|KV|G)\b|\bNats-[A-Z]|\bKV_|^[+-](ACK|NAK|TERM|WPI|NXT)\b|\b(STREAM|CONSUMER|DIRECT)\.[A-Z]|\bjetstream\b"
    r"|^(ack_policy|deliver_policy|durable_name|filter_subjects?|opt_start_(seq|time)|replay_policy|inactive_threshold)$"
)
MAX_FUNCTION_LINES = 55  # without the docstring: those of losses and estimators are the reference pages
MAX_FUNCTION_LINES_P90 = 17
MAX_LINES = 1000
WHY_ONE_FILE = "Why one file:"  # a longer file says this in its docstring
MIN_LINES_OF_ONE_IMPORTER = 60  # a shorter module that one module imports belongs inside of that
MAY_BE_SMALL = {  # a module or package, and why its modules may be small
    "actors.rollout.requests": "the request path is to be rebuilt with fewer modules",
    "actors.trainer.phases": "colocation is to be rebuilt with fewer modules",
    "actors.rollout.offline.dump": "a source of samples; the other one is the module beside it",
    "actors.trainer.algorithms": "a module for each family of functions",
    "actors.trainer.step.profile": "its importer has over 400 lines on another subject",
    "runtime.bus.nats.greeting": "words of NATS stay in its package, whose other modules load the client",
}
HEAVY = ["aiohttp", "megatron", "nats", "torch", "transformers"]


@dataclass(frozen=True, eq=False)
class Source:
    """One of our modules, parsed when a test first asks for its tree."""

    module: str
    path: Path
    is_package: bool
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of its tree."""
        return list(ast.walk(self.tree))


@dataclass(frozen=True)
class Import:
    """`line` of a module names `target`: a module, or a name in one."""

    target: str
    line: int


@cache
def sources_of(root: Path) -> dict[str, Source]:
    sources: dict[str, Source] = {}
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        sources[module] = Source(module, path, is_package, path.read_text())
    return sources


@cache
def imports_of(source: Source) -> tuple[Import, ...]:
    """Every import of a module, wherever it stands, those by importlib with a literal name included."""
    return tuple(_imports_of(source))


def _imports_of(source: Source) -> Iterator[Import]:
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = source.module.split(".")[: -node.level + source.is_package or None]
                base = ".".join([*parents, *filter(None, [node.module])])
            yield from (Import(f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and name_of(node.func) in {"import_module", "__import__"}:
            yield from (Import(str(a.value), node.lineno) for a in node.args if isinstance(a, ast.Constant))


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def has_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return ast.get_docstring(node, clean=False) is not None  # cleaning one takes longer than finding it


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def words_of_nats(source: Source) -> Iterator[tuple[int, str]]:
    """Line and text of each string of a module that speaks JetStream's language."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {id(n.body[0].value) for n in source.nodes if isinstance(n, documented) and has_docstring(n)}
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in docstrings:
            text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
            if WORDS_OF_NATS.search(text):
                yield node.lineno, text


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its docstring."""
    documented = function.body[0] if has_docstring(function) else None
    docstring = (documented.end_lineno or 0) - documented.lineno + 1 if documented is not None else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def long_functions(sources: dict[str, Source]) -> Iterator[str]:
    """The functions that are too long, and the ninetieth percentile if it is."""
    functions = (
        (source.module, node)
        for source in sources.values()
        for node in source.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    sizes = sorted((code_lines(node), f"{name}.{node.name}") for name, node in functions)
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
        if is_within(source.module, "messages"):
            used = ((item.target.partition(".")[0], item.line) for item in imports_of(source))
            allowed = sys.stdlib_module_names | MESSAGES_MAY_USE
            found.extend(
                f"{where}:{line}: messages may not import {name}" for name, line in used if name not in allowed
            )
        if not is_within(source.module, "runtime.bus.nats"):
            spoken = words_of_nats(source)
            found.extend(f"{where}:{line}: {text!r} is a word of NATS, for runtime.bus.nats" for line, text in spoken)
        num_lines = source.text.count("\n")
        if num_lines > MAX_LINES and WHY_ONE_FILE not in (ast.get_docstring(source.tree) or ""):
            found.append(f"{where}:1: {num_lines} lines; over {MAX_LINES} a docstring says '{WHY_ONE_FILE} ...'")
    found += long_functions(sources)
    return found + [f"import cycle: {' -> '.join(cycle)}" for cycle in cycles(sources)]


def cycles(sources: dict[str, Source]) -> list[list[str]]:
    """Chains of imports, also those in functions and for types, that come back to where they began; one per cycle."""
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
    """Which of our modules this one imports: `from a import b` imports a.b if that is a module, else a."""
    targets = {item.target for item in imports_of(source)}
    modules = {target if target in sources else target.rpartition(".")[0] for target in targets}
    return {module for module in modules if module in sources and module != source.module}


def small_modules(sources: dict[str, Source]) -> Iterator[tuple[str, str]]:
    """Modules with few lines and exactly one importer, and that importer. Packages and programs do not count."""
    importers: dict[str, set[str]] = {}
    for source in sources.values():
        for item in imports_of(source):
            target = item.target if item.target in sources else item.target.rpartition(".")[0]
            importers.setdefault(target, set()).add(source.module)
    for module, source in sources.items():
        others = importers.get(module, set()) - {module}
        is_short = source.text.count("\n") < MIN_LINES_OF_ONE_IMPORTER
        if is_short and len(others) == 1 and not source.is_package:
            yield module, *others


def test_a_small_module_with_one_importer_is_seen(tmp_path: Path) -> None:
    tree = {
        "runtime/small.py": "x = 1\n" * 59,
        "runtime/lazy.py": "x = 1\n",
        "runtime/shared.py": "x = 1\n",
        "runtime/long.py": "x = 1\n" * 60,
        "runtime/package/__init__.py": "",
        "runtime/user.py": "from runtime import shared\nfrom runtime.long import x\nfrom runtime.small import x\n",
        "bin/command.py": "import runtime.package\nimport runtime.shared\n\n\ndef f():\n    import runtime.lazy\n",
    }
    write_tree(tmp_path, tree)
    assert dict(small_modules(sources_of(tmp_path))) == {
        "runtime.small": "runtime.user",
        "runtime.lazy": "bin.command",
    }


def test_the_tree_keeps_its_rules() -> None:
    """One test for all rules that need each module's tree: a worker of its own for each would parse them again."""
    assert violations(ROOT) == []
    found = dict(small_modules(sources_of(ROOT)))
    excused = {place for place in MAY_BE_SMALL for module in found if is_within(module, place)}
    wrong = [f"{module}: merge it into {importer}, its only importer" for module, importer in found.items()]
    assert [line for line in wrong if not any(is_within(line.partition(":")[0], place) for place in excused)] == []
    assert excused == MAY_BE_SMALL.keys(), "an exception is not needed any more"


BAD_TREE = {
    "messages/base.py": "import torch\n",
    "messages/late.py": "def f():\n    from runtime import bus\n",
    "runtime/bus/kv.py": '"""Of $JS."""\nWORD = b"$JS.API"\n\n\ndef f():\n    "Nats-Msg-Id"\n    return f"KV_{f}"\n',
    "runtime/bus/nats/store.py": "API = '$JS.API'\n",
    "runtime/settings/toml.py": "x = {'ack_policy': '+ACK'}\n",
    "actors/filter/lengths.py": "def longest():\n"
    + "    x = 1\n" * 60
    + "\n\ndef rather_long():\n"
    + "    x = 1\n" * 20,
    "runtime/__init__.py": "",
    "actors/__init__.py": "",
    "actors/registry.py": "from actors.filter import actor\n",
    "actors/filter/actor.py": "from actors import registry\n",
    "runtime/one.py": "from runtime.two import y\n",
    "runtime/two.py": "import runtime.one\n",
    "runtime/three.py": "def later():\n    import runtime.four\n",
    "runtime/four.py": "import runtime.three\n",
    "runtime/five.py": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from runtime.six import y\n",
    "runtime/six.py": "import runtime.five\n",
    "runtime/long.py": "x = 1\n" * 1001,
    "runtime/excused.py": '"""Long.\n\nWhy one file: one table.\n"""\n' + "x = 1\n" * 1001,
}
EXPECTED = {
    "messages/base.py:1: messages may not import torch",
    "messages/late.py:2: messages may not import runtime",
    "runtime/bus/kv.py:2: '$JS.API' is a word of NATS, for runtime.bus.nats",
    "runtime/bus/kv.py:7: 'KV_' is a word of NATS, for runtime.bus.nats",
    "runtime/settings/toml.py:1: 'ack_policy' is a word of NATS, for runtime.bus.nats",
    "runtime/settings/toml.py:1: '+ACK' is a word of NATS, for runtime.bus.nats",
    "actors.filter.lengths.longest: 61 lines; a function has at most 55",
    "one function of ten has 61 lines or more; at most 17",
    "runtime/long.py:1: 1001 lines; over 1000 a docstring says 'Why one file: ...'",
    "import cycle: actors.filter.actor -> actors.registry -> actors.filter.actor",
    "import cycle: runtime.five -> runtime.six -> runtime.five",
    "import cycle: runtime.four -> runtime.three -> runtime.four",
    "import cycle: runtime.one -> runtime.two -> runtime.one",
}


def write_tree(root: Path, tree: dict[str, str]) -> None:
    for name, text in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_every_rule_is_seen_broken_in_a_bad_tree(tmp_path: Path) -> None:
    write_tree(tmp_path, BAD_TREE)
    found = violations(tmp_path)
    assert len(found) == len(set(found))
    assert set(found) == EXPECTED


BREAKS = {  # a contract of pyproject.toml, and a file that breaks it
    "Imports go downwards: bin, actors, runtime, messages": ("runtime/bus/late.py", "import actors.filter"),
    "Imports within runtime go downwards": ("runtime/settings/late.py", "import runtime.ledger.late"),
    "Names of other projects register themselves: nothing imports their adapters": (
        "runtime/node/late.py",
        "import runtime.compat.slime",
    ),
    "Start scripts of slime are read by its command alone": ("bin/late.py", "import bin.slime_scripts.convert"),
    "The supervisor and the claims do not know the node daemon": (
        "runtime/node/supervisor/late.py",
        "import runtime.node.stalls",
    ),
    "The fold of a run's time knows none of its views": (
        "runtime/report/fold/late.py",
        "import runtime.report.lines",
    ),
    "Actors share messages, not code": ("actors/reward/late.py", "import actors.filter.late"),
    "NATS is used in runtime.bus.nats alone": ("runtime/bus/late.py", "import nats.js"),
    "torch is used in the trainer and the tiny engine alone": ("actors/rollout/late.py", "import torch"),
    "transformers is used in the trainer, the tiny engine, the buffer and a command": (
        "actors/reward/late.py",
        "import transformers",
    ),
    "SGLang is imported by the script that runs in its interpreter alone": (
        "actors/rollout/sglang/late.py",
        "import sglang.srt",
    ),
}
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def linted(root: Path) -> tuple[int, str]:
    """Exit code and output of import-linter on a tree, by the contracts of our pyproject.toml."""
    command = [Path(sys.executable).parent / "lint-imports", "--config", ROOT / "pyproject.toml", "--no-cache"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stdout


def test_imports_follow_the_contracts() -> None:
    code, output = linted(ROOT)
    assert code == 0, output


def test_every_contract_is_seen_broken(tmp_path: Path) -> None:
    assert set(BREAKS) == {contract["name"] for contract in CONTRACTS}
    stubs = [path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    write_tree(tmp_path, {str(path): "" for path in stubs})
    allowed = {"actors/tiny_engine/late.py": "import actors.rollout.sglang.late\n"}
    write_tree(tmp_path, allowed | {"runtime/ledger/late.py": "", "actors/filter/late.py": ""})
    for place, text in BREAKS.values():
        path = tmp_path / place
        path.write_text((path.read_text() if path.exists() else "") + text + "\n")
    code, output = linted(tmp_path)
    assert code == 1, output
    assert [name for name in BREAKS if f"{name} BROKEN" not in output] == [], output


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["runtime.settings.topology", "bin.start_topology"])
def test_help_and_check_load_nothing_heavy(module: str) -> None:
    code = f"import sys; sys.path.insert(0, '.'); import {module}; print(*sorted(sys.modules.keys() & set({HEAVY})))"
    assert run_python(code) == ""


def test_the_bus_and_the_checks_before_a_start_load_no_client_for_http() -> None:
    code = "import sys; sys.path.insert(0, '.'); import runtime.bus.bus, actors.preflight"
    assert run_python(f"{code}; print('aiohttp' in sys.modules)") == "False"


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
ONLY_SAYS = {
    "runtime.report.report",  # has no line for a verdict that keeps a group
    "runtime.report.lines",  # matches on them for the words of a failure
    "runtime.report.fold.account",  # notes their times, whatever they change
    "actors.observer.observed",  # shows them
    "actors.observer.run_facts",  # counts verdicts
}


def life_cycle_matches(source: Source) -> Iterator[tuple[int, str]]:
    """Where a module asks an event whether it is one of those that change groups."""
    if not any(name in source.text for name in LIFE_CYCLE):
        return  # most modules name none, and need no parsing
    for node in source.nodes:
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
    source = Source("actors.copy", Path(), False, text)
    assert list(life_cycle_matches(source)) == [(4, "VerdictGiven"), (2, "GroupsClosed")]
