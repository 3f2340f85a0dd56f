"""Broadcast of buckets, in a torch process group with the engines of which a stage's first rank is rank 0.

SGLang joins a process group through a TCP store, under a name that prefixes the store's keys. torch has no public API
for a second process group from a store. This module uses the same private helper as SGLang, because both sides must
join in the same way.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from datetime import timedelta
from typing import Any, Final, cast

import msgspec
import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented as public
from torch.distributed.distributed_c10d import Backend, BroadcastOptions
from torch.distributed.distributed_c10d import (
    _new_process_group_helper as new_process_group,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
)

from actors.trainer.rendezvous import listening_at
from actors.trainer.weights.calls import Ask
from messages import BucketSent, UpdateGroup

JOIN_TIMEOUT_S: Final = 60.0  # seconds for all engines to join


class StageGroup:
    """One torch process group, from its store to its end."""

    def __init__(self, name: str, host: str, world_size: int, device: torch.device, *, timeout_s: float) -> None:
        """Open the store of the group at a new port.

        Args:
            name: a name that was never used before.
            host: an address of this host that engines reach.
            world_size: number of ranks: this one, and those of all engines.
            device: device of this rank.
            timeout_s: seconds for a broadcast.
        """
        self._timeout = timedelta(seconds=timeout_s)
        listener = listening_at(host)
        self._store = TCPStore(
            host,
            listener.getsockname()[1],
            world_size,
            is_master=True,
            timeout=timedelta(seconds=JOIN_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self.spec = UpdateGroup(
            name=name,
            address=host,
            port=self._store.port,
            world_size=world_size,
            backend="nccl" if device.type == "cuda" else "gloo",
        )
        self._group: Any = None

    @property
    def is_joined(self) -> bool:
        """Whether this rank and all engines have joined."""
        return self._group is not None

    def join(self) -> None:
        """Wait until all engines have joined.

        Raises:
            RuntimeError: torch's error; an engine did not join in time.
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

    def broadcast(self, tensor: Tensor) -> "Future[None]":
        """Broadcast a tensor to all engines.

        Returns:
            Future that completes when it is sent, or with a RuntimeError: an engine is gone, or did not receive it
            in time. It may be left: gloo cannot be cancelled.
        """
        options = BroadcastOptions()
        options.rootRank = 0
        work, sent = self._group.broadcast([tensor], options), Future[None]()
        if self.spec.backend == "gloo":  # its own threads send
            work.get_future().add_done_callback(lambda done: _complete(sent, done, tensor))
        else:
            work.wait()
            sent.set_result(None)
        return sent

    def leave(self) -> None:
        """End the group. Engines that wait in it get an error."""
        self._group = None
        del self._store


def _complete(sent: "Future[None]", done: Any, tensor: Tensor) -> None:
    """Complete a future with torch's. The tensor lives until then."""
    del tensor
    try:
        done.wait()
    except RuntimeError as error:
        sent.set_exception(error)
    else:
        sent.set_result(None)


class Broadcast:
    """Sends buckets by broadcast in a torch process group."""

    def __init__(self, group: StageGroup, groups: Sequence[UpdateGroup], offsets: Mapping[str, int]) -> None:
        """Send in a group, which the engines join with the first bucket.

        Args:
            group: group of this stage.
            groups: groups of all stages.
            offsets: each engine's first rank in the groups.
        """
        self._group = group
        self._groups = tuple(groups)
        self._offsets = dict(offsets)

    def carry(
        self, step: BucketSent, flat: Tensor, ask: Ask, timeout_s: float, meanwhile: Callable[[], None]
    ) -> Mapping[str, str]:
        """Broadcast a bucket while the engines receive it."""
        is_first = not self._group.is_joined
        addressed = msgspec.structs.replace(step, groups=self._groups, offsets=self._offsets)
        taken = ask(addressed, timeout_s + JOIN_TIMEOUT_S if is_first else timeout_s)
        if is_first:
            try:
                self._group.join()
            except RuntimeError as error:
                if taken.done() and (failed := taken.result()):
                    return failed  # says more than the error of the group
                raise RuntimeError(f"the update groups could not be joined: {error}") from error
        sent = self._group.broadcast(flat)
        meanwhile()
        both: list[Future[Any]] = [taken, sent]
        wait(both, return_when=FIRST_COMPLETED)
        if taken.done() and (failed := taken.result()):
            return failed  # the broadcast ends at the group's timeout
        try:
            sent.result()
        except RuntimeError:
            if failed := taken.result():
                return failed  # says more than the error of the group
            raise
        return taken.result()
