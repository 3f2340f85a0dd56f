"""Monitors the heartbeats of an actor's event loop (sent by runtime/process/heartbeat.py)."""

import os
from typing import Final

import anyio

LOOK_EVERY_S: Final = 5.0
LOOKS_PER_LIMIT: Final = 4  # at least, before a process counts as unresponsive
LATE: Final = 2.0  # times the planned wait: this process, and maybe the whole machine, was suspended
FIRST_WITHIN_S: Final = 1800.0  # from the start to the first heartbeat: imports may come from a slow disk
CHUNK: Final = 1 << 16  # bytes: the capacity of a pipe


class Heartbeats:
    """The heartbeat pipe of a process, across its restarts."""

    def __init__(self) -> None:
        self._signs, self.given = os.pipe()  # the process writes to `given`
        os.set_blocking(self._signs, False)

    def had_sign(self) -> bool:
        """Return whether there was a heartbeat since the last check."""
        try:
            return bool(os.read(self._signs, CHUNK))
        except BlockingIOError:
            return False

    def close(self) -> None:
        os.close(self._signs)
        os.close(self.given)


def stillness(still_s: float, *, waited_s: float, planned_s: float, sign: bool) -> float:
    """Return the seconds without a heartbeat after one more check.

    Args:
        still_s: the same before this check.
        waited_s: time since the previous check.
        planned_s: planned time between checks. A much longer wait resets the count: the process may not have run.
        sign: there was a heartbeat.
    """
    return 0.0 if sign or waited_s > LATE * planned_s else still_s + waited_s


async def wait_until_still(heartbeats: Heartbeats, limit_s: float) -> None:
    """Return when a new process has sent no heartbeat for `limit_s`, or no first one within FIRST_WITHIN_S.

    Args:
        heartbeats: the pipe of its heartbeats.
        limit_s: seconds without a heartbeat, counted over checks that were on time.
    """
    planned_s = min(LOOK_EVERY_S, limit_s / LOOKS_PER_LIMIT)
    heartbeats.had_sign()  # discards those of the previous process
    still_s, patience_s, looked = 0.0, max(limit_s, FIRST_WITHIN_S), anyio.current_time()
    while still_s < patience_s:
        await anyio.sleep(planned_s)
        now, sign = anyio.current_time(), heartbeats.had_sign()
        patience_s = limit_s if sign else patience_s
        still_s = stillness(still_s, waited_s=now - looked, planned_s=planned_s, sign=sign)
        looked = now
