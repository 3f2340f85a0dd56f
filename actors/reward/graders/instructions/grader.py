"""The graders `ifeval` and `ifbench`, with the rules of the package if-verifiable, corrected where they are wrong."""

import csv
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Annotated, Any, Final, cast

import msgspec

from actors.reward.graders.instructions.corrections import CORRECTED, OWN_ARGUMENTS, check_types
from actors.reward.graders.instructions.package import RuleError, checker_of, missing_data, rules
from actors.reward.graders.responses import after_thought

IDS: Final = "instruction_id_list"
_POSITIONS: Final = {
    "sentence:keyword": ("N",), "count:words_japanese": ("N",), "words:keywords_specific_position": ("n", "m"),
}  # fmt: skip  # arguments that count from 1

Metadata = Mapping[str, Any] | None


class Row(msgspec.Struct):
    """What a row says of its instructions, by the names of the benchmarks' data sets. Other keys may be there."""

    instruction_id_list: Annotated[list[str], msgspec.Meta(min_length=1)]
    kwargs: list[dict[str, Any] | None] | None = None  # one per rule


def ifeval(response: str, label: Any = None, metadata: Metadata = None) -> float:
    """Check whether a response follows every instruction of its row, by the rules of IFEval and IFBench, strictly.

    Args:
        response: The whole response. Only what follows the last `</think>` counts.
        label: Read in place of `metadata` if it is an object that names the rules; otherwise not used.
        metadata: `instruction_id_list`, the names of the rules, and `kwargs`, an object with the arguments of each. An
            argument that is null is none.

    Returns:
        1.0 if the response follows all instructions, else 0.0.

    Raises:
        ValueError: The row names no rule, a rule that does not exist, arguments that a rule lacks or does not know, or
            a rule whose NLTK data is not there. A run refuses such a row before it starts.

    Edges:
        An empty response scores 0, also one whose thought does not end. The same response always gets the same score.
        Nothing is downloaded. A response that a rule of the package fails on scores 0.

    Source:
        IFEval (arXiv 2311.07911), 25 rules, and IFBench (arXiv 2507.02833), 58, with the checks of the package
        if-verifiable 0.1.2. docs/reference/instructions.md lists rules that it checks wrongly and this does not.
    """
    checks = checks_of(label, metadata)
    said = after_thought(response).strip().replace("\r\n", "\n")
    return float(bool(said) and all(_follows(check, said) for check in checks))


def ifbench(response: str, label: Any = None, metadata: Metadata = None) -> float:
    """Check whether a response follows every instruction of its row, by the rules of IFBench and IFEval, strictly.

    Args:
        response: The whole response. Only what follows the last `</think>` counts.
        label: Read in place of `metadata` if it is an object that names the rules; otherwise not used.
        metadata: `instruction_id_list`, the names of the rules, and `kwargs`, an object with the arguments of each. An
            argument that is null is none.

    Returns:
        1.0 if the response follows all instructions, else 0.0.

    Raises:
        ValueError: As `ifeval`.

    Edges:
        As `ifeval`.

    Source:
        As `ifeval`; slime's `ifbench`, which clones a repository when it is imported and does not leave out thoughts.
    """
    return ifeval(response, label, metadata)


def checks_of(label: Any, metadata: Metadata) -> list[Callable[[str], bool]]:
    """The checks of the rules that a row names.

    Raises:
        RuleError: the row names no rule, or one that cannot be checked; says which and why.
    """
    given = cast("Any", label) if isinstance(label, Mapping) and IDS in label else metadata or {}
    try:
        row = msgspec.convert(given, Row)
    except msgspec.ValidationError as error:
        raise RuleError(f"the row's metadata must name rules and their arguments: {error}") from error
    arguments = row.kwargs if row.kwargs is not None else [None] * len(row.instruction_id_list)
    if len(arguments) != len(row.instruction_id_list):
        raise RuleError(f"kwargs has {len(arguments)} objects for {len(row.instruction_id_list)} rules")
    return [_check_of(*pair) for pair in zip(row.instruction_id_list, arguments, strict=True)]


def _check_of(rule: str, given: dict[str, Any] | None) -> Callable[[str], bool]:
    if rule not in rules():
        close = get_close_matches(rule, rules(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise RuleError(f"IFEval and IFBench have no rule {rule!r}{hint}")
    arguments = {name: _whole(value) for name, value in (given or {}).items() if value is not None}
    check = OWN_ARGUMENTS.get(rule)
    try:
        check_types(arguments)
        if check is not None:
            check(arguments)
    except RuleError as error:
        raise RuleError(f"the rule {rule!r}: {error}") from error
    if check is not None:
        corrected = CORRECTED[rule]
        return partial(corrected, arguments)
    for name in _POSITIONS.get(rule, ()):
        if not isinstance(arguments.get(name), int) or arguments[name] < 1:
            raise RuleError(f"the rule {rule!r} needs {name}, a whole number of at least 1")
    checker = checker_of(rule, arguments)
    if absent := missing_data(rule):
        names = " and ".join(absent)
        raise RuleError(f"the rule {rule!r} needs NLTK's data {names}; set reward.nltk_data to a folder that has it")
    if (corrected := CORRECTED.get(rule)) is not None:
        return partial(corrected, arguments)
    return checker.check_following


def _whole(value: Any) -> Any:
    """A whole number that a data file holds as 3.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _follows(check: Callable[[str], bool], said: str) -> bool:
    try:
        return bool(check(said))
    except (IndexError, RecursionError, csv.Error):  # of the package, on text that it does not expect
        return False
