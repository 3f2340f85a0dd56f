r"""The grader `code`: runs the Python program of a response on tests of its input and output."""

import ast
import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import closing
from decimal import Decimal
from typing import Any, Final, NamedTuple, cast

from actors.reward.graders.code.running import MORE_OUTPUT_BYTES, run_inputs, run_program
from actors.reward.graders.responses import after_thought

TOTAL_S: Final = 8.0  # time of all tests of a response, without waits for a core
SECONDS: Final = "PHYSARUM_CODE_S"  # environment of grader processes: the same, from the limits of a run
MAX_PROGRAM_CHARS: Final = 200_000
TOLERANCE: Final = 1e-6  # of floats that a function returns, relative and absolute

_FENCE: Final = re.compile(
    r"^(?P<indent>[ \t]*)(?P<fence>`{3,}+|~{3,}+)[ \t]*\{?\.?(?P<language>[A-Za-z0-9_+-]*)[^\n`]*\n"
    r"(?P<text>.*?)(?:^[ \t]*(?P=fence)(?![A-Za-z0-9{])|(?=^[ \t]*(?P=fence)\w)|\Z)",
    re.M | re.S,
)
_PYTHON: Final = frozenset({"python", "py", "python3", "py3", "ipython", "ipython3", "pypy", "pypy3"})
CHECKED: Final = "assert "  # what tests that are code have


class Cases(NamedTuple):
    """Inputs and the right outputs of a program, or of a function; or code that raises if the program is wrong."""

    inputs: tuple[Any, ...] = ()  # texts; of a function, the arguments of each call
    outputs: tuple[Any, ...] = ()  # texts; of a function, values
    function: str | None = None
    wrapped: bool = False  # each value may be a list that holds the value, as in APPS
    checks: str | None = None


def code(response: str, label: Any, metadata: Mapping[str, Any] | None = None, *, timeout_s: float = TOTAL_S) -> float:
    """Run the Python program of a response on the tests of the label, in a sandbox of its own.

    The program is the last block between ``` or ~~~ fences that is marked as Python, or else the last unmarked one that
    is a program (an example of output is not), after the last `</think>`, without the indent of its fence; without any
    fence, all of the text. Tests of input and output run it once each, as a script in a sandbox of its own. With a
    function's name it runs once, and the function is called with each input; a method of a class `Solution` counts too.
    Names such as `List` and `deque` are then there without an import, as at LeetCode. Tests that are code run after it
    in its process, which may deceive them as it cannot deceive the others.

    Args:
        response: The whole response.
        label: The tests, as a dict, a list or their JSON: `{"inputs": [...], "outputs": [...], "fn_name": "add"}`, as
            in APPS and TACO, or `[{"input": ..., "output": ..., "testtype": "stdin"}, ...]`, as in LiveCodeBench. An
            input of a function is a list of arguments, or text with the JSON of one argument a line. Or code with
            `assert`: `["assert add(1, 2) == 3", ...]` or `{"test_list": [...], "test_setup_code": ...}`, as in MBPP, or
            `{"test": "def check(candidate): ...", "entry_point": "add"}`, as in HumanEval, or that text alone.
        metadata: `fn_name`, `func_name` or `entry_point`, where the label has none.
        timeout_s: Seconds in which the program ran, slept or read, in all tests together; waits for a core do not
            count. In a run it is the timeout of the grader (`reward.timeout_s`, or `reward.limits.code.timeout_s`) less
            2 s, or half of it.

    Returns:
        1.0 if all tests pass, else 0.0. The first test that fails ends the run.

    Raises:
        SandboxError: This machine cannot isolate programs, or something else killed the sandbox. No response does that.
            Or this machine was too busy: `timeout_s` ended, and for over a tenth of it the program waited for a core.
            The cause is `sandbox_lost`.

    Edges:
        Outputs are compared line by line, without the space around the text and around each line; several spaces
        between words are one. Words that are numbers are compared by value, exactly. Values of functions are compared
        as JSON: tuples and arrays are lists, floats are equal within 1e-6. If each output is a list of one item, that
        item is right too, as in APPS. A program that raises, exits with another code than 0, uses over 4 s of CPU time
        or 1 GiB of memory, writes over 1 MiB more than expected, or starts a process scores 0. So does one that uses
        `timeout_s` up, asleep or not. The end of its last thread is its end, and what its exit functions write is
        output. It has no network, no environment and one folder to write in, of 64 MiB and 10,000 files. A response
        without a program scores 0. So does a label without tests; a run refuses it.

    Source:
        The test formats of APPS (arXiv 2105.09938), LiveCodeBench (arXiv 2403.07974), HumanEval (arXiv 2107.03374) and
        MBPP (arXiv 2108.07732). slime has no such grader.
    """
    tests, program = cases_in(label, metadata), program_in(response)
    if tests is None or not program or len(program) > MAX_PROGRAM_CHARS:
        return 0.0
    if tests.checks is not None:
        return float(_passes_checks(program, tests.checks, timeout_s))
    passes = _passes_calls if tests.function else _passes_runs
    return float(passes(program, tests, timeout_s))


