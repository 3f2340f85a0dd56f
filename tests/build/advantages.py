"""Builds inputs of estimators of advantages."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from actors.trainer.algorithms.advantage_inputs import AdvantageInputs


def advantage_inputs(lengths: Sequence[int], **columns: Any) -> AdvantageInputs:
    """Samples of these lengths in one group, each a rollout of its own. All tokens train unless `columns` differ."""
    count, total = len(lengths), sum(lengths)
    defaults: dict[str, Any] = {
        "rewards": np.zeros(count),
        "groups": np.zeros(count, dtype=np.int64),
        "rollouts": np.arange(count),
        "loss_mask": np.ones(total),
        "response_mask": np.ones(total),
    }
    given = defaults | columns
    for name in ("loss_mask", "response_mask"):
        given[name] = np.asarray(given[name], dtype=bool)
    return AdvantageInputs(lengths=np.array(lengths, dtype=np.int64), **given)
