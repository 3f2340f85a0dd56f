"""`just rewards DIR`: our graders on every row of GSM8K, and against math-verify where both answer.

    python -m tests.rewards DIR [--results DIR]

DIR has GSM8K's train.jsonl and test.jsonl (columns question and answer). The exit code is 1 if a verdict is wrong, or
if the grader `math` and math-verify differ on a pair that labelled_math.toml does not name as its fault.
"""

import argparse
import importlib.metadata
import json
import re
import sys
import time
import tomllib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from math_verify import parse, verify

from actors.reward.graders.builtin import exact_match, f1
from actors.reward.graders.math.grader import deepscaler, math
from actors.reward.graders.numeric import numeric
from actors.reward.graders.stated import dapo
from tests.support.verified import note, ran

LABELLED = Path(__file__).parents[1] / "actors" / "reward" / "graders" / "labelled_math.toml"


@dataclass
class Checked:
    """Verdicts of one kind: how many, and those that are wrong."""

    name: str
    number: int = 0
    wrong: list[str] = field(default_factory=list[str])

    def add(self, right: bool, what: str) -> None:
        """Count a verdict."""
        self.number += 1
        if not right:
            self.wrong.append(what)


def rows_of(folder: Path, name: str) -> list[tuple[str, str]]:
    """The worked solution and the number after #### of each row."""
    answers = [json.loads(line)["answer"] for line in (folder / name).read_text(encoding="utf-8").splitlines()]
    return [(answer, answer.rpartition("####")[2].strip()) for answer in answers]


def spellings(label: str) -> Iterator[str]:
    """Other forms of a whole number, which are equal to it."""
    yield label
    number = int(label.replace(",", ""))
    yield f"{number:,}"
    yield f"{number}.00"
    yield rf"\frac{{{2 * number}}}{{2}}"


def check_graders(rows: Sequence[tuple[str, str]]) -> list[Checked]:
    """Each grader on the right answer of every row, in several spellings, and on the answer of the next row."""
    right = {
        name: Checked(f"{name}: right answers") for name in ("numeric", "math", "deepscaler", "dapo", "exact_match")
    }
    wrong = {name: Checked(f"{name}: answers of another row") for name in ("numeric", "math", "deepscaler", "dapo")}
    graders: dict[str, Callable[[str, str], bool]] = {
        "math": lambda answer, label: math(rf"\boxed{{{answer}}}", label) == 1.0,
        "deepscaler": lambda answer, label: deepscaler(rf"a</think>\boxed{{{answer}}}", label) == 1.0,
        "numeric": lambda answer, label: numeric(rf"so \boxed{{{answer}}}", label) == 1.0,
    }
    for (solution, label), (_, other) in pairwise([*rows, rows[0]]):
        right["numeric"].add(numeric(solution, solution) == 1.0, f"solution {label}")
        right["dapo"].add(dapo(f"Answer: {label}", label)["acc"] is True, label)
        right["exact_match"].add(exact_match(label, label) == 1.0 and f1(label, label) == 1.0, label)
        for name, grade in graders.items():
            for spelling in spellings(label):
                right[name].add(grade(spelling, label), f"{spelling} for {label}")
        if int(other.replace(",", "")) != int(label.replace(",", "")):
            wrong["dapo"].add(dapo(f"Answer: {other}", label)["acc"] is False, f"{other} for {label}")
            for name, grade in graders.items():
                wrong[name].add(not grade(other, label), f"{other} for {label}")
    return [*right.values(), *wrong.values()]


def math_verify_says(answer: str, label: str) -> bool | None:
    """math-verify's verdict; None where it reads no expression in one of them."""
    gold, given = parse(rf"\boxed{{{label}}}"), parse(rf"\boxed{{{answer}}}")
    return bool(verify(gold, given)) if gold and given else None


def compare(pairs: Sequence[tuple[str, str]], name: str, known: Collection[tuple[str, str]] = ()) -> Checked:
    """Compare the grader `math` with math-verify where both answer. `known` are the pairs on which they differ."""
    checked = Checked(name)
    for answer, label in pairs:
        theirs = math_verify_says(answer, label)
        if theirs is not None:
            ours = math(rf"\boxed{{{answer}}}", label) == 1.0
            agree = (ours == theirs) != ((answer, label) in known)
            checked.add(agree, f"{answer} for {label}: here {ours}, math-verify {theirs}")
    return checked


def labelled() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The labelled pairs but for groups that are faults of math-verify, and those of them on which it differs too."""
    table = tomllib.loads(LABELLED.read_text(encoding="utf-8"))
    groups = [group for group in table["group"] if not group.get("math_verify")]
    pairs = [tuple(pair) for group in groups for pair in (*group["right"], *group["wrong"])]
    return pairs, [tuple(pair) for pair in table["differs"]]


def page_of(checked: Sequence[Checked], took_s: float) -> str:
    """The results as a page."""
    version = importlib.metadata.version("math-verify")
    lines = [f"# Graders on GSM8K and against math-verify, {datetime.now(UTC):%Y-%m-%d}", ""]
    lines += [f"`just rewards DIR`, {took_s:.0f} s; math-verify {version}, where both answer.", ""]
    lines += ["| verdicts | number | wrong or different |", "|---|---|---|"]
    lines += [f"| {item.name} | {item.number:,} | {len(item.wrong)} |" for item in checked]
    for item in checked:
        lines += [f"\n{item.name}:\n", *(f"- `{re.sub('`', '', what)}`" for what in item.wrong)] if item.wrong else []
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run all comparisons; print and perhaps write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--labelled", choices=("yes", "no"), default="yes", help="compare the labelled pairs too")
    parser.add_argument("--results", type=Path, help="folder for the page")
    args = parser.parse_args(argv)
    began = time.monotonic()
    test = rows_of(args.data, "test.jsonl")
    checked = check_graders([*rows_of(args.data, "train.jsonl"), *test])
    neighbours = [(other, label) for (_, label), (_, other) in pairwise(test)]
    checked.append(compare([(label, label) for _, label in test], "math-verify: right answers of the test set"))
    checked.append(compare(neighbours, "math-verify: answers of another row of the test set"))
    if args.labelled == "yes":
        pairs, known = labelled()
        checked.append(compare(pairs, "math-verify: labelled pairs, but for its known faults", known))
    page = page_of(checked, time.monotonic() - began)
    print(page)
    if args.results is not None:
        (args.results / f"{datetime.now(UTC):%Y-%m-%d}-rewards.md").write_text(page, encoding="utf-8")
        wrong = sum(bool(item.wrong) for item in checked)
        note(
            [ran("python -m tests.rewards", "GSM8K", f"{len(checked) - wrong} graders passed, {wrong} failed")],
            args.results,
        )
    return int(any(item.wrong for item in checked))


if __name__ == "__main__":
    sys.exit(main())
