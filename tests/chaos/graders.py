"""A reward function of a user, for runs that need groups whose rewards differ from the first step on."""

from typing import Any


def share_of_digits(sample: Any) -> float:
    """Digits among the characters of a response."""
    text = str(sample.response)
    return sum(character.isdigit() for character in text) / max(1, len(text))
