"""How much memory of its own a process has: not the files that it maps, nor what the system caches for it."""

import gc
from threading import Event, Thread

from actors.trainer.megatron.memory import anonymous_bytes, give_back


class Peak:
    """The most anonymous memory beyond that of the begin."""

    def __enter__(self) -> "Peak":
        gc.collect()
        give_back()  # else what was freed before is used again unseen
        self._end, self._before, self.bytes = Event(), anonymous_bytes(), 0
        self._thread = Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(0.0005):
            self.bytes = max(self.bytes, anonymous_bytes() - self._before)

    def __exit__(self, *_error: object) -> None:
        self._end.set()
        self._thread.join()
