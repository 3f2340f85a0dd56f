"""The page of the two journeys has the counts of the code, and the script counts what is there."""

import pytest

from tests.support.journeys import JOURNEYS, PAGE, count, page_with_counts


def test_counts_of_the_page_are_those_of_the_code() -> None:
    page = PAGE.read_text()
    assert page == page_with_counts(page), "run: python -m tests.support.journeys"


@pytest.mark.parametrize(
    ("journey", "file", "form"),
    [
        ("samples", "actors/trainer/data/batch.py", "TrainBatch"),
        ("weights", "actors/trainer/weights/gathering.py", "Bucket"),
    ],
)
def test_what_is_known_to_be_on_the_way_is_found(journey: str, file: str, form: str) -> None:
    found = count(JOURNEYS[journey])
    assert file in found.files
    assert form in found.forms
    assert found.messages
    assert "loop" in found.threads
