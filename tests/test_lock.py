"""The lock has all that pyproject.toml asks for and all that this asks for in turn, in versions that fit."""

import importlib.metadata
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
NOT_LOCKED = {"instructions", "gym"}  # extras with many packages for single graders; tests install what they import


def lock(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def requested() -> Iterator[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [lines for name, lines in project["optional-dependencies"].items() if name not in NOT_LOCKED]
    for lines in [project["dependencies"], *extras]:
        yield from map(Requirement, lines)


def applies(requirement: Requirement, extras: set[str]) -> bool:
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras or {""})


def closure() -> dict[str, list[Requirement]]:
    """Every requirement reached from pyproject.toml, by package; torch's CUDA libraries have a lock of their own."""
    reached: dict[str, list[Requirement]] = {}
    waiting = list(requested())
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in lock("cuda.lock") or requirement in reached.setdefault(name, []):
            continue
        reached[name].append(requirement)
        below = map(Requirement, importlib.metadata.requires(name) or ())
        waiting.extend(item for item in below if applies(item, requirement.extras))
    return reached


def test_lock_has_one_fitting_version_of_everything_needed_and_nothing_else() -> None:
    locked, needed = lock("laptop.lock"), closure()
    assert locked.keys() == needed.keys()
    misfits = [str(item) for name, items in needed.items() for item in items if locked[name] not in item.specifier]
    assert misfits == []


def test_lock_is_what_is_installed() -> None:
    installed = {name: importlib.metadata.version(name).split("+")[0] for name in lock("laptop.lock")}
    assert installed == lock("laptop.lock")


def test_lock_lines_are_exact_and_sorted() -> None:
    for name in {path.name for path in (ROOT / "requirements").glob("*.lock")} - {
        "sglang.lock",
        "sglang-upstream.lock",
    }:
        text = (ROOT / "requirements" / name).read_text()
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        assert lines == sorted(lines, key=lambda line: line.split("==")[0])
        assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line) for line in lines)


def test_base_requirements_have_no_torch() -> None:
    base = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert not {"torch", "megatron-core", "sglang"} & {Requirement(line).name for line in base}
