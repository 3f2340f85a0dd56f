"""The learning runs' cases fit the settings, and their pictures and verdicts follow from curves."""

import tomllib
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from runtime.settings.load import load_topology
from tests.learning.__main__ import HERE, ROOT, Case, Outcome, passes, tables_of
from tests.learning.curves import picture

CASES = {
    f"{file.stem} {name}": case
    for file in sorted(HERE.glob("*.toml"))
    for name, case in msgspec.convert(tomllib.loads(file.read_text()), dict[str, Case]).items()
}


@pytest.mark.parametrize("name", CASES)
def test_settings_of_cases_are_valid(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    topology = tmp_path / "case.json"
    topology.write_bytes(msgspec.json.encode(tables_of(case)))
    load_topology(topology, (*case.set, f"{case.first_key}=first") if case.first else case.set)


def test_a_casepasses_if_every_seed_reaches_its_goal() -> None:
    case = Case(set=(), goal=0.5)
    low, high = ([(1, 0.1), (2, value)] for value in (0.4, 0.6))
    outcomes = [Outcome(case=case, seed=seed, curve=curve, held_out=None) for seed, curve in enumerate((low, high))]
    assert [outcome.reached(0.5) for outcome in outcomes] == [None, 2]
    assert not passes(case, outcomes)
    assert passes(case, outcomes[1:])
    assert passes(msgspec.structs.replace(case, why_not="its nature"), outcomes)
    assert not passes(case, [msgspec.structs.replace(outcomes[1], error="crashed")])


def test_a_picture_has_a_line_for_each_curve() -> None:
    drawn = ElementTree.fromstring(picture("a & b", [[(1, 0.0), (10, 1.0)], [(1, 2.0)]], goal=0.85))
    lines = [element.get("points") for element in drawn if element.tag.endswith("polyline")]
    assert lines[2:] == ["38.4,102.0 222.0,18.0", "38.4,18.0"]  # values above 1 are drawn at 1
    assert drawn[0].text == "a & b, 10 steps"


def test_the_shipped_topologies_exist() -> None:
    assert all((ROOT / case.topology).is_file() for case in CASES.values())
