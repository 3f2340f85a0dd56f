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


def moody(sample: Any) -> float:
    """Raises for some prompts and never answers for others; which, a prompt's own digits say."""
    first = str(sample.label)[0]
    if first == "1":
        raise ValueError("no labels that begin with 1")
    if first == "2":
        time.sleep(3600)
    return share_of_digits(sample)


def broken(sample: Any) -> float:
    """A mistake of its author's."""
    return sample.no_such_field


def picky(group: Any) -> bool:
    """A filter that raises for some groups."""
    if group.group_id % 5 == 0:
        raise KeyError(group.group_id)
    return True


def stuck(group: Any) -> bool:
    """A filter that never answers."""
    time.sleep(3600)
    return bool(group)
