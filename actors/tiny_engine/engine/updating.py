"""Weight updates in buckets: update groups, and the begin/end calls around the buckets."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from torch import Tensor

from actors.tiny_engine.engine.groups import Groups
from actors.tiny_engine.engine.refusal import EngineRefusal
from actors.tiny_engine.model.forward import Weights
from actors.tiny_engine.model.payloads import named_of
from actors.tiny_engine.model.receiving import Named, flat_room, rooms, write

FLATTENED: Final = "flattened_bucket"


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
