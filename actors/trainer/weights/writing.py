"""One rank's part in writing weights to files: versions for engines, and exports. All calls come from its torch thread.

With a copy, training continues while the copy is gathered and written.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from actors.trainer.megatron.build import nothing
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.ranks import RankCalls, on_all_ranks
from actors.trainer.weights.cast import FORMS
from actors.trainer.weights.engine_sums import layout_of
from actors.trainer.weights.export import WeightExport, copied
from actors.trainer.weights.files import DeltaBase, export_to_files
from actors.trainer.weights.gathering import own_parts
from actors.trainer.weights.publish import Written
from runtime.settings.tables.engines import WeightFormat
from runtime.settings.topology import Topology


class RankWriter:
    """Writing of weights by one rank. One export at a time."""

    def __init__(
        self,
        topology: Topology,
        policy: Replica,
        critic: Replica | None,
        thread: ThreadPoolExecutor,
        calls: RankCalls,
    ) -> None:
        """Start without an export.

        Args:
            topology: topology of the run.
            policy: the model whose versions engines load.
            critic: of this rank, if it has one.
            thread: writes files.
            calls: of this rank.
        """
        self.calls = calls
        self._policy = policy
        self._critic = critic
        self._thread = thread
        self._layout = layout_of(topology, policy.hf, policy.device)
        self._bucket_bytes = topology.trainer.export_bucket_bytes  # gathered at a time
        self._export: WeightExport[Written] | None = None
        self._checksums: Mapping[str, str] = {}  # by tensor, of the version that was written last

    @property
    def pending(self) -> Future[None] | None:
        """The pending write of this rank; None: it writes nothing now."""
        assert self._export is not None
        return self._export.pending

    @on_all_ranks
    def begin_export(
        self,
        directory: str,
        *,
        copy: bool = False,
        weight_format: WeightFormat = "as_trained",
        delta: str = "",
        base: str = "",
        of_critic: bool = False,
        for_engines: bool = False,
        merged: bool = True,
    ) -> None:
        """Start to write the weights.

        Args:
            directory: for the full files.
            copy: write a copy, so that training can continue.
            weight_format: dtype and quantization of the files.
            delta: directory for the delta to the previous version; empty: no delta.
            base: full files of the previous version.
            of_critic: write the critic, not the policy.
            for_engines: compute the checksums of an engine's tensors too.
            merged: merge LoRA adapters; else write the base model.
        """
        with self._policy.memory.phase("export"):
            replica = self._critic if of_critic else self._policy
            assert replica is not None
            parts = own_parts(replica.complete_chunks(), replica.hf, merged=merged)
            if copy or of_critic:  # of a critic, numpy would hold storages that an offload frees
                parts = copied(parts)
            export = export_to_files(
                parts,
                replica.hf,
                Path(directory),
                self._thread,
                device=replica.device,
                bucket_bytes=self._bucket_bytes,
                form=FORMS[weight_format],
                delta_base=DeltaBase(Path(delta), Path(base), self._checksums) if delta else None,
                layout=self._layout if for_engines else "",
            )
            if copy:
                replica.between = export.advance
            self._export = export

    @on_all_ranks
    def advance_export(self) -> bool:
        """Gather the next bucket of the export."""
        assert self._export is not None
        return self._export.advance()

    @on_all_ranks
    def finish_export(self) -> Written:
        """Gather and write the remaining buckets."""
        assert self._export is not None
        export, self._export = self._export, None
        self._policy.between = nothing
        with self._policy.memory.phase("export"):
            written = export.finish()
        self._checksums = written.checksums
        return written
