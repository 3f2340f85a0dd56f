"""Endpoints that load and unload LoRA adapters."""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import structlog
import torch
from aiohttp import web
from torch import Tensor

from actors.tiny_engine.engine.frontend import Frontend
from actors.tiny_engine.engine.requests import EngineRefusal
from actors.tiny_engine.http import bodies
from actors.tiny_engine.http.rendering import Handler, body_of, json_answer
from actors.tiny_engine.model.adapters import Adapter, AdapterReader, AdapterRefused
from actors.tiny_engine.model.payloads import dict_of

FROM_TENSORS: Final = "__tensor__"  # path of an adapter that was not read from files, as in SGLang
SHOWN: Final = 5  # names in an error
log: structlog.stdlib.BoundLogger = structlog.get_logger()


class AdapterEndpoints:
    """Handlers of loads and unloads. Generation goes on meanwhile."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    def handlers(self) -> dict[str, Handler]:
        """The handlers by path."""
        return {
            "/load_lora_adapter": self._answering(self.load),
            "/load_lora_adapter_from_tensors": self._answering(self.load_from_tensors),
            "/unload_lora_adapter": self._answering(self.unload),
        }

    async def load(self, request: web.Request) -> None:
        """Load an adapter from files."""
        body = await body_of(request, bodies.LoadAdapterBody)
        read = partial(_read, name=body.lora_name, directory=Path(body.lora_path))
        await self._frontend.adapters.load(body.lora_name, read, pinned=body.pinned)

    async def load_from_tensors(self, request: web.Request) -> None:
        """Load an adapter from the tensors in the request."""
        body = await body_of(request, bodies.LoadAdapterFromTensorsBody)
        if not body.serialized_named_tensors:
            raise bodies.SchemaError("serialized_named_tensors: expected one payload for each rank")
        await self._frontend.adapters.load(body.lora_name, partial(_unpacked, body=body), pinned=body.pinned)

    async def unload(self, request: web.Request) -> None:
        """Unload an adapter after the end of its requests."""
        body = await body_of(request, bodies.UnloadAdapterBody)
        await self._frontend.adapters.unload(body.lora_name)

    def _answering(self, handle: Callable[[web.Request], Awaitable[None]]) -> Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                await handle(request)
            except EngineRefusal as error:
                log.warning("refused", path=request.path, reason=str(error))
                body = {"success": False, "error_message": str(error), "loaded_adapters": None}
                return json_answer(body, status=400)
            loaded = self._frontend.adapters
            sums = {"checksums": loaded.checksums}  # not in SGLang: of the tensors as they came
            return json_answer({"success": True, "error_message": "", "loaded_adapters": loaded.paths, **sums})

        return answer


def _read(reader: AdapterReader, *, name: str, directory: Path) -> Adapter:
    return reader.read(name, directory)


def _unpacked(reader: AdapterReader, *, body: bodies.LoadAdapterFromTensorsBody) -> Adapter:
    try:
        tensors = dict_of(body.serialized_named_tensors[0], body.load_format)
    except ValueError as error:
        raise AdapterRefused(str(error)) from error
    if body.expected_checksums is not None:
        _compare(tensors, body.expected_checksums)
    return reader.of(body.lora_name, FROM_TENSORS, body.config_dict, tensors)


def _compare(tensors: Mapping[str, Tensor], expected: Mapping[str, str]) -> None:
    """Compare tensors with their checksums.

    Raises:
        AdapterRefused: a tensor differs, is missing, or has no checksum.
    """
    differing = [name for name, sum in expected.items() if name in tensors and checksum_of(tensors[name]) != sum]
    missing = [name for name in expected if name not in tensors]
    extra = [name for name in tensors if name not in expected]
    if differing or missing or extra:
        raise AdapterRefused(
            f"[LORA-CHECK] rank0 adapter sync MISMATCH of {len(expected)} expected: {len(differing)} value-diff "
            f"{differing[:SHOWN]}, {len(missing)} missing {missing[:SHOWN]}, {len(extra)} extra {extra[:SHOWN]}"
        )


def checksum_of(tensor: Tensor) -> str:
    """Hash a tensor's bytes, as SGLang does for `expected_checksums`."""
    return hashlib.sha256(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()
