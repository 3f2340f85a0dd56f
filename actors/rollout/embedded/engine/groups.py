"""Process groups of weight updates: joined as SGLang joins them, so that one sender reaches both kinds of engines."""

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

from actors.rollout.embedded.engine.refusal import EngineRefusal

TIMEOUT_S: Final = 1800.0  # of meeting and of each broadcast: torch's own, which SGLang leaves as it is
SENDER: Final = 0  # rank


def join(
    address: str, port: int, *, rank: int, world_size: int, name: str, timeout_s: float = TIMEOUT_S
) -> ProcessGroupGloo:
    """Meet the other ranks at a store, which rank 0 serves, and connect to them. Blocks until all are there.

    The prefixes are those under which torch's own function for a group beside others, which SGLang calls, puts the
    addresses of the ranks. No default group is made, so that a process may be in several of these.

    Raises:
        RuntimeError: the store is not found, or not all came in time.
    """
    timeout = timedelta(seconds=timeout_s)
    store: Store = TCPStore(address, port, world_size, rank == SENDER, timeout, multi_tenant=True)
    for prefix in (name, f"{name}/", "cpu/"):
        store = PrefixStore(prefix, store)
    return ProcessGroupGloo(store, rank, world_size, timeout)


class Groups:
    """The groups that an engine is in, by name."""

    def __init__(self) -> None:
        self._groups: dict[str, ProcessGroupGloo] = {}

    def join(self, address: str, port: int, *, rank: int, world_size: int, name: str) -> None:
        """Be a member of one more group.

        Raises:
            EngineRefusal: there is one of that name, or it did not come about.
        """
        if not name or name in self._groups:
            raise EngineRefusal(f"Failed to initialize custom process group: the name {name!r} is empty or taken.")
        try:
            self._groups[name] = join(address, port, rank=rank, world_size=world_size, name=name)
        except (RuntimeError, ValueError) as error:
            raise EngineRefusal(f"Failed to initialize custom process group: {error}.") from error

    def leave(self, name: str) -> None:
        """Leave a group; its connections close.

        Raises:
            EngineRefusal: there is none of that name.
        """
        if self._groups.pop(name, None) is None:
            raise EngineRefusal("The group to be destroyed does not exist.")

    def receive(self, name: str, rooms: Sequence[Tensor]) -> None:
        """Fill tensors with what the sender broadcasts, one after the other.

        Raises:
            EngineRefusal: there is no such group, or the sender is gone; what is in the tensors then is undefined.
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
