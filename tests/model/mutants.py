"""Plants small faults in the pure core of the books, one at a time, and says who catches each: `just mutants`.

A mutant changes one place of a module: a comparison, a condition, a number, a call of min or max, or a statement that
is left out. Each runs in a process of its own: first the explored setups (a small part of them), then the named tests.
What nothing catches is printed with its place and the change. Which mutants are drawn follows from the seed alone.

Run: python -m tests.model.mutants --number 300 --seed 1
"""

import argparse
import ast
import copy
import importlib.abc
import importlib.util
import json
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
MODULES: Final = (
    *(f"runtime.ledger.{name}" for name in ("fold", "groups", "batches", "steps", "spills", "state", "completions")),
    *(f"actors.buffer.deciding.{name}" for name in ("decide", "evaluation", "selection")),
    "actors.buffer.storage.trimming",
)
TESTS: Final = (
    "tests/runtime/ledger",
    "tests/actors/buffer/deciding",
    "tests/actors/buffer/storage/test_trimming.py",
    "tests/actors/buffer/test_ledger.py",
    "tests/actors/buffer/test_any_log.py",
    "tests/actors/buffer/test_whole_runs.py",
    "tests/actors/buffer/storage/test_recorder.py",
)
STATES: Final = 700  # of each setup
TESTS_LIMIT_S: Final = 300  # CPU seconds, so that a busy machine does not look like a loop without end
MODEL_LIMIT_S: Final = 120  # the same
WAITS_LIMIT_S: Final = 1800.0  # for a mutant that waits and computes nothing
COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


class Mutant(NamedTuple):
    """One change: the how-manieth of a module."""

    module: str
    number: int
    line: int
    text: str  # what it does


def changes_of(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield the places of a module that can be changed, each changed while it is yielded, and what the change is."""
    of_classes = {id(word.value) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for word in node.keywords}
    for node in ast.walk(tree):
        if id(node) in of_classes:
            continue  # the form of a struct, such as kw_only
        match node:
            case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
                node.ops = [COMPARISONS[type(op)]()]
                yield node, f"{type(op).__name__} -> {type(node.ops[0]).__name__}"
                node.ops = [op]
            case ast.BoolOp(op=op):
                node.op = ast.Or() if isinstance(op, ast.And) else ast.And()
                yield node, f"{type(op).__name__} -> {type(node.op).__name__}"
                node.op = op
            case ast.UnaryOp(op=ast.Not()):
                before, node.operand = node.operand, ast.UnaryOp(ast.Not(), node.operand)
                ast.copy_location(node.operand, before)
                yield node, "not left out"
                node.operand = before
            case ast.Constant(value=bool() as value):
                node.value = not value
                yield node, f"{value} -> {not value}"
                node.value = value
            case ast.Constant(value=int() as value):
                node.value = value + 1
                yield node, f"{value} -> {value + 1}"
                node.value = value
            case ast.Call(func=ast.Name(id="min" | "max" as name)):
                node.func.id = "max" if name == "min" else "min"
                yield node, f"{name} -> {node.func.id}"
                node.func.id = name
            case ast.FunctionDef(body=body) | ast.If(body=body) | ast.For(body=body):
                for place, statement in enumerate(body):
                    if isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr | ast.Delete) and not _is_text(
                        statement
                    ):
                        body[place] = ast.copy_location(ast.Pass(), statement)
                        yield statement, f"left out: {ast.unparse(statement)[:80]}"
                        body[place] = statement
            case _:
                pass


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def all_mutants() -> list[Mutant]:
    """Return every change that the tool knows."""
    found: list[Mutant] = []
    for module in MODULES:
        path = ROOT / f"{module.replace('.', '/')}.py"
        for number, (node, text) in enumerate(changes_of(ast.parse(path.read_text()))):
            found.append(Mutant(module, number, getattr(node, "lineno", 0), text))
    return found


class _Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module with a change."""

    def __init__(self, module: str, number: int) -> None:
        self.module, self.number = module, number

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        file = ROOT / f"{fullname.replace('.', '/')}.py"
        return importlib.util.spec_from_file_location(fullname, file, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        tree = ast.parse((ROOT / f"{self.module.replace('.', '/')}.py").read_text())
        for number, _ in enumerate(changes_of(tree)):
            if number == self.number:
                changed = copy.deepcopy(tree)
                break
        else:
            raise AssertionError(f"{self.module} has no change {self.number}")
        exec(compile(ast.fix_missing_locations(changed), self.module, "exec"), module.__dict__)


def install(module: str, number: int) -> None:
    """Make this process import a module with a change."""
    sys.meta_path.insert(0, _Loader(module, number))


def model_of_this_process() -> int:
    """Explore a part of each setup; 1 if a law is broken."""
    from tests.model.explore import explore
    from tests.model.test_model import SETUPS

    for setup in SETUPS:
        try:
            explore(setup, STATES, end_every=10)
        except Exception as error:  # noqa: BLE001 - a planted fault raises anything
            sys.stdout.write(f"{setup.name}: {str(error).splitlines()[0][:150]}\n")
            return 1
    return 0


def caught(mutant: Mutant) -> str:
    """Return who catches a mutant; empty: nobody."""
    here = f"from tests.model import mutants as m; m.install({mutant.module!r}, {mutant.number}); import resource; "
    bound = "resource.setrlimit(resource.RLIMIT_CPU, ({0}, {0} + 5)); "
    model = [
        sys.executable,
        "-c",
        f"{here}{bound.format(MODEL_LIMIT_S)}import sys; sys.exit(m.model_of_this_process())",
    ]
    tests = [
        sys.executable,
        "-c",
        f"{here}{bound.format(TESTS_LIMIT_S)}import pytest, sys; "
        f"sys.exit(pytest.main(['-q', '-x', '-n0', '-p', 'no:cacheprovider', *{TESTS!r}]))",
    ]
    for what, command in (("model", model), ("tests", tests)):
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAITS_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return f"{what}: no end"
        if done.returncode == -signal.SIGXCPU:
            return f"{what}: no end"
        if done.returncode:
            last = [line for line in done.stdout.splitlines() if line.startswith("FAILED") or what == "model"]
            return f"{what}: {last[-1] if last else done.stderr.splitlines()[-1] if done.stderr else 'exit'}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the drawn mutants; print one JSON line for each, then the counts. 1 if one is caught by nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=300, help="mutants to draw (default 300)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default 1)")
    parser.add_argument("--workers", type=int, default=2, help="at once (default 2)")
    parser.add_argument("--skip", type=int, default=0, help="of the drawn ones, to go on where a run ended")
    args = parser.parse_args(argv)
    known = all_mutants()
    drawn = random.Random(args.seed).sample(known, min(args.number, len(known)))[args.skip :]
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(args.workers) as pool:
        for mutant, by in zip(drawn, pool.map(caught, drawn), strict=True):
            counts[by.partition(":")[0] or "nobody"] += 1
            sys.stdout.write(json.dumps({**mutant._asdict(), "caught": by}) + "\n")
            sys.stdout.flush()
    sys.stdout.write(json.dumps({"known": len(known), "drawn": len(drawn), **counts}) + "\n")
    return int(bool(counts["nobody"]))


if __name__ == "__main__":
    sys.exit(main())
