"""Which numbers can be rewards: one check for every door through which a reward comes in."""

import math
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # grader processes start without NumPy
    from numpy.typing import NDArray

MAX_REWARD: Final = 1e15  # the sum of the squares of a batch is still far below the largest float32, 3e38


def reward_problem(reward: float) -> str | None:
    """Return why a number can be no reward; None if it can."""
    if abs(reward) <= MAX_REWARD:
        return None
    is_finite = reward == reward and abs(reward) != math.inf
    return f"beyond the {MAX_REWARD:g} that a reward may be" if is_finite else "not a finite number"


def first_wrong(rewards: "NDArray[Any]") -> int | None:
    """Return the place of the first number that can be no reward; None if all can."""
    right = abs(rewards) <= MAX_REWARD
    return None if right.all() else int(right.argmin())
