"""Data of one batch between its log-probs and its training, and the user's function that may change it."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from actors.trainer.data.batch import Floats32, TrainBatch
from actors.trainer.megatron import groups as ranks
from actors.trainer.plugins.functions import TrainerPlugin, same_random_numbers, shown
from runtime.functions.table import POSTPROCESS

KEY: Final = "algorithm.rollout_data_postprocess"
CHANGEABLE: Final = ("loss_mask", "advantages")


@dataclass(frozen=True, kw_only=True)
class RolloutData:
    """One whole batch, read-only: B samples, N tokens of all samples one after the other, prompts included."""

    step: int  # train step
    groups: NDArray[np.int64]  # [B], prompt group
    rollouts: NDArray[np.int64]  # [B], equal for the parts of one rollout
    rewards: NDArray[np.float64]  # [B]
    lengths: NDArray[np.int64]  # [B], tokens
    tokens: NDArray[np.int32]  # [N]
    loss_mask: NDArray[np.bool_]  # [N], true where the token trains
    rollout_log_probs: NDArray[np.float32]  # [N], of the engine, nats; 0 where the token does not train
    old_log_probs: NDArray[np.float32]  # [N], of the policy before the first optimizer step, as above
    ref_log_probs: NDArray[np.float32] | None  # [N], of the reference model; None: the run has none
    advantages: NDArray[np.float64]  # [N]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False


def rollout_data(
    batch: TrainBatch, *, old_log_probs: Floats32, ref_log_probs: Floats32 | None, advantages: Floats32
) -> RolloutData:
    """Copy what the user's function gets of a batch. Columns are [N]."""
    return RolloutData(
        step=batch.step,
        groups=batch.groups_B.copy(),
        rollouts=batch.rollouts_B.copy(),
        rewards=batch.rewards_B.copy(),
        lengths=batch.lengths_B.copy(),
        tokens=batch.tokens_N.copy(),
        loss_mask=batch.loss_mask_N != 0,
        rollout_log_probs=batch.rollout_log_probs_N.copy(),
        old_log_probs=old_log_probs.copy(),
        ref_log_probs=None if ref_log_probs is None else ref_log_probs.copy(),
        advantages=advantages.astype(np.float64),
    )


class Postprocess(TrainerPlugin):
    """Calls `algorithm.rollout_data_postprocess`: gets `RolloutData`, returns it with another mask or advantages."""

    def __init__(self, value: str, base_dirs: Sequence[Path] = ()) -> None:
        """Load the function. Errors are those of `TrainerPlugin`."""
        super().__init__(POSTPROCESS, KEY, value, base_dirs)

    def __call__(self, data: RolloutData, *, seed: int = 0) -> RolloutData:
        """Change the data of a batch. A collective of all ranks: every rank passes the same data.

        Args:
            data: The batch.
            seed: Of the random numbers that the function draws; the same on every rank.

        Raises:
            InputError: The function raised, changed what it may not, or returned other data on another rank.
        """
        changed = self.changed(data, seed=seed)
        digest = hashlib.sha256(changed.loss_mask.tobytes() + changed.advantages.tobytes()).hexdigest()
        if len(set(ranks.all_gather_objects(digest))) > 1:
            self.refuse("returned other data on another rank; the result must depend on the data alone")
        return changed

    def changed(self, data: RolloutData, *, seed: int = 0) -> RolloutData:
        """Call the function on this rank alone, and check its result."""
        with same_random_numbers(torch.device("cpu")):
            _seed(f"{seed} {data.step}")
            return self._checked(data, self.call(data))

    def _checked(self, data: RolloutData, answer: Any) -> RolloutData:
        if not isinstance(answer, RolloutData):
            self.refuse(f"returned {shown(answer)}; expected dataclasses.replace(data, loss_mask=...), or data itself")
        for field in fields(data):
            if field.name not in CHANGEABLE and getattr(answer, field.name) is not getattr(data, field.name):
                self.refuse(f"changed {field.name}; it may change {' and '.join(CHANGEABLE)} alone")
        for name, dtype in zip(CHANGEABLE, (np.bool_, np.float64), strict=True):
            value, expected = getattr(answer, name), f"a {np.dtype(dtype)} array [{len(data.tokens)}]"
            if not isinstance(value, np.ndarray) or value.shape != data.tokens.shape or value.dtype != dtype:
                self.refuse(f"returned {shown(value)} as {name}; expected {expected}")
        if (answer.loss_mask & ~data.loss_mask).any():
            self.refuse("loss_mask is true for a token that did not train before; it may only mask more tokens")
        return answer


def _seed(text: str) -> None:
    """Seed the random number generators of Python, NumPy and torch on the CPU."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    random.seed(number)
    np.random.seed(number)
    torch.default_generator.manual_seed(number)
