"""The process group in which a pipeline stage of the trainer broadcasts to engines: it is rank 0 of it.

SGLang joins a group by a TCP store at an address, under a name that prefixes the store's keys. torch has no public way
to make another group than its first by a store, so the helper that SGLang uses is used here: both sides must meet.
"""

from datetime import timedelta
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented as public
from torch.distributed.distributed_c10d import Backend, BroadcastOptions
from torch.distributed.distributed_c10d import (
    _new_process_group_helper as new_process_group,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
)

from messages import UpdateGroup

JOIN_TIMEOUT_S: Final = 60.0  # for all engines to come


class StageGroup:
    """One group, from its store on to its end."""

    def __init__(self, name: str, host: str, world_size: int, device: torch.device, *, timeout_s: float) -> None:
        """Listen at a port of its own.

        Args:
            name: never used before.
            host: an address of this host that engines reach.
            world_size: this rank, and those of all engines.
            device: of this rank.
            timeout_s: of a broadcast.
        """
        self._timeout = timedelta(seconds=timeout_s)
        self._store = TCPStore(
            host, 0, world_size, is_master=True, timeout=timedelta(seconds=JOIN_TIMEOUT_S), wait_for_workers=False
        )
        self.spec = UpdateGroup(
            name=name,
            address=host,
            port=self._store.port,
            world_size=world_size,
            backend="nccl" if device.type == "cuda" else "gloo",
        )
        self._group: Any = None

    def join(self) -> None:
        """Wait until all engines are in it.

        Raises:
            RuntimeError: they did not come in time, as torch says it.
        """
        spec = self.spec
        made: Any = new_process_group(
            spec.world_size,
            0,
            [],
            Backend(spec.backend),
            PrefixStore(spec.name, self._store),
            group_name=cast(Any, spec.name),
            timeout=self._timeout,
        )
        self._group = made[0]

    def broadcast(self, tensor: Tensor) -> None:
        """Send a tensor to all engines.

        Raises:
            RuntimeError: one is gone, or did not take it in time.
        """
        options = BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()

    def leave(self) -> None:
        """End it; engines that wait in it fail."""
        self._group = None
        del self._store
