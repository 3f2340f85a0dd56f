"""From what is on the disk, and what a copy holds, to which files to read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.models.delta import Version
from runtime.models.versions import OnDisk, Route, goes_whole, needed_for, route_to

WHOLE = 1000


def version(number: int) -> Version:
    return Version(number, f"sum{number}")


def whole(number: int) -> OnDisk:
    return OnDisk(version(number), WHOLE)


def delta(number: int, size: int = 20, *, base: Version | None = None) -> OnDisk:
    return OnDisk(version(number), None, base or version(number - 1), size)


CHAIN = [whole(1), delta(2), delta(3), whole(4), delta(5), delta(6)]


@pytest.mark.parametrize(
    ("held", "wanted", "expected"),
    [
        (6, 6, Route(None, (), 0)),
        (5, 6, Route(None, (6,), 20)),
        (4, 6, Route(None, (5, 6), 40)),
        (3, 6, Route(4, (5, 6), 1040)),  # version 4 has no delta
        (None, 6, Route(4, (5, 6), 1040)),
        (None, 3, Route(1, (2, 3), 1040)),
        (6, 3, Route(1, (2, 3), 1040)),  # back
        (None, 4, Route(4, (), 1000)),
    ],
)
def test_the_way_to_a_version(held: int | None, wanted: int, expected: Route) -> None:
    assert route_to(version(wanted), None if held is None else version(held), reversed(CHAIN)) == expected


def test_a_copy_of_another_checksum_is_another_version() -> None:
    assert route_to(version(5), Version(4, "other"), CHAIN) == Route(4, (5,), 1020)
    with pytest.raises(ValueError, match=r"its deltas need version 4 \(other\), which has neither"):
        route_to(version(5), version(4), [whole(4), delta(5, base=Version(4, "other"))])


def test_whole_files_are_taken_where_deltas_are_as_large() -> None:
    stored = [whole(1), *(delta(number, 400) for number in (2, 3)), OnDisk(version(4), WHOLE, version(3), 400)]
    assert route_to(version(4), version(1), stored) == Route(4, (), 1000)
    assert route_to(version(4), version(2), stored) == Route(None, (3, 4), 800)


def test_no_way_says_where_the_last_one_ends() -> None:
    with pytest.raises(ValueError, match="cannot be made") as caught:
        route_to(version(3), version(1), [delta(3), delta(5)])
    assert str(caught.value) == (
        "version 3 cannot be made from version 1 (sum1): its deltas need version 2 (sum2), which has neither whole "
        "files nor a delta; on disk: 3, 5"
    )


def test_a_delta_that_leads_back_is_no_way() -> None:
    with pytest.raises(ValueError, match="version 2 cannot be made from nothing"):
        route_to(version(2), None, [delta(2, base=version(2)), delta(1, base=version(2))])


def test_what_stays_is_the_last_whole_one_and_the_chain() -> None:
    assert needed_for(version(6), CHAIN) == {4, 5, 6}


def test_every_kth_version_is_whole() -> None:
    stored: list[OnDisk] = []
    for number in range(1, 10):
        latest = version(number - 1) if number > 1 else None
        stored.append(whole(number) if goes_whole(latest, stored, every=4) else delta(number))
    assert [at.version.number for at in stored if at.whole_bytes] == [1, 5, 9]
    assert goes_whole(version(9), stored[:-1], every=4)  # the latest is gone
    assert goes_whole(version(9), stored, every=1)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 2000)), min_size=1, max_size=8), st.data())
def test_a_way_can_be_walked(kinds: list[tuple[bool, bool, int]], data: st.DataObject) -> None:
    stored = [
        OnDisk(version(number), WHOLE if is_whole else None, version(number - 1) if has_delta else None, size)
        for number, (is_whole, has_delta, size) in enumerate(kinds, start=1)
    ]
    held = data.draw(st.sampled_from([None, *(at.version for at in stored)]))
    wanted = data.draw(st.sampled_from(stored)).version
    by_number = {at.version.number: at for at in stored}
    try:
        route = route_to(wanted, held, stored)
    except ValueError:
        assert held != wanted
        assert by_number[wanted.number].whole_bytes is None
        return
    place = held if route.whole is None else by_number[route.whole].version
    size = 0 if route.whole is None else by_number[route.whole].whole_bytes
    assert place is not None
    assert size is not None
    for number in route.deltas:
        assert by_number[number].base == place
        place, size = by_number[number].version, size + by_number[number].delta_bytes
    assert (place, size) == (wanted, route.size_bytes)
