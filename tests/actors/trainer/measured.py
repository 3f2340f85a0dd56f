"""How much memory of its own a process has: not the files that it maps, nor what the system caches for it."""

import gc
from pathlib import Path
from threading import Event, Thread

from actors.trainer.megatron.memory import give_back


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


class Peak:
    """The most anonymous memory beyond that of the begin."""

    def __enter__(self) -> "Peak":
        gc.collect()
        give_back()  # else what was freed before is used again unseen
        self._end, self._before, self.bytes = Event(), anonymous(), 0
        self._thread = Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(0.0005):
            self.bytes = max(self.bytes, anonymous() - self._before)

    def __exit__(self, *_error: object) -> None:
        self._end.set()
        self._thread.join()
