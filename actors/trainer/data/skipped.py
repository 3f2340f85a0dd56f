"""Samples of a batch that were skipped in training, by name."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from actors.trainer.data.batch import Ints, LeftOut, TrainBatch
from messages import UntrainedSamples

NOT_FINITE: Final = "not_finite"  # the sample's loss, or the gradient of its optimizer step, is not finite
WHY_LEFT_OUT: Final = {LeftOut.TOO_LONG: "too_long", LeftOut.INVALID: "invalid"}


@dataclass(frozen=True)
class Gradients:
    """Samples of a batch with and without a gradient."""

    skipped_samples: tuple[UntrainedSamples, ...]  # skipped samples with their reasons
    skipped_groups: tuple[int, ...]  # groups without a trained sample
    num_samples: int  # trained samples
    num_tokens: int  # tokens of the trained samples


NO_GRADIENTS: Final = Gradients(skipped_samples=(), skipped_groups=(), num_samples=0, num_tokens=0)


def gradients_of(batch: TrainBatch, skipped: Ints) -> Gradients:
    """Separate the trained samples from the skipped ones.

    Args:
        batch: The batch as it was trained.
        skipped: Samples whose loss, or whose optimizer step's gradient, was not finite.
    """
    trained_B = np.ones(len(batch.lengths_B), dtype=bool)
    trained_B[skipped] = False
    reasons = dict.fromkeys(skipped.tolist(), NOT_FINITE)
    for why, reason in WHY_LEFT_OUT.items():
        left_out = np.flatnonzero(batch.left_out_B == why)
        trained_B[left_out] = False
        reasons |= dict.fromkeys(left_out.tolist(), reason)
    named: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for sample, reason in sorted(reasons.items()):
        place = int(batch.indices_B[sample]), int(batch.parts_B[sample])
        named.setdefault((int(batch.groups_B[sample]), reason), []).append(place)
    with_gradient = set(batch.groups_B[trained_B].tolist())
    without = [group for group in dict.fromkeys(batch.groups_B.tolist()) if group not in with_gradient]
    return Gradients(
        skipped_samples=tuple(
            UntrainedSamples(group_id=group, reason=reason, samples=tuple(samples))
            for (group, reason), samples in named.items()
        ),
        skipped_groups=tuple(without),
        num_samples=int(trained_B.sum()),
        num_tokens=int(batch.lengths_B[trained_B].sum()),
    )
