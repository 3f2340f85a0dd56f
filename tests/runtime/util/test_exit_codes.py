"""Exit codes: one table, and one meaning for each."""

import ast
from pathlib import Path

from runtime.util import exit_codes

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "runtime/util/exit_codes.py"


def _codes_in(path: Path) -> dict[str, int]:
    """The exit codes that a module gives names to."""
    codes: dict[str, int] = {}
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=int(code))):
                codes[name] = code
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=int(code))):
                codes[name] = code
            case _:
                pass
    return {name: code for name, code in codes.items() if name.startswith("EXIT_")}


def test_every_exit_code_stands_in_one_table() -> None:
    sources = [path for folder in ("actors", "bin", "messages", "runtime") for path in (ROOT / folder).rglob("*.py")]
    assert {
        str(path.relative_to(ROOT)): codes for path in sources if path != TABLE and (codes := _codes_in(path))
    } == {}


def test_an_exit_code_means_one_thing() -> None:
    codes = _codes_in(TABLE)
    assert codes == {name: getattr(exit_codes, name) for name in codes}
    assert len(set(codes.values())) == len(codes) >= 9
