"""Weight updates in buckets: torch process groups, update groups, and the begin/end calls around the buckets."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

from torch import Tensor
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage] - documented as public
    ProcessGroupGloo,
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from actors.tiny_engine.engine.requests import EngineRefusal
from actors.tiny_engine.model.forward import Weights
from actors.tiny_engine.model.payloads import named_of
from actors.tiny_engine.model.receiving import Named, flat_room, rooms, write

FLATTENED: Final = "flattened_bucket"


JOIN_TIMEOUT_S: Final = 1800.0  # of the rendezvous and of each broadcast: torch's default, which SGLang uses
SENDER: Final = 0  # rank of the trainer


def join(
    address: str, port: int, *, rank: int, world_size: int, name: str, timeout_s: float = JOIN_TIMEOUT_S
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


class Bucket(NamedTuple):
    """Description of the tensors that are broadcast next in an update group, in this order."""

    group: str
    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    flattened: bool


class Updating:
    """State of a weight update in buckets. Runs only on the torch thread; a broadcast blocks that thread."""

    def __init__(self, held: Callable[[], Weights]) -> None:
        """Start without update groups and without an open weight update.

        Args:
            held: returns the weights to overwrite; raises EngineRefusal if they are released.
        """
        self.groups = Groups()
        self._held = held
        self._open = False
        self._room: Tensor | None = None  # buffer reused for buckets: faulting in new pages takes longer than the copy

    def begin(self) -> None:
        """Begin a weight update.

        Raises:
            EngineRefusal: a weight update is open.
        """
        if self._open:
            raise EngineRefusal("a weight-update session is already open; call end_weight_update() first")
        self._open = True

    def end(self) -> None:
        """End the weight update.

        Raises:
            EngineRefusal: no weight update is open.
        """
        if not self._open:
            raise EngineRefusal("no weight-update session is open; call begin_weight_update() first")
        self._open = False
        self._room = None

    def receive(self, bucket: Bucket, *, wanted: bool) -> None:
        """Receive a bucket from its update group, and write it if `wanted`.

        Raises:
            EngineRefusal: no weight update is open, the sender is gone, or a tensor does not fit. In the last case,
                some tensors may be written.
        """
        self._check_open("update_weights_from_distributed")
        try:
            if bucket.flattened:
                flat, tensors = flat_room(bucket.dtypes, bucket.shapes, self._room)
                self._room = flat if self._room is None or len(flat) > len(self._room) else self._room
                self.groups.receive(bucket.group, [flat])
            else:
                tensors = rooms(bucket.dtypes, bucket.shapes)
                self.groups.receive(bucket.group, tensors)
        except ValueError as error:
            raise EngineRefusal(f"Failed to receive weights: {error}") from error
        if wanted:
            self._write(list(zip(bucket.names, tensors, strict=False)))

    def take(self, payload: str, load_format: str | None, *, wanted: bool) -> None:
        """Write the tensors of a payload if `wanted`.

        Raises:
            EngineRefusal: no weight update is open, the payload is unreadable, or a tensor does not fit.
        """
        self._check_open("update_weights_from_tensor")
        try:
            named = named_of(payload, load_format)
        except ValueError as error:
            raise EngineRefusal(str(error)) from error
        if wanted:
            self._write(named)

    def _check_open(self, what: str) -> None:
        if not self._open:
            raise EngineRefusal(f"{what} must run between begin_weight_update() and end_weight_update()")

    def _write(self, named: Named) -> None:
        try:
            write(self._held(), named)
        except ValueError as error:
            raise EngineRefusal(
                f"Failed to update parameter online: {error}. The weights are partially updated. "
                "Please discard the whole weights."
            ) from error
