"""The locks of SGLang's environments: exact, and closed.

Of what SGLang itself asks for, that of .venv-sglang leaves some out. The tests of what is installed look at the
interpreter of this session, and at the lock of its stack.
"""

import re
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.sglang.stack import LOCKED, STACKS, UPSTREAM, Stack, installed, stack
from tests.test_lock import lock

ROOT: Final = Path(__file__).parent.parent
SGLANG: Final = "sglang"
VERIFIED: Final = ROOT / "docs" / "results" / "verified.md"


def requirements(name: str, extras: frozenset[str] = frozenset()) -> list[Requirement]:
    """What an installed package asks for here."""
    every = map(Requirement, installed()[name][1])
    return [
        item
        for item in every
        if item.marker is None or any(item.marker.evaluate({"extra": extra}) for extra in extras or {""})
    ]


def below(item: Requirement) -> list[Requirement]:
    return requirements(canonicalize_name(item.name), frozenset(item.extras))


@pytest.fixture
def locked() -> dict[str, str]:
    """Versions by package, from the lock of the stack of this session."""
    return lock(stack().lock_name)


@pytest.mark.parametrize("each", STACKS, ids=lambda each: each.name)
def test_lock_lines_are_exact_and_sorted(each: Stack) -> None:
    text = (ROOT / "requirements" / each.lock_name).read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines == sorted(lines, key=lambda line: line.split("==")[0])
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line) for line in lines)


def test_torch_and_what_its_cuda_build_needs_are_those_of_the_other_locks() -> None:
    locked, cuda = lock(LOCKED.lock_name), lock("cuda.lock")
    assert locked["torch"] == lock("laptop.lock")["torch"]
    assert {name: locked[name] for name in locked.keys() & cuda.keys()} == {"triton": cuda["triton"]}


def test_upstream_s_lock_names_the_libraries_of_torch_s_cuda_build_itself() -> None:
    """Or bin/setup_venv.py would install cuda.lock beside it, which is for another torch."""
    assert lock("cuda.lock").keys() <= lock(UPSTREAM.lock_name).keys()
    assert lock(UPSTREAM.lock_name)[SGLANG] == lock(LOCKED.lock_name)[SGLANG]


def rows_of(page: Path) -> list[list[str]]:
    """Cells of all rows of a page's tables."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_of_what_was_verified_has_the_versions_of_both_stacks() -> None:
    rows = {row[0]: row[1:] for row in rows_of(VERIFIED)}
    for each in STACKS:
        versions = lock(each.lock_name)
        environment, torch, transformers, *_ = rows[each.name]
        assert environment == f"`.venv-{each.environment}`"
        assert torch.split(",")[0] == versions["torch"]
        assert transformers == versions["transformers"]


@pytest.mark.sglang
def test_the_lock_is_what_is_installed(locked: dict[str, str]) -> None:
    assert {name: installed()[name][0].split("+")[0] for name in locked} == locked


@pytest.mark.sglang
def test_nothing_else_is_installed(locked: dict[str, str]) -> None:
    others = installed().keys() - locked.keys()
    assert others - lock("cuda.lock").keys() == {"pip"}


@pytest.mark.sglang
def test_all_but_sglang_gets_what_it_asks_for(locked: dict[str, str]) -> None:
    elsewhere = lock("cuda.lock").keys() - locked.keys()
    waiting = [item for name in locked if name != SGLANG for item in requirements(name)]
    seen: set[str] = set()
    misfits: set[str] = set()
    while waiting:
        item = waiting.pop()
        name = canonicalize_name(item.name)
        if name in elsewhere or str(item) in seen:
            continue
        seen.add(str(item))
        if name not in locked or locked[name] not in item.specifier:
            misfits.add(str(item))
        else:
            waiting += below(item)
    assert misfits == set()


@pytest.mark.sglang
def test_of_what_sglang_asks_for_this_is_left_out_and_this_is_of_another_version(locked: dict[str, str]) -> None:
    asked = {canonicalize_name(item.name): item for item in requirements(SGLANG)}
    assert asked.keys() - locked.keys() == stack().left_out
    others = {name for name in asked.keys() & locked.keys() if locked[name] not in asked[name].specifier}
    assert others == stack().other_versions
