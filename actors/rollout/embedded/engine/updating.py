"""Weights that others send bucket by bucket: the groups, and the session that a bucket must come in."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from torch import Tensor

from actors.rollout.embedded.engine.groups import Groups
from actors.rollout.embedded.engine.refusal import EngineRefusal
from actors.rollout.embedded.model.forward import Weights
from actors.rollout.embedded.model.payloads import named_of
from actors.rollout.embedded.model.receiving import Named, flat_room, rooms, write

FLATTENED: Final = "flattened_bucket"


class Bucket(NamedTuple):
    """Tensors that are about to be broadcast in a group, in this order."""

    group: str
    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    flattened: bool


class Updating:
    """Whether a session is open, and what comes in it. Runs on the torch thread alone, which a broadcast blocks."""

    def __init__(self, held: Callable[[], Weights]) -> None:
        """Begin without groups and with no session open.

        Args:
            held: the weights to overwrite; raises EngineRefusal where there are none.
        """
        self.groups = Groups()
        self._held = held
        self._open = False
        self._room: Tensor | None = None  # for buckets, in a session: new pages take longer than the copy

    def begin(self) -> None:
        """Open a session.

        Raises:
            EngineRefusal: one is open.
        """
        if self._open:
            raise EngineRefusal("a weight-update session is already open; call end_weight_update() first")
        self._open = True

    def end(self) -> None:
        """Close the session.

        Raises:
            EngineRefusal: none is open.
        """
        if not self._open:
            raise EngineRefusal("no weight-update session is open; call begin_weight_update() first")
        self._open = False
        self._room = None

    def receive(self, bucket: Bucket, *, wanted: bool) -> None:
        """Take a bucket from its group, and load it if it is wanted here.

        Raises:
            EngineRefusal: no session is open, the sender is gone, or a tensor does not fit; then some may be loaded.
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
        """Load the tensors of a payload, if they are wanted here.

        Raises:
            EngineRefusal: as `receive`; or the payload is not readable.
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
