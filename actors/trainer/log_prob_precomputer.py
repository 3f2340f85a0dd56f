"""Precomputation of log-probs while the trainer waits for a batch.

The results are not stored. A group's log-probs depend only on the group, the weights and the settings. A trainer that
replays a step therefore computes the same values.
"""

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from actors.trainer.data.feed import FedBatch, Feed
from actors.trainer.data.precomputed import LogProbs, PrecomputedLogProbs
from actors.trainer.torch_thread import TorchThread
from runtime.settings.topology import Topology

if TYPE_CHECKING:
    from actors.trainer.commands import TrainerRank


class LogProbPrecomputer:
    """Precomputes log-probs group by group, as groups are kept. A batch therefore waits for at most one group."""

    def __init__(self, topology: Topology, feed: Feed, torch_thread: TorchThread, rank: "TrainerRank") -> None:
        """Start without precomputed log-probs."""
        self._is_on = topology.trainer.log_probs_ahead
        self._reference_moves = topology.algorithm.ref_update_interval is not None
        self._feed = feed
        self._torch_thread = torch_thread
        self._rank = rank
        self._precomputed = PrecomputedLogProbs()
        self._took_s = 0.0  # seconds of precomputation since the last batch

    def has_work(self) -> bool:
        """Whether a group is waiting and there is room for its log-probs."""
        return self._is_on and self._precomputed.has_room() and self._next() is not None

    def _next(self) -> int | None:
        return next((seq for seq in self._feed.kept() if seq not in self._precomputed), None)

    async def compute_one(self, step: int) -> float:
        """Compute the log-probs of one group.

        Args:
            step: The next train step. It decides which weights the reference has.

        Returns:
            Seconds that it took.
        """
        seq, begin = self._next(), time.perf_counter()
        assert seq is not None
        group = self._feed.group(seq)
        columns = LogProbs()
        if group is not None:
            columns = await self._torch_thread.run(self._rank.log_probs, replace(group, step=step))
        self._precomputed.add(seq, columns)
        took_s = time.perf_counter() - begin
        self._took_s += took_s
        return took_s

    def put_into(self, fed: FedBatch) -> tuple[FedBatch, dict[str, float]]:
        """Add precomputed log-probs to a batch. Returns the batch, and metrics of the precomputation."""
        if not self._is_on or fed.batch is None:
            return fed, {}
        batch, share = self._precomputed.put_into(fed.batch, {ref.group_id: ref.event_seq for ref in fed.refs})
        metrics = {"perf/log_probs_ahead_time": self._took_s, "perf/log_probs_ahead_ratio": share}
        self._took_s = 0.0
        return replace(fed, batch=batch), metrics

    def weights_moved(self) -> None:
        """Discard log-probs that a train step made obsolete."""
        waiting = () if self._reference_moves else self._feed.history.completed
        self._precomputed.weights_moved(waiting)
