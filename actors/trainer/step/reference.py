"""Reference model of the KL loss: the weights at the start of the run, or those of model.ref_load."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from actors.trainer.data.batch import Floats32, MicroBatch, TrainBatch
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.models.files import file_source
from actors.trainer.models.weight_files import check_weights


class ReferenceModel:
    """Reference weights of this rank, kept in host memory and swapped with the policy's to compute log-probs.

    Only one such copy exists besides the model. A swap needs GPU memory for one parameter at a time.
    """

    def __init__(self, replica: Replica, ref_load: str | None) -> None:
        """Copy the weights. Create the reference model before a checkpoint is loaded.

        Args:
            replica: Model replica of this rank.
            ref_load: Model directory. None: the replica's current weights.

        Raises:
            ValueError, OSError: The directory cannot be used.
        """
        self._replica = replica
        self._weights = replica.weights_copy()
        if ref_load is not None:
            check_weights(Path(ref_load), replica.hf)
            replica.set_weights(file_source(Path(ref_load)))
            replica.exchange_weights(self._weights)
            replica.optimizer.reload_model_params()

    def log_probs(self, batch: TrainBatch, micro_batches: Sequence[MicroBatch]) -> Floats32:
        """Compute log-probs of the trained tokens in these micro-batches. A collective of all ranks."""
        column = np.zeros_like(batch.rollout_log_probs_N)
        self._replica.exchange_weights(self._weights)
        self._replica.fill_log_probs(micro_batches, column)
        self._replica.exchange_weights(self._weights)
        return column
