"""Torch process groups of weight updates, joined as in SGLang, so that one sender reaches both kinds of engine."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from torch import Tensor
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage] - documented as public
    ProcessGroupGloo,
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from actors.tiny_engine.engine.refusal import EngineRefusal

TIMEOUT_S: Final = 1800.0  # of the rendezvous and of each broadcast: torch's default, which SGLang uses
SENDER: Final = 0  # rank of the trainer


def join(
    address: str, port: int, *, rank: int, world_size: int, name: str, timeout_s: float = TIMEOUT_S
) -> ProcessGroupGloo:
    """Join a process group at a store that rank 0 serves. Blocks until all ranks have joined.

    The store prefixes equal those of torch's function for additional groups, which SGLang calls. No default group is
    created, so a process can be in several of these groups.

    Raises:
        RuntimeError: the store is not reachable, or not all ranks joined in time.
    """
    timeout = timedelta(seconds=timeout_s)
    store: Store = TCPStore(address, port, world_size, rank == SENDER, timeout, multi_tenant=True)
    for prefix in (name, f"{name}/", "cpu/"):
        store = PrefixStore(prefix, store)
    return ProcessGroupGloo(store, rank, world_size, timeout)


class Groups:
    """The update groups of an engine, by name."""

    def __init__(self) -> None:
        self._groups: dict[str, ProcessGroupGloo] = {}

    def join(self, address: str, port: int, *, rank: int, world_size: int, name: str) -> None:
        """Join a further update group.

        Raises:
            EngineRefusal: the name is empty or taken, or joining failed.
        """
        if not name or name in self._groups:
            raise EngineRefusal(f"Failed to initialize custom process group: the name {name!r} is empty or taken.")
        try:
            self._groups[name] = join(address, port, rank=rank, world_size=world_size, name=name)
        except (RuntimeError, ValueError) as error:
            raise EngineRefusal(f"Failed to initialize custom process group: {error}.") from error

    def leave(self, name: str) -> None:
        """Leave an update group and close its connections.

        Raises:
            EngineRefusal: no update group has this name.
        """
        if self._groups.pop(name, None) is None:
            raise EngineRefusal("The group to be destroyed does not exist.")

    def receive(self, name: str, rooms: Sequence[Tensor]) -> None:
        """Receive the sender's broadcasts into tensors, one after the other.

        Raises:
            EngineRefusal: no update group has this name, or the sender is gone; the tensors' values are then undefined.
        """
        group: Any = self._groups.get(name)  # torch's stubs lack `broadcast`
        if group is None:
            raise EngineRefusal(
                f"Failed to receive weights: Group {name} not in {list(self._groups)}. "
                "Please call `init_weights_update_group` first."
            )
        try:
            for work in [group.broadcast(room, SENDER) for room in rooms]:
                work.wait()
        except RuntimeError as error:
            raise EngineRefusal(f"Failed to receive weights: {error}") from error
