"""Command channel from rank 0 to the other ranks.

Orders go through the TCP store, where a wait may time out without being a failure. No rank waits for an order inside a
collective.
"""

from datetime import timedelta
from threading import Event
from typing import Final

import msgspec
import torch
import torch.distributed as dist

from actors.trainer.megatron.groups import Ranks
from actors.trainer.orders import Order, Stop

POLL: Final = timedelta(seconds=2)  # longest wait for an order before the stop flag is checked


class Channel:
    """One rank's end of the command channel."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        """Create the channel, before the first order."""
        self._ranks = ranks
        self._device = device
        self._num_orders = 0
        self._stopping = Event()

    def tell(self, order: Order) -> None:
        """Send an order to the other ranks, if there are any."""
        if self._ranks.world_size > 1:
            self._ranks.store.set(self._next_key(), msgspec.msgpack.encode(order))

    def next(self) -> Order:
        """Wait for the next order. Returns `Stop` after a call of `stop`."""
        key, store = self._next_key(), self._ranks.store
        while not self._stopping.is_set():
            try:
                store.wait([key], POLL)
            except dist.DistStoreError:  # timed out; a lost rank 0 is a DistNetworkError
                continue
            return msgspec.msgpack.decode(store.get(key), type=Order)
        return Stop()

    def stop(self) -> None:
        """End the wait in `next` at its next poll. Called from another thread."""
        self._stopping.set()

    def _next_key(self) -> str:
        self._num_orders += 1
        return f"command/{self._num_orders}"

    def broadcast(self, payload: bytes, size_bytes: int) -> bytes:
        """Broadcast rank 0's bytes to every rank and return them."""
        if self._ranks.world_size == 1:
            return payload
        shared = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        if self._ranks.rank == 0:
            shared.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        dist.broadcast(shared, src=0)
        return shared.cpu().numpy().tobytes()
