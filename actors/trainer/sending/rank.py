"""A rank's part in bringing the weights to engines. All calls come from its torch thread, on all ranks together."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from actors.trainer.megatron.groups import told
from actors.trainer.megatron.imports import parallel_state
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.models.gathering import first_rank, own_parts
from actors.trainer.models.handover import Sink, WeightFlow
from actors.trainer.rendezvous import own_address
from actors.trainer.sending.asking import AskOf
from actors.trainer.sending.collective import Broadcast
from actors.trainer.sending.group import StageGroup
from actors.trainer.sending.ipc import Segments, remove_segments, segment_prefix
from actors.trainer.sending.reckoning import Reckoning
from actors.trainer.sending.sink import BucketSink, NoSink, Sent
from messages import EngineLayout, UpdateGroup
from runtime.settings.topology import Topology


class RankSender:
    """What this rank has for sending: the group of its stage, if it is the stage's first rank."""

    def __init__(self, topology: Topology, replica: Replica, run_directory: Path, ask_of: AskOf | None) -> None:
        """No group yet; without `ask_of` nothing can be sent, only groups be made."""
        self._topology = topology
        self._replica = replica
        self._ask_of = ask_of
        self._is_first = dist.get_rank() == first_rank()
        self._group: StageGroup | None = None
        self._prefix = segment_prefix(run_directory)
        if self._is_first and replica.device.type == "cpu":
            remove_segments(self._prefix)

    def open_group(self, name: str, world_size: int, timeout_s: float) -> list[UpdateGroup]:
        """Listen for engines in a new group, in place of the old one; the groups of all stages."""
        self.leave_group()
        if self._is_first:
            stage = parallel_state.get_pipeline_model_parallel_rank()
            self._group = StageGroup(
                f"{name}-{stage}", own_address(self._topology), world_size, self._replica.device, timeout_s=timeout_s
            )
        specs = told(None if self._group is None else self._group.spec)
        return [spec for spec in specs if spec is not None]

    def join_group(self) -> list[str]:
        """Wait for the engines; why that failed, of each rank for which it did."""
        error = ""
        if self._group is not None:
            try:
                self._group.join()
            except RuntimeError as failure:  # torch's, whichever backend
                error = str(failure)
        return [each for each in told(error) if each]

    def leave_group(self) -> None:
        """End it, if there is one."""
        if self._group is not None:
            self._group.leave()
            self._group = None

    def send(
        self,
        session: str,
        instances: Sequence[str],
        readers: Mapping[str, int],
        layouts: Sequence[EngineLayout],
        timeout_s: float,
    ) -> list[Sent]:
        """Send all weights to engines, by the groups that were joined, else in shared memory; what each rank sent.

        Args:
            session: for which.
            instances: rollout actors that have the engines.
            readers: ranks by engine.
            layouts: of which it is reckoned what engines will hold, on the CPU.
            timeout_s: for a bucket.
        """
        replica = self._replica
        parts = own_parts(replica.complete_chunks(), replica.hf)
        flow = WeightFlow(
            parts,
            replica.hf,
            self._sink(session, instances, readers, layouts, timeout_s),
            device=replica.device,
            bucket_bytes=self._topology.trainer.export_bucket_bytes,
        )
        sent: list[Any] = flow.finish()
        return sent

    def _sink(
        self,
        session: str,
        instances: Sequence[str],
        readers: Mapping[str, int],
        layouts: Sequence[EngineLayout],
        timeout_s: float,
    ) -> Sink:
        if not self._is_first:
            return NoSink()
        assert self._ask_of is not None
        stage = parallel_state.get_pipeline_model_parallel_rank()
        way = Segments(f"{self._prefix}-{session}", readers) if self._group is None else Broadcast(self._group)
        reckoning = Reckoning(self._replica.hf, layouts if self._replica.device.type == "cpu" else ())
        return BucketSink(session, stage, way, self._ask_of(instances), reckoning, timeout_s=timeout_s)
