"""One rank's part in weight syncs. All calls come from its torch thread, on all ranks together.

The weights are sent as they are exported. With async export, the first rank of each stage gathers a copy while training
continues, and sends the copy. Engines then pause only while the weights are sent, not while they are gathered.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from actors.trainer.megatron.build import nothing
from actors.trainer.megatron.groups import all_gather_objects
from actors.trainer.megatron.imports import parallel_state
from actors.trainer.megatron.memory import give_back
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.ranks import RankCalls, on_all_ranks
from actors.trainer.rendezvous import own_address
from actors.trainer.weights.broadcast import Broadcast, StageGroup
from actors.trainer.weights.calls import POOL, AskOf
from actors.trainer.weights.cast import FORMS
from actors.trainer.weights.engine_sums import Layout, SumsSink, joined_sums, layout_of
from actors.trainer.weights.engines import BucketTransport, EngineSink, Sent
from actors.trainer.weights.export import (
    AS_TRAINED,
    HostCopy,
    Sink,
    WeightConversion,
    WeightExport,
    copied,
    gathered,
    kept,
)
from actors.trainer.weights.gathering import Bucket, Part, first_rank, own_parts
from actors.trainer.weights.gpu_handles import HandleSender, ranks_at_engines
from actors.trainer.weights.members import Membership
from actors.trainer.weights.shared_memory import Segments, remove_segments, segment_prefix
from messages import EngineSums, UpdateGroup
from runtime.settings.placement import weight_format
from runtime.settings.topology import Topology


class RankSender:
    """Sending of weights by one rank. The first rank of a stage holds the process groups and the kept copy."""

    def __init__(
        self,
        topology: Topology,
        replica: Replica,
        run_directory: Path,
        ask_of: AskOf | None,
        thread: ThreadPoolExecutor,
        calls: RankCalls,
    ) -> None:
        """Start without a process group. Without `ask_of`, process groups can be opened, but nothing can be sent."""
        self.calls = calls
        self._topology = topology
        self._replica = replica
        self.layout = layout_of(topology, replica.hf, replica.device)  # of the engines
        self._ask_of = ask_of
        self._is_first = dist.get_rank() == first_rank()
        self._groups: dict[int, StageGroup] = {}  # by update group
        self._specs: dict[int, list[UpdateGroup]] = {}  # groups of all stages, by update group
        self._prefix = segment_prefix(run_directory)
        self._thread = thread
        self._copying: tuple[int, WeightExport[list[Sent]], HostCopy] | None = (
            None  # the version that is being gathered
        )
        self._kept: tuple[int, list[Bucket]] = (0, [])  # the version that was gathered last; only on first ranks
        self._sending: WeightExport[list[Sent]] | None = None  # of the kept copy
        if self._is_first and replica.device.type == "cpu":
            remove_segments(self._prefix)

    @on_all_ranks
    def open_groups(self, name: str, part: int, world_size: int, timeout_s: float) -> None:
        """Open a process group for each pipeline stage, in place of the update group's old ones.

        This rank and the engines join it with the first bucket.

        Args:
            name: a name that was never used before.
            part: index of the engines' update group.
            world_size: ranks of a process group.
            timeout_s: seconds for a broadcast.
        """
        self._leave_group(part)
        group = None
        if self._is_first:
            stage = parallel_state.get_pipeline_model_parallel_rank()
            group = StageGroup(f"{name}-{stage}", own_address(), world_size, self._replica.device, timeout_s=timeout_s)
            self._groups[part] = group
        specs = all_gather_objects(None if group is None else group.spec)
        self._specs[part] = [spec for spec in specs if spec is not None]

    @on_all_ranks
    def leave_groups(self, part: int) -> None:
        """Close the process groups of an update group."""
        self._leave_group(part)

    def _leave_group(self, part: int) -> None:
        group = self._groups.pop(part, None)
        if group is not None:
            group.leave()

    @on_all_ranks
    def send(self, session: str, membership: Membership, timeout_s: float) -> list[Sent]:
        """Send the weights to prepared engines. Returns each rank's result.

        Args:
            session: ID of the weight sync.
            membership: member engines.
            timeout_s: seconds for a bucket.
        """
        with self._replica.memory.phase("export"):
            if self._shares_gpus:
                return all_gather_objects(self._send_handles(session, membership, timeout_s))
            sinks = self._sinks(session, membership, timeout_s)
            sent = self._export(self._live(self._own_parts()), sinks, self._form).finish()
        give_back()  # colocated engines need the memory next
        return sent

    @on_all_ranks
    def copy(self, version: int) -> None:
        """Copy the weights to the host while training pauses. From now on each micro-batch gathers a bucket before."""
        with self._replica.memory.phase("export"):
            host = HostCopy()
            sinks: list[Sink] = [host] if self._is_first else []
            export = self._export(self._live(copied(self._own_parts())), sinks, self._form)
            self._copying = version, export, host
            self._replica.between = export.advance

    @on_all_ranks
    def advance_copy(self) -> bool:
        """Gather the next bucket of the copy. Returns whether more buckets may remain."""
        assert self._copying is not None
        return self._copying[1].advance()

    @on_all_ranks
    def finish_copy(self) -> None:
        """Gather the remaining buckets of the copy. It replaces the kept copy, which `send_copy` sends."""
        assert self._copying is not None
        (version, export, host), self._copying = self._copying, None
        self._replica.between = nothing
        export.finish()
        self._kept = version, host.buckets

    @on_all_ranks
    def send_copy(
        self, session: str, membership: Membership, timeout_s: float, *, version: int, in_background: bool
    ) -> "Future[None]":
        """Send the kept copy, as `send` does.

        Args:
            session: ID of the weight sync.
            membership: member engines.
            timeout_s: seconds for a bucket.
            version: expected version of the kept copy.
            in_background: send in the background.

        Returns:
            Future that completes when this rank has sent its part in the background; otherwise `finish_send` sends
            it. Call `finish_send` then.
        """
        kept_version, buckets = self._kept
        assert kept_version == version, f"the host copy has version {kept_version}, not {version}"
        sinks = self._sinks(session, membership, timeout_s)
        self._sending = self._export(kept(buckets, self._replica.device), sinks, AS_TRAINED)
        if in_background:
            return self._sending.continue_in_background()
        ready = Future[None]()
        ready.set_result(None)
        return ready

    @on_all_ranks
    def finish_send(self) -> list[Sent]:
        """Wait until all ranks have sent. Returns the same as `send`."""
        assert self._sending is not None
        sending, self._sending = self._sending, None
        return sending.finish()

    def sums_of(self, sent: Sequence[Sent]) -> tuple[EngineSums | None, str]:
        """Return the checksums of what all ranks sent, as engines hold it, or why there are none."""
        if isinstance(self.layout, str):
            return None, self.layout
        shares = [each.sums for each in sent if each.sums]
        return (joined_sums(self.layout, shares) if shares else None), ""

    def _own_parts(self) -> list[Part]:
        return own_parts(self._replica.complete_chunks(), self._replica.hf)

    def _live(self, parts: list[Part]) -> Iterator[Bucket]:
        return gathered(parts, self._replica.hf, self._replica.device, self._topology.trainer.export_bucket_bytes)

    @property
    def _form(self) -> WeightConversion:
        return FORMS[weight_format(self._topology)]

    def _export(
        self, source: Iterator[Bucket], sinks: Sequence[Sink], form: WeightConversion
    ) -> WeightExport[list[Sent]]:
        """Begin an export to engines, or to the host."""
        return WeightExport(
            source,
            sinks,
            lambda by_rank: [next((each for each in results if each is not None), Sent()) for results in by_rank],
            self._thread,
            device=self._replica.device,
            bucket_bytes=self._topology.trainer.export_bucket_bytes,
            form=form,
        )

    @property
    def _shares_gpus(self) -> bool:
        pool = self._topology.engines[POOL]
        return pool.weight_transport == "ipc" and self._replica.device.type == "cuda"

    def _send_handles(self, session: str, membership: Membership, timeout_s: float) -> Sent:
        """Send CUDA IPC handles to engines on the ranks' GPUs."""
        assert self._ask_of is not None
        sender = HandleSender(
            session,
            membership.readers,
            ranks_at_engines(self._topology),
            self._ask_of(membership.instances),
            device=self._replica.device,
            fingerprints=membership.is_compared,
            timeout_s=timeout_s,
        )
        stage = parallel_state.get_pipeline_model_parallel_rank()
        firsts = sorted(set(all_gather_objects(first_rank())))
        return sender.send(self._live(self._own_parts()), self._form, stage=stage, firsts=firsts)

    def _sinks(self, session: str, membership: Membership, timeout_s: float) -> list[Sink]:
        """Return the sink for this rank's buckets: broadcast if it has a process group, otherwise shared memory."""
        if not self._is_first:
            return []
        assert self._ask_of is not None
        group, sums = self._groups.get(membership.part), None
        if membership.is_compared and isinstance(self.layout, Layout):
            sums = SumsSink(self._replica.hf, self.layout)
        if group is None:
            transport: BucketTransport = Segments(f"{self._prefix}-{session}", membership.readers)
        else:
            transport = Broadcast(group, self._specs[membership.part], membership.offsets)
        return [
            EngineSink(
                session,
                parallel_state.get_pipeline_model_parallel_rank(),
                transport,
                self._ask_of(membership.instances),
                fingerprints=membership.is_compared,
                timeout_s=timeout_s,
                sums=sums,
            )
        ]
