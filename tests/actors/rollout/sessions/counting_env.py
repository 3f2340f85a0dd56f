"""An environment of Gymnasium: two steps, then the end that its row says. A step after the end fails."""

from typing import Any

import gymnasium


class Counting(gymnasium.Env[str, int]):
    """Observations are digits; the rewards of its steps are 0.5 and 0.25."""

    observation_space = gymnasium.spaces.Text(2, charset="0123456789")
    action_space = gymnasium.spaces.Discrete(100)

    def __init__(self, ending: str) -> None:
        self.ending, self.num_steps = ending, 0

    def reset(self, **_: Any) -> tuple[str, dict[str, Any]]:
        """Begin."""
        return "47", {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Count an action, which has to be 47."""
        self.num_steps += 1
        if action != 47 or self.num_steps > 2:
            raise RuntimeError(f"step {self.num_steps} with {action}")
        is_last = self.num_steps == 2
        terminated, truncated = is_last and self.ending == "terminated", is_last and self.ending == "truncated"
        return "1", 0.5**self.num_steps, terminated, truncated, {}


def make(row: dict[str, Any]) -> Counting:
    """Return the environment of a row."""
    return Counting(row["metadata"]["ending"])
