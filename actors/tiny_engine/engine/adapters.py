"""Loaded LoRA adapters: loads and unloads, one at a time, as in SGLang. Runs on the event loop's thread."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

import structlog

from actors.tiny_engine.engine.requests import EngineRefusal, Request
from actors.tiny_engine.model.adapters import Adapter, AdapterReader, AdapterRefused

NOT_ENABLED = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
log: structlog.stdlib.BoundLogger = structlog.get_logger()


class LoadedAdapters:
    """The adapters that requests can name. A load reads files in a thread of its own: decoding goes on."""

    def __init__(self, reader: AdapterReader | None = None, max_loaded: int | None = None) -> None:
        """Start without adapters.

        Args:
            reader: makes adapters; None: LoRA is not enabled.
            max_loaded: number of adapters beyond which the least recently used one is unloaded; None: no limit.
        """
        self._reader = reader
        self._max_loaded = max_loaded
        self._loaded: OrderedDict[str, Adapter] = OrderedDict()  # least recently used first
        self._pinned: set[str] = set()
        self._num_requests: Counter[Adapter] = Counter()
        self._leaving: dict[str, Adapter] = {}  # being unloaded, or left so by a caller that did not wait
        self._ended = asyncio.Event()  # replaced whenever the last request of an adapter has ended
        self._lock = asyncio.Lock()  # of loads and unloads: a load waits for an unload, which waits for requests

    @property
    def paths(self) -> dict[str, str]:
        """Where each loaded adapter was read."""
        return {name: adapter.path for name, adapter in self._loaded.items()}

    @property
    def checksums(self) -> dict[str, str]:
        """Checksum of each loaded adapter's tensors."""
        return {name: adapter.checksum for name, adapter in self._loaded.items()}

    def acquire(self, requests: Sequence[Request]) -> None:
        """Give requests their adapters, which stay in use until they are released.

        Raises:
            ValueError: LoRA is not enabled, or an adapter is not loaded.
        """
        for name in (request.lora for request in requests if request.lora is not None):
            if self._reader is None:
                raise ValueError(
                    f"LoRA adapter '{name}' was requested, but LoRA is not enabled. "
                    "Please launch the server with --enable-lora flag."
                )
            if name not in self._loaded:
                raise ValueError(
                    f"The following requested LoRA adapters are not loaded: {name}\n"
                    f"Loaded adapters: {list(self._loaded)}."
                )
        for request in requests:
            if request.lora is not None:
                self._loaded.move_to_end(request.lora)
                request.adapter = self._loaded[request.lora]
                self._num_requests[request.adapter] += 1

    def release(self, requests: Iterable[Request]) -> None:
        """Note the end of requests. They keep their adapters."""
        for adapter in (request.adapter for request in requests if request.adapter is not None):
            self._num_requests[adapter] -= 1
            if not self._num_requests[adapter]:
                del self._num_requests[adapter]
                self._ended.set()
                self._ended = asyncio.Event()

    async def load(self, name: str, make: Callable[[AdapterReader], Adapter], *, pinned: bool) -> None:
        """Load an adapter.

        Args:
            name: a name that is not loaded.
            make: reads it; called in a thread.
            pinned: never unload it to make room.

        Raises:
            EngineRefusal: LoRA is not enabled, the name is loaded, or the adapter cannot be served.
        """
        reader = self._reader
        if reader is None:
            raise EngineRefusal(NOT_ENABLED)
        async with self._lock:
            if name in self._loaded:
                raise EngineRefusal(f"Failed to load LoRA adapter {name} because it is already loaded")
            if name in self._leaving:
                raise EngineRefusal(f"LoRA adapter '{name}' has an incomplete unload. Retry unloading it first.")
            try:
                adapter = await asyncio.to_thread(make, reader)
            except AdapterRefused as error:
                raise EngineRefusal(str(error)) from error
            self._loaded[name] = adapter
            if pinned:
                self._pinned.add(name)
            log.info("adapter_loaded", adapter=name, path=adapter.path, num_loaded=len(self._loaded))
            while self._max_loaded is not None and len(self._loaded) > self._max_loaded:
                oldest = next((each for each in self._loaded if each not in self._pinned), None)
                if oldest is None:
                    raise EngineRefusal("Didn't find any LoRA adapters when trying to evict LRU LoRA adapter.")
                await self._unload(oldest)

    async def unload(self, name: str) -> None:
        """Unload an adapter once its requests have ended. New requests cannot name it from now on.

        Raises:
            EngineRefusal: LoRA is not enabled, or the adapter is not loaded.
        """
        if self._reader is None:
            raise EngineRefusal(NOT_ENABLED)
        async with self._lock:
            if name not in self._loaded and name not in self._leaving:
                raise EngineRefusal(f"LoRA with name {name} does not exist. Loaded LoRAs: {list(self._loaded)}")
            await self._unload(name)

    async def _unload(self, name: str) -> None:
        if name in self._loaded:
            self._leaving[name] = self._loaded.pop(name)
            self._pinned.discard(name)
        while self._num_requests[self._leaving[name]]:
            await self._ended.wait()
        del self._leaving[name]
        log.info("adapter_unloaded", adapter=name, num_loaded=len(self._loaded))