def program_in(response: str) -> str:
    """The program of a response; empty if it has none."""
    text = after_thought(response)
    blocks = list(_FENCE.finditer(text))
    programs = [block for block in blocks if block["language"].lower() in _PYTHON] or [
        block for block in blocks if not block["language"] and _is_program(_unindented(block))
    ]
    return _unindented(programs[-1]) if programs else "" if blocks or "```" in text else text.strip().lstrip("\ufeff")


def _unindented(block: re.Match[str]) -> str:
    indent = len(block["indent"])
    return re.sub(rf"^[ \t]{{1,{indent}}}" if indent else "^", "", block["text"], flags=re.M).strip("\n\ufeff")


def _is_program(text: str) -> bool:
    """Whether a text is Python that does something, and not an example of input or output."""
    try:
        parsed = ast.parse(text[:MAX_PROGRAM_CHARS])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(not isinstance(part, ast.Expr) or isinstance(part.value, ast.Call) for part in parsed.body)


def cases_in(label: Any, metadata: Mapping[str, Any] | None = None) -> Cases | None:
    """The tests in a label; None if it has none, or not as many outputs as inputs."""
    found = _parsed(label)
    given = metadata or {}
    name: Any = given.get("fn_name") or given.get("func_name") or given.get("entry_point")
    if checks := _checks_in(found, name):
        return Cases(checks=checks)
    if isinstance(found, list):
        cases = [cast("Mapping[Any, Any]", each) for each in cast("list[Any]", found) if isinstance(each, Mapping)]
        if len(cases) != len(cast("list[Any]", found)) or not all({"input", "output"} <= {*case} for case in cases):
            return None
        inputs, outputs = [case["input"] for case in cases], [case["output"] for case in cases]
        calls = any(case.get("testtype") == "functional" for case in cases)
        name = next((case["fn_name"] for case in cases if case.get("fn_name")), name)
        name = name if calls or all("testtype" not in case for case in cases) else None
        if calls and not name:
            return None
    elif isinstance(found, Mapping):
        by_key = cast("Mapping[Any, Any]", found)
        inputs, outputs = (by_key.get(f"{key}s", by_key.get(key)) for key in ("input", "output"))
        name = by_key.get("fn_name") or by_key.get("func_name") or name
    else:
        return None
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple):
        return None
    return _cases(cast("Sequence[Any]", inputs), cast("Sequence[Any]", outputs), name)


def _cases(inputs: Sequence[Any], outputs: Sequence[Any], name: Any) -> Cases | None:
    if not inputs or len(inputs) != len(outputs):
        return None
    if not name:
        return Cases(tuple(map(_lines_of, inputs)), tuple(map(_lines_of, outputs)))
    if not isinstance(name, str) or not name.isidentifier():
        return None
    is_text = isinstance(inputs[0], str)
    try:
        arguments = tuple(_arguments(each) for each in inputs)
        values = tuple(json.loads(each) if isinstance(each, str) and is_text else each for each in outputs)
    except (ValueError, RecursionError):
        return None
    wrapped = not is_text and all(_length(each) == 1 for each in values)
    return Cases(arguments, values, name, wrapped)


def _length(value: Any) -> int | None:
    return len(cast("Sequence[Any]", value)) if isinstance(value, list | tuple) else None


def _checks_in(found: Any, name: Any) -> str | None:
    """Tests that are code, as in MBPP and HumanEval; None if there are none."""
    before = ""
    if isinstance(found, Mapping):
        by_key = cast("Mapping[str, Any]", found)
        name = by_key.get("entry_point") or name
        before = "\n".join(_texts(by_key.get("test_imports")) + _texts(by_key.get("test_setup_code")))
        found = by_key.get("test_list") or by_key.get("test")
    texts = _texts(found)
    if not texts or not any(CHECKED in text for text in texts):
        return None
    checks = "\n".join((before, *texts))
    if re.search(r"^def check\(", checks, re.M) and not re.search(r"^check\(", checks, re.M):
        return f"{checks}\ncheck({name})" if isinstance(name, str) and name.isidentifier() else None
    return checks


