"""Sending of buckets by broadcast, in a torch process group with the engines."""

from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from threading import Thread
from typing import Any

import msgspec
from torch import Tensor

from actors.trainer.sending.calls import Ask
from actors.trainer.sending.group import StageGroup
from messages import BucketSent


class Broadcast:
    """Sends buckets by broadcast in a torch process group."""

    def __init__(self, group: StageGroup) -> None:
        """Send in `group`, which the engines have joined."""
        self._group = group

    def carry(self, step: BucketSent, flat: Tensor, ask: Ask, timeout_s: float) -> Mapping[str, str]:
        """Broadcast a bucket while the engines receive it."""
        taken = ask(msgspec.structs.replace(step, group=self._group.spec.name), timeout_s)
        sent: Future[None] = Future()
        Thread(target=self._broadcast, args=(flat, sent), name="broadcast", daemon=True).start()
        both: list[Future[Any]] = [taken, sent]
        wait(both, return_when=FIRST_COMPLETED)
        if taken.done() and (failed := taken.result()):
            return failed  # the thread waits until the group's timeout: gloo cannot be cancelled
        try:
            sent.result()
        except RuntimeError:
            if failed := taken.result():
                return failed  # says more than the error of the group
            raise
        return taken.result()

    def _broadcast(self, flat: Tensor, sent: "Future[None]") -> None:
        try:
            self._group.broadcast(flat)
        except RuntimeError as error:
            sent.set_exception(error)
        else:
            sent.set_result(None)
