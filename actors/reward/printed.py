"""What graders print: shown in the log of the reward actor, a bounded part of it."""

import os
import sys
import time
from typing import Final

import structlog

SHOWN_BYTES: Final = 64 << 10  # in each window of time; a grader that prints more is not worth a full disk
WINDOW_S: Final = 10.0

log = structlog.get_logger()


class Printed:
    """Passes on the first bytes of each window, and says how many it left out."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began = time.monotonic()
        self._left = SHOWN_BYTES
        self._num_left_out = 0

    def feed(self, data: bytes) -> None:
        """Take what was printed."""
        if time.monotonic() - self._began > WINDOW_S:
            self.end()
            self._began, self._left = time.monotonic(), SHOWN_BYTES
        shown = data[: self._left]
        self._left -= len(shown)
        self._num_left_out += len(data) - len(shown)
        if shown:
            _write(shown)

    def end(self) -> None:
        """Say what was left out so far."""
        if self._num_left_out:
            _write(b"\n")
            log.warning("grader_output_left_out", pid=self._pid, num_bytes=self._num_left_out)
            self._num_left_out = 0


def _write(data: bytes) -> None:
    sys.stderr.flush()
    while data:
        data = data[os.write(2, data) :]
