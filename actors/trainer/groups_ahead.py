"""While the trainer waits for a batch, it computes the log-probs of groups that will be in one.

Nothing of it is stored: a group's log-probs depend on the group, the weights and the settings alone, so that a trainer
that replays a step computes the same ones then.
"""

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from actors.trainer.batches.feed import FedBatch, Feed
from actors.trainer.batches.known import KnownLogProbs, LogProbs
from actors.trainer.torch_thread import TorchThread
from runtime.settings.topology import Topology

if TYPE_CHECKING:
    from actors.trainer.commands import TrainerRank


class GroupsAhead:
    """Takes groups one by one, as verdicts keep them, so that a batch waits for one of them at most."""

    def __init__(self, topology: Topology, feed: Feed, torch_thread: TorchThread, rank: "TrainerRank") -> None:
        """Know nothing yet."""
        self._is_on = topology.trainer.log_probs_ahead
        self._feed = feed
        self._torch_thread = torch_thread
        self._rank = rank
        self._known = KnownLogProbs()
        self._took_s = 0.0  # since the last batch

    def has_work(self) -> bool:
        """Whether there is a group to compute, and room for its log-probs."""
        return self._is_on and self._known.has_room() and self._next() is not None

    def _next(self) -> int | None:
        return next((seq for seq in self._feed.kept() if seq not in self._known), None)

    async def compute_one(self) -> float:
        """Compute the log-probs of a group; return the seconds that it took."""
        seq, begin = self._next(), time.perf_counter()
        assert seq is not None
        group = self._feed.group(seq)
        columns = LogProbs() if group is None else await self._torch_thread.run(self._rank.log_probs, group)
        self._known.add(seq, columns)
        took_s = time.perf_counter() - begin
        self._took_s += took_s
        return took_s

    def put_into(self, fed: FedBatch) -> tuple[FedBatch, dict[str, float]]:
        """A batch with what is known of it, and metrics of that."""
        if not self._is_on or fed.batch is None:
            return fed, {}
        batch, share = self._known.put_into(fed.batch, {ref.group_id: ref.event_seq for ref in fed.refs})
        metrics = {"perf/log_probs_ahead_time": self._took_s, "perf/log_probs_ahead_ratio": share}
        self._took_s = 0.0
        return replace(fed, batch=batch), metrics

    def weights_moved(self) -> None:
        """Forget what was of the weights before a train step."""
        self._known.weights_moved(self._feed.history.completed)
