"""The script that counts the two journeys counts what is there."""

import pytest

from tests.support.journeys import JOURNEYS, count


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
