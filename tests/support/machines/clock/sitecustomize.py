"""Shifts the wall clock of this Python process by PHYSARUM_TEST_CLOCK_SHIFT_S seconds.

One kernel has one wall clock. This shifts what `time` returns. Times of files, of `datetime.now`, of nats-server and
of certificates stay the kernel's.
"""

import os
import time
from collections.abc import Callable

may_be_forked = True  # one machine has one clock
SHIFT_S = float(os.environ.get("PHYSARUM_TEST_CLOCK_SHIFT_S", "0"))
SHIFT_NS = int(SHIFT_S * 1_000_000_000)

_time, _time_ns = time.time, time.time_ns
_clock_gettime, _clock_gettime_ns = time.clock_gettime, time.clock_gettime_ns


def _shifted_clock(clock: int) -> float:
    return _clock_gettime(clock) + (SHIFT_S if clock == time.CLOCK_REALTIME else 0.0)


def _shifted_clock_ns(clock: int) -> int:
    return _clock_gettime_ns(clock) + (SHIFT_NS if clock == time.CLOCK_REALTIME else 0)


def _from_now(convert: Callable[[float], time.struct_time]) -> Callable[[float | None], time.struct_time]:
    return lambda seconds=None: convert(time.time() if seconds is None else seconds)


if SHIFT_S:
    time.time = lambda: _time() + SHIFT_S
    time.time_ns = lambda: _time_ns() + SHIFT_NS
    time.clock_gettime = _shifted_clock
    time.clock_gettime_ns = _shifted_clock_ns
    time.gmtime, time.localtime = _from_now(time.gmtime), _from_now(time.localtime)
