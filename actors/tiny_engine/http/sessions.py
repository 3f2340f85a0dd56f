"""Endpoints of weight updates in buckets, from an update group or in the request."""

from collections.abc import Awaitable, Callable
from typing import Final

import structlog
from aiohttp import web

from actors.tiny_engine.engine.core import Core, Updated
from actors.tiny_engine.engine.frontend import Frontend
from actors.tiny_engine.engine.requests import EngineRefusal
from actors.tiny_engine.engine.updating import FLATTENED, Bucket
from actors.tiny_engine.http import bodies
from actors.tiny_engine.http.rendering import Handler, body_of, json_answer

GLOO: Final = "gloo"
log: structlog.stdlib.BoundLogger = structlog.get_logger()


class SessionEndpoints:
    """Handlers of weight updates. They run on the torch thread, which also waits for other ranks and broadcasts."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    def handlers(self) -> dict[str, Handler]:
        """The handlers by path."""
        return {
            "/init_weights_update_group": _with_message(self.init_group),
            "/destroy_weights_update_group": _with_message(self.destroy_group),
            "/begin_weight_update": _with_message(self.begin),
            "/update_weights_from_distributed": _with_message(self.from_distributed),
            "/update_weights_from_tensor": _with_message(self.from_tensor),
            "/end_weight_update": _with_message(self.end),
        }

    async def init_group(self, request: web.Request) -> str:
        """Join an update group as rank `rank_offset`; answers once all ranks have joined."""
        body = await body_of(request, bodies.InitGroupBody)
        if body.backend != GLOO:
            raise EngineRefusal(
                f"Failed to initialize custom process group: backend {body.backend}; supported: {GLOO}."
            )
        await self._frontend.engine.call(
            lambda core: core.updating.groups.join(
                body.master_address,
                body.master_port,
                rank=body.rank_offset,
                world_size=body.world_size,
                name=body.group_name,
            )
        )
        return "Succeeded to initialize custom process group."

    async def destroy_group(self, request: web.Request) -> str:
        """Leave an update group."""
        body = await body_of(request, bodies.DestroyGroupBody)
        await self._frontend.engine.call(lambda core: core.updating.groups.leave(body.group_name))
        return "Succeeded to destroy custom process group."

    async def begin(self, request: web.Request) -> str:
        """Begin a weight update."""
        await body_of(request, bodies.BeginUpdateBody)
        await self._frontend.alone(lambda core: core.updating.begin())
        return "Success"

    async def end(self, request: web.Request) -> str:
        """End a weight update."""
        await body_of(request, bodies.EndUpdateBody)
        await self._frontend.alone(lambda core: core.updating.end())
        return "Success"

    async def from_distributed(self, request: web.Request) -> str:
        """Receive a bucket: one broadcast per tensor, or a single one of all bytes."""
        body = await body_of(request, bodies.UpdateFromDistributedBody)
        flattened = body.load_format == FLATTENED
        bucket = Bucket(body.group_name, body.names, body.dtypes, body.shapes, flattened)
        await self._update(body, lambda core: core.updating.receive(bucket, wanted=body.selector != "draft"))
        return "Succeeded to update parameter online."

    async def from_tensor(self, request: web.Request) -> str:
        """Write the tensors in the request."""
        body = await body_of(request, bodies.UpdateFromTensorBody)
        if not body.serialized_named_tensors:
            raise bodies.SchemaError("serialized_named_tensors: expected one payload for each rank")
        payload = body.serialized_named_tensors[0]
        await self._update(
            body, lambda core: core.updating.take(payload, body.load_format, wanted=body.selector != "draft")
        )
        return "Success"

    async def _update(self, body: bodies.BucketBody, load: Callable[[Core], None]) -> None:
        def order(core: Core) -> Updated:
            load(core)
            return core.updated(version=body.weight_version, flush=body.flush_cache)

        updated = await self._frontend.update(order, version=body.weight_version, abort_all=body.abort_all_requests)
        if not updated.flushed:
            raise EngineRefusal("Weights were updated, but the cache was not flushed: requests still use it.")
        if body.weight_version is not None:
            log.info("weights_updated", weight_version=body.weight_version)


def _with_message(handle: Callable[[web.Request], Awaitable[str]]) -> Handler:
    """Convert a handler's message or refusal into these endpoints' answer."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            message = await handle(request)
        except EngineRefusal as error:
            log.warning("refused", path=request.path, reason=str(error))
            return json_answer({"success": False, "message": str(error)}, status=400)
        return json_answer({"success": True, "message": message})

    return answer
