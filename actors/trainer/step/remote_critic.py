"""The critic as the actor's ranks see it, if it has ranks of its own (critic_rank.py)."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch

from actors.trainer.algorithms.advantage_inputs import Flags
from actors.trainer.critic_link import CriticLink, CriticRankFailed, Learned, Returns
from actors.trainer.data.batch import Floats32, TrainBatch
from actors.trainer.ranks import RankCalls, encode_batch
from actors.trainer.step.critic import Estimates
from actors.trainer.step.learner import Done, OptimizerStep


class RemoteCritic:
    """Has the critic's ranks compute values and learn returns, while the actor computes on.

    Rank 0 of the actor has the link, and shares the values with the other ranks of the actor.
    """

    def __init__(self, link: CriticLink | None, calls: RankCalls) -> None:
        """Set up on one rank of the actor.

        Args:
            link: Link to the critic's ranks, on rank 0 alone.
            calls: Calls among the actor's ranks.
        """
        self._link = link
        self._calls = calls

    def begin(self, batch: TrainBatch) -> None:
        """Have the values of a batch computed. Called on rank 0, before the actor's ranks train the batch."""
        assert self._link is not None
        self._link.tell("compute_values", encode_batch(_of_critic(batch)))

    def values(self, batch: TrainBatch, wanted_N: Flags) -> Floats32:
        """Return the values of the batch that was begun, [N], 0 for tokens outside of responses.

        A collective of the actor's ranks.

        Args:
            batch: The whole batch.
            wanted_N: Response tokens; the critic's ranks compute their values.

        Raises:
            InputError, NoSpace, CriticRankFailed: As in `CriticLink.answer`, on rank 0.
        """
        shared = self._calls.share(None if self._link is None else self._link.answer(bytes))
        if shared is None:
            raise CriticRankFailed("this rank was stopped while it waited for the critic's values")
        assert len(shared) == 4 * len(batch.tokens_N)
        values_N = np.frombuffer(shared, dtype=np.float32)
        return np.where(wanted_N, values_N, np.float32(0))

    def begin_training(self, batch: TrainBatch, estimates: Estimates) -> None:
        """Have the critic's ranks learn the returns of the batch, on rank 0; other ranks do nothing.

        Args:
            batch: The whole batch, with the loss mask that trains.
            estimates: Values and returns.
        """
        if self._link is None:
            return
        returns = Returns(estimates.returns_N.astype(np.float64).tobytes(), batch.loss_mask_N.tobytes())
        self._link.tell("learn_returns", msgspec.msgpack.encode(returns))

    def trained(self, steps: Sequence[OptimizerStep]) -> tuple[dict[str, float], list[Done]]:
        """Wait until the critic has learned the returns, on rank 0. Other ranks get nothing, and need nothing.

        Args:
            steps: Optimizer steps of the actor, whose samples are those of the critic's.

        Returns:
            Metrics, and the optimizer steps.

        Raises:
            InputError, NoSpace, CriticRankFailed: As in `CriticLink.answer`.
        """
        none = torch.zeros(0, dtype=torch.float64)
        if self._link is None:
            num_samples = int(max(step.samples.max(initial=-1) for step in steps)) + 1
            nothing_B = np.zeros(num_samples, dtype=bool)
            return {}, [Done(step, none, nothing_B, 0.0, is_taken=True) for step in steps]
        learned = self._link.answer(Learned)
        done = [
            Done(step, none, np.frombuffer(one.masked, dtype=bool), one.norm, is_taken=one.is_taken)
            for step, one in zip(steps, learned.steps, strict=True)
        ]
        return learned.metrics, done


def _of_critic(batch: TrainBatch) -> TrainBatch:
    """Leave out the columns that the critic does not read."""
    return replace(
        batch,
        routed_experts_N=None,
        kept_counts_N=None,
        kept_ids_K=None,
        temperatures_N=None,
        ref_log_probs_N=None,
        teacher_log_probs_N=None,
        old_log_probs_N=None,
    )
