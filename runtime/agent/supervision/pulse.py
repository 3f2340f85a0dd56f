"""Whether the event loop of an actor still runs: looks for the signs that it gives (runtime/host/pulse.py)."""

import os
from typing import Final

import anyio

LOOK_EVERY_S: Final = 5.0
LOOKS_PER_LIMIT: Final = 4  # at least, before a process is given up
LATE: Final = 2.0  # times the planned wait: we stood still ourselves, and maybe all of the machine
FIRST_WITHIN_S: Final = 1800.0  # from the start to the first sign: what an actor imports may lie on a slow disk
CHUNK: Final = 1 << 16  # bytes: as many as a pipe holds


class Pulse:
    """The pipe of a process's signs, in all its lives."""

    def __init__(self) -> None:
        self._signs, self.given = os.pipe()  # the end that the process writes to is `given`
        os.set_blocking(self._signs, False)

    def had_sign(self) -> bool:
        """Whether there was one since the last look."""
        try:
            return bool(os.read(self._signs, CHUNK))
        except BlockingIOError:
            return False

    def close(self) -> None:
        os.close(self._signs)
        os.close(self.given)


def stillness(still_s: float, *, waited_s: float, planned_s: float, sign: bool) -> float:
    """For how long a process has given no sign, after one more look.

    Args:
        still_s: before this look.
        waited_s: since the look before.
        planned_s: what was to be waited. After much more nothing is said of the process: it had no time either.
        sign: there was one.
    """
    return 0.0 if sign or waited_s > LATE * planned_s else still_s + waited_s


async def wait_until_still(pulse: Pulse, limit_s: float) -> None:
    """Return when a process that begins has given no sign for so long; for its first one it has FIRST_WITHIN_S.

    Args:
        pulse: where its signs arrive.
        limit_s: seconds without a sign, of looks that came in time.
    """
    planned_s = min(LOOK_EVERY_S, limit_s / LOOKS_PER_LIMIT)
    pulse.had_sign()  # of its former life
    still_s, patience_s, looked = 0.0, max(limit_s, FIRST_WITHIN_S), anyio.current_time()
    while still_s < patience_s:
        await anyio.sleep(planned_s)
        now, sign = anyio.current_time(), pulse.had_sign()
        patience_s = limit_s if sign else patience_s
        still_s = stillness(still_s, waited_s=now - looked, planned_s=planned_s, sign=sign)
        looked = now
