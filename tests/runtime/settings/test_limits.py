"""Each time limit strikes before the one that it must precede: by default, and for the settings of a user."""

import pytest

from runtime.settings.load import load_topology
from runtime.settings.reading.config import TopologyError
from runtime.settings.rules.limits import LIMITS, Limit, default_of
from tests.runtime.settings.shipped import LAPTOP

NAMES = [(row, term.name) for row in LIMITS for term in row.terms]


@pytest.mark.parametrize("row", LIMITS, ids=lambda row: row.why[:40])
def test_a_row_holds_by_default(row: Limit) -> None:
    assert row.holds(default_of)


@pytest.mark.parametrize(("row", "name"), NAMES, ids=lambda each: each if isinstance(each, str) else "")
def test_a_row_breaks_by_any_of_its_limits(row: Limit, name: str) -> None:
    is_less = name in [term.name for term in row.less]
    changed = {name: 1000 * default_of(name) if is_less else default_of(name) / 1000}
    assert not row.holds(lambda each: changed.get(each) or default_of(each))


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        (
            ("rollout.generate_timeout_s=300",),
            "rollout.generate_timeout_s",
            "engines.policy.first_token_after_s (300 s) + engines.policy.next_token_after_s (120 s) is below "
            "rollout.generate_timeout_s (300 s): an engine that hangs",
        ),
        (
            ("engines.policy.first_token_after_s=20000",),
            "engines.policy.first_token_after_s",
            "is below rollout.generate_timeout_s (14400 s)",
        ),
        (("bus.unresponsive_after_s=20",), "bus.unresponsive_after_s", "its default is 15"),
    ],
)
def test_settings_that_break_a_row_are_refused(changes: tuple[str, ...], key: str, words: str) -> None:
    with pytest.raises(TopologyError) as refused:
        load_topology(LAPTOP, changes)
    (problem,) = refused.value.problems
    assert problem.key == key
    assert words in problem.message


def test_a_hang_that_is_found_in_time_is_allowed() -> None:
    changes = (
        "rollout.generate_timeout_s=60",
        "engines.policy.first_token_after_s=20",
        "engines.policy.next_token_after_s=20",
    )
    load_topology(LAPTOP, changes)
