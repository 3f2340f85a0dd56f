"""Reward functions of a user."""

import time
from typing import Any


def share_of_digits(sample: Any) -> float:
    """Digits among the characters of a response: groups of an untrained model differ in it."""
    text = str(sample.response)
    return sum(character.isdigit() for character in text) / max(1, len(text))


def slowly(sample: Any) -> float:
    """Takes so long that scores are on their way at any moment."""
    time.sleep(0.01)
    return share_of_digits(sample)