def _texts(value: Any) -> list[str]:
    """A text, or a list of them; empty for anything else."""
    several = list(cast("Sequence[Any]", value)) if isinstance(value, list | tuple) else [value]
    return several if all(isinstance(each, str) for each in several) else []


def _parsed(label: Any) -> Any:
    if not isinstance(label, str):
        return label
    try:
        return json.loads(label)
    except (ValueError, RecursionError):
        return label if CHECKED in label else None


def _lines_of(value: Any) -> str:
    """Text of an input or an output; a list has a line for each item."""
    if isinstance(value, list | tuple):
        return "\n".join(map(str, cast("Sequence[Any]", value)))
    return str(value)


def _arguments(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [json.loads(line) for line in value.splitlines() if line.strip()]
    return list(cast("Sequence[Any]", value)) if isinstance(value, list | tuple) else [value]


def _passes_runs(program: str, tests: Cases, limit_s: float) -> bool:
    inputs = [
        (given, len(wanted.encode("utf-8", "surrogatepass")) + MORE_OUTPUT_BYTES)
        for given, wanted in zip(tests.inputs, tests.outputs, strict=True)
    ]
    runs = run_inputs(program, inputs, limit_s=limit_s)
    with closing(runs):
        for ran, wanted in zip(runs, tests.outputs, strict=False):
            if ran.code != 0 or not same_output(ran.output.decode("utf-8", "replace"), wanted):
                return False
    return True


def _passes_calls(program: str, tests: Cases, limit_s: float) -> bool:
    most = len(json.dumps(tests.outputs)) * 2 + MORE_OUTPUT_BYTES
    ran = run_program(program, function=tests.function, calls=tests.inputs, limit_s=limit_s, max_output_bytes=most)
    lines = ran.output.splitlines()
    if ran.code != 0 or len(lines) != len(tests.outputs):
        return False
    try:
        values = [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        return False
    return all(
        _same_value(value, wanted) or (tests.wrapped and _same_value(value, wanted[0]))
        for value, wanted in zip(values, tests.outputs, strict=True)
    )


def _passes_checks(program: str, checks: str, limit_s: float) -> bool:
    """Whether the checks came to their end, which they say by a word that the program does not know."""
    word = secrets.token_hex()
    ran = run_program(program, checks=(checks, word), limit_s=limit_s, max_output_bytes=MORE_OUTPUT_BYTES)
    return ran.code == 0 and ran.output.decode("utf-8", "replace") == word


def same_output(output: str, wanted: str) -> bool:
    """Whether two texts have the same lines: as text, or word by word with numbers by value."""
    ours, theirs = _lines(output), _lines(wanted)
    return len(ours) == len(theirs) and all(
        a == b or _same_words(a.split(), b.split()) for a, b in zip(ours, theirs, strict=True)
    )


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_words(ours: list[str], theirs: list[str]) -> bool:
    return len(ours) == len(theirs) and all(a == b or _same_number(a, b) for a, b in zip(ours, theirs, strict=True))


def _same_number(ours: str, theirs: str) -> bool:
    try:
        return "_" not in (both := ours + theirs) and both.isascii() and Decimal(ours) == Decimal(theirs)
    except ArithmeticError:
        return False


def _same_value(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, list) and isinstance(theirs, list | tuple):
        one, other = cast("list[Any]", ours), cast("Sequence[Any]", theirs)
        return len(one) == len(other) and all(map(_same_value, one, other))
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        left, right = (
            cast("Mapping[str, Any]", ours),
            {str(key): each for key, each in cast("Mapping[Any, Any]", theirs).items()},
        )
        return left.keys() == right.keys() and all(_same_value(left[key], right[key]) for key in left)
    if isinstance(ours, bool) or isinstance(theirs, bool):
        return ours is theirs
    if isinstance(ours, float) or isinstance(theirs, float):
        return _close(ours, theirs)
    return bool(ours == theirs)


def _close(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, int | float) or not isinstance(theirs, int | float):
        return False
    try:
        return math.isclose(ours, theirs, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # a whole number beyond the largest float
        return False
