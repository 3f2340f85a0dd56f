"""Prediction of the checksums that members of a weight sync request, computed while their tensors are sent."""

from collections.abc import Sequence
from typing import Final

import structlog
import torch

from actors.trainer.models.config import HfConfig
from actors.trainer.models.gathering import Bucket
from actors.trainer.sending.expected import Checksums, Expected, Layout
from messages import EngineLayout

log = structlog.get_logger()

MAX_HASHES: Final = 20_000  # of all layouts: 100 bytes each, sent in one message

OfLayouts = dict[str, list[Checksums]]  # of each rank, by layout key


class Reckoning:
    """Predicts the checksums of a stage's tensors in engines of some layouts."""

    def __init__(self, model: HfConfig, layouts: Sequence[EngineLayout]) -> None:
        """Prepare for the layouts that can be predicted, and log why the others cannot."""
        self._expected: dict[str, Expected] = {}
        room = MAX_HASHES
        for layout in layouts:
            try:
                expected = Expected(model, Layout(layout.tp_size, getattr(torch, layout.dtype), layout.is_filled_up))
            except ValueError as error:
                log.info("checksums_not_reckoned", layout=layout.key, reason=str(error))
                continue
            if expected.num_hashes > room:
                log.info("checksums_not_reckoned", layout=layout.key, reason=f"over {MAX_HASHES} hashes in a session")
                continue
            room -= expected.num_hashes
            self._expected[layout.key] = expected

    def add(self, bucket: Bucket) -> None:
        """Add tensors.

        Raises:
            ValueError: the model has no such tensor, or it was added before.
        """
        for expected in self._expected.values():
            expected.add(bucket)

    def result(self) -> OfLayouts:
        """Return the predicted checksums."""
        return {key: expected.so_far() for key, expected in self._expected.items()}
