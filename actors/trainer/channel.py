"""How rank 0 tells the other ranks what to do.

Orders go through the store, where a rank can wait for one with a timeout that is no failure; no rank waits for data
inside a collective.
"""

from datetime import timedelta
from threading import Event
from typing import Final

import msgspec
import torch
import torch.distributed as dist

from actors.trainer.megatron.groups import Ranks
from actors.trainer.orders import Order, Stop

POLL: Final = timedelta(seconds=2)  # how long a rank waits for an order before it looks again


class Channel:
    """The orders of one trainer, as this rank gives or gets them."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        """None was given yet."""
        self._ranks = ranks
        self._device = device
        self._num_orders = 0
        self._stopping = Event()

    def tell(self, order: Order) -> None:
        """Give an order to the other ranks, if there are any."""
        if self._ranks.world_size > 1:
            self._ranks.store.set(self._next_key(), msgspec.msgpack.encode(order))

    def next(self) -> Order:
        """Wait for the next order; after `stop` that is to stop."""
        key, store = self._next_key(), self._ranks.store
        while not self._stopping.is_set():
            try:
                store.wait([key], POLL)
            except dist.DistStoreError:  # timed out; a lost rank 0 is a DistNetworkError
                continue
            return msgspec.msgpack.decode(store.get(key), type=Order)
        return Stop()

    def stop(self) -> None:
        """End a wait at its next look; called from another thread."""
        self._stopping.set()

    def _next_key(self) -> str:
        self._num_orders += 1
        return f"command/{self._num_orders}"

    def broadcast(self, payload: bytes, size_bytes: int) -> bytes:
        """Rank 0's bytes, on every rank."""
        if self._ranks.world_size == 1:
            return payload
        shared = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        if self._ranks.rank == 0:
            shared.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        dist.broadcast(shared, src=0)
        return shared.cpu().numpy().tobytes()
