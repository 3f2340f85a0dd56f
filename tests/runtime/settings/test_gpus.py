"""GPU lists and their stable order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.settings.gpus import Gpu, address_key, order_gpus, parse_gpus, show_gpus

gpus = st.builds(Gpu, node=st.sampled_from(["n0", "n1", "n10", "n2"]), index=st.integers(0, 20))


def test_lists_and_ranges_are_read_in_the_order_they_are_written() -> None:
    assert parse_gpus("n1:0-2, n0:7,9") == (Gpu("n1", 0), Gpu("n1", 1), Gpu("n1", 2), Gpu("n0", 7), Gpu("n0", 9))
    assert parse_gpus(None) == ()


@pytest.mark.parametrize("text", ["0-7", "n0", "n0:", "n0:3-1", "n0:a", "n0:0-7,", "n0:-1"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"NODE:INDEX|names no node|has its last index before"):
        parse_gpus(text)


@given(st.lists(gpus, unique=True))
def test_showing_and_parsing_are_inverse(items: list[Gpu]) -> None:
    assert parse_gpus(show_gpus(items)) == tuple(items)


def test_indices_and_addresses_are_ordered_as_numbers() -> None:
    items = [Gpu("b", 10), Gpu("b", 2), Gpu("a", 1)]
    addresses = {"a": "10.0.0.10", "b": "10.0.0.9"}
    assert order_gpus(items, addresses) == (Gpu("b", 2), Gpu("b", 10), Gpu("a", 1))


def test_nodes_without_an_address_are_ordered_by_name_with_numbers_in_it() -> None:
    items = [Gpu("n10", 0), Gpu("n2", 0)]
    assert order_gpus(items, {"n2": "auto"}) == (Gpu("n2", 0), Gpu("n10", 0))


@given(st.permutations([Gpu(f"n{node}", index) for node in range(3) for index in range(4)]))
def test_order_does_not_depend_on_how_the_list_was_written(items: list[Gpu]) -> None:
    addresses = {"n0": "10.0.0.3", "n1": "fe80::1", "n2": "gpu-node-7"}
    assert order_gpus(items, addresses) == order_gpus(sorted(items), addresses)


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [("9.255.255.255", "10.0.0.0"), ("10.0.0.9", "10.0.0.10"), ("[fe80::9]", "fe80::a"), ("node-2", "node-10")],
)
def test_addresses_compare_by_number(smaller: str, larger: str) -> None:
    assert address_key(smaller) < address_key(larger)
