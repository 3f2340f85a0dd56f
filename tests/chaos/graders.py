"""User reward functions and filters, with and without faults."""

import time
from typing import Any


def share_of_digits(sample: Any) -> float:
    """Return the share of digits in a response. Even a random model's groups then have different rewards."""
    text = str(sample.response)
    return sum(character.isdigit() for character in text) / max(1, len(text))


def slowly(sample: Any) -> float:
    """Grade slowly, so that scores are in flight at any moment."""
    time.sleep(0.01)
    return share_of_digits(sample)


def moody(sample: Any) -> float:
    """Raise for one sample of some prompts and hang for others, by the first digit of the label."""
    first = str(sample.label)[0]
    if first == "1" and sample.index == 0:  # only one: the run ends if its first calls all fail
        raise ValueError("no labels that begin with 1")
    if first == "2":
        time.sleep(3600)
    return share_of_digits(sample)


def broken(sample: Any) -> float:
    """Raise, as a faulty user function does, but not on the empty answer of the check before the start.

    A model's empty answer has the token that ended it.
    """
    return sample.no_such_field if sample.response_len else 0.0


def every(group: Any) -> bool:
    """Filter that keeps every group."""
    return bool(group.rewards)


def count(samples: Any) -> dict[str, int]:
    """Metrics of an evaluation set: the number of its samples, and of its prompts."""
    return {"samples": len(samples), "prompts": len({sample.item for sample in samples})}


def picky(group: Any) -> bool:
    """Filter that raises for some groups."""
    if group.group_id % 5 == 0:
        raise KeyError(group.group_id)
    return True


def stuck(group: Any) -> bool:
    """Filter that hangs."""
    time.sleep(3600)
    return bool(group)
