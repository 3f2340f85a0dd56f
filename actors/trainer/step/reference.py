"""The reference model of a KL loss: the weights that the run began with, or those of model.ref_load."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from actors.trainer.batches.batch import Floats32, MicroBatch, TrainBatch
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.models.files import file_source
from actors.trainer.models.weight_files import check_weights


class ReferenceModel:
    """A second set of weights of this rank, on the host: for its log-probs it and the replica's change places.

    So beside the model there is one such set, and of a GPU's memory a parameter at a time.
    """

    def __init__(self, replica: Replica, ref_load: str | None) -> None:
        """Take the weights, so it is made before a checkpoint is loaded.

        Args:
            replica: of this rank.
            ref_load: a model directory; none: what the replica holds.

        Raises:
            ValueError, OSError: the directory cannot be used.
        """
        self._replica = replica
        self._weights = replica.weights_copy()
        if ref_load is not None:
            check_weights(Path(ref_load), replica.hf)
            replica.set_weights(file_source(Path(ref_load)))
            replica.exchange_weights(self._weights)
            replica.optimizer.reload_model_params()

    def log_probs(self, batch: TrainBatch, micro_batches: Sequence[MicroBatch]) -> Floats32:
        """Of the tokens of the batch that train and lie in these micro-batches. A collective of all ranks."""
        column = np.zeros_like(batch.rollout_log_probs_N)
        self._replica.exchange_weights(self._weights)
        self._replica.fill_log_probs(micro_batches, column)
        self._replica.exchange_weights(self._weights)
        return column
