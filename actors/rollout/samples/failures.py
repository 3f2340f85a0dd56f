"""What a sample without a score does, or one whose generate function failed: the policy by cause. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from runtime.settings.tables.reward import RewardConfig

Action = Literal["drop_sample", "drop_group"] | float  # a number is the sample's reward

MAX_REASON_CHARS: Final = 2000  # errors of user functions may be arbitrarily long
_OF_ALL: Final[Mapping[str, Action]] = {"drop": "drop_group", "drop_sample": "drop_sample", "zero": 0.0}


@dataclass(frozen=True)
class FailurePolicy:
    """What a sample does whose score failed."""

    default: Action = "drop_sample"
    by_cause: Mapping[str, Action] = field(default_factory=dict[str, Action])

    def of(self, cause: str | None) -> Action:
        """The action for a cause; external workers of earlier versions name none."""
        return self.by_cause.get(cause or "", self.default)


def action_of(chosen: str) -> Action:
    """The action of a setting: "drop", "drop_sample" or "zero"."""
    return _OF_ALL[chosen]


def policy_of(reward: RewardConfig) -> FailurePolicy:
    """The policy of a topology. Scores with "retry" were tried again before: they follow `reward.on_failure`."""
    actions = msgspec.structs.asdict(reward.failures)
    chosen = {cause: action for cause, action in actions.items() if action not in (None, "retry")}
    return FailurePolicy(action_of(reward.on_failure), chosen)
