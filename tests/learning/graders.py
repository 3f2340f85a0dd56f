"""Graders of the learning runs."""

from itertools import zip_longest
from typing import Any


def digits_and_length(sample: Any) -> dict[str, float]:
    """Two named rewards: the share of right digits, and whether the response has the label's length.

    "score" is the reward of positional_match, to compare with the other runs.
    """
    if sample.truncated:
        return {"score": 0.0, "digits": 0.0, "length": 0.0}
    ours, theirs = sample.response.strip(), sample.label.strip()
    right = sum(one == other for one, other in zip_longest(ours, theirs))
    longer = max(len(ours), len(theirs), 1)
    return {"score": right / longer, "digits": right / len(theirs), "length": float(len(ours) == len(theirs))}
