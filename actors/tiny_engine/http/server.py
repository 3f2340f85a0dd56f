"""The HTTP server: SGLang's endpoints on top of a Frontend."""

import asyncio
import hashlib
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import structlog
from aiohttp import web
from aiohttp.typedefs import Handler as AnyHandler
from aiohttp.typedefs import Middleware

from actors.tiny_engine.engine.frontend import Frontend, GenerateCall, QueueFull, Waiting
from actors.tiny_engine.engine.requests import EngineRefusal
from actors.tiny_engine.engine.thread import EngineStopped
from actors.tiny_engine.http import bodies
from actors.tiny_engine.http.adapters import AdapterEndpoints
from actors.tiny_engine.http.api import BrokenRequest, CallReader
from actors.tiny_engine.http.chat import ChatReader, completion
from actors.tiny_engine.http.rendering import (
    Handler,
    Progress,
    SentSoFar,
    answer,
    body_of,
    error_answer,
    json_answer,
    rendered_text,
    schema_error,
)
from actors.tiny_engine.http.sessions import SessionEndpoints
from actors.tiny_engine.model.text import Text
from runtime.models.config import ModelDescription, ModelError
from runtime.util.secrets import Secret

MAX_BODY_BYTES: Final = 64 * 1024 * 1024
HEALTH_TIMEOUT_S: Final = 20.0
MAX_FLUSH_WAIT_S: Final = 600.0
NO_DUMMY: Final = "Failed to get model loader: the weights were drawn (--load-format dummy); pass load_format = auto."
OPEN: Final = ("/health",)  # needs no API key, as in SGLang; the router calls it without one
log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Identity(NamedTuple):
    """Model and flags that the server reports."""

    model: ModelDescription
    model_path: str
    served_model_name: str
    load_format: str
    dtype: str
    flags: dict[str, Any]


class TinyServer:
    """Handlers of all endpoints. The frontend holds the generation state."""

    def __init__(
        self,
        frontend: Frontend,
        reader: CallReader,
        text: Text | None,
        identity: Identity,
        *,
        chat: ChatReader,
        incremental: bool,
        key: Secret | None = None,
    ) -> None:
        self._frontend = frontend
        self._reader = reader
        self._text = text
        self._identity = identity
        self._chat = chat
        self._incremental = incremental
        self._key = key
        self._started_s = time.time()
        self._last_load = (time.perf_counter(), 0)  # time of the last count of generated tokens, and that count

    def application(self) -> web.Application:
        """Build the aiohttp application with all endpoints."""
        guards = [] if self._key is None else [_key_check(self._key)]
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=guards)
        app.router.add_post("/generate", self.generate)  # the hot path: handles its own errors
        for methods, paths, handler in self._endpoints():
            for method in methods:
                for path in paths:
                    app.router.add_route(method, path, _answering(handler))
        return app

    def _endpoints(self) -> list[tuple[tuple[str, ...], tuple[str, ...], Handler]]:
        read, write, both = ("GET",), ("POST",), ("GET", "POST")
        return [
            (read, ("/health", "/health_generate"), self.health),
            (read, ("/ready",), self.ready),
            (read, ("/model_info", "/get_model_info"), self.model_info),
            (read, ("/server_info", "/get_server_info"), self.server_info),
            (read, ("/v1/loads",), self.loads),
            (read, ("/v1/models",), self.models),
            (write, ("/v1/chat/completions",), self.complete),
            (write, ("/abort_request",), self.abort),
            (write, ("/pause_generation",), self.pause),
            (write, ("/continue_generation",), self.proceed),
            (write, ("/update_weights_from_disk",), self.update_from_disk),
            (write, ("/update_weight_version",), self.update_version),
            (both, ("/flush_cache",), self.flush),
            (both, ("/weights_checker",), self.check_weights),
            (both, ("/release_memory_occupation",), self.release),
            (both, ("/resume_memory_occupation",), self.resume),
            (both, ("/slow_down",), self.slow_down),
            *((write, (path,), handler) for path, handler in SessionEndpoints(self._frontend).handlers().items()),
            *((write, (path,), handler) for path, handler in AdapterEndpoints(self._frontend).handlers().items()),
        ]

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /generate."""
        data, streams = await request.read(), False
        try:
            streams = bodies.is_stream(data)
            call = self._reader.read(data)
            async with self._frontend.generation(call.jobs) as generation:
                if call.stream:
                    return await self._stream(request, generation, call.single)
                await generation.end()
                answers = [self._answer(each, generation, each.progress) for each in generation.waiting]
        except bodies.SchemaError as error:
            return schema_error(error)
        except ValueError as error:
            return await _streamed_error(request, str(error)) if streams else error_answer(400, str(error))
        except QueueFull as error:
            return error_answer(503, str(error))
        except BrokenRequest as error:
            log.error("request_broken", error=str(error))
            return web.Response(status=500, text="Internal Server Error")
        return json_answer(answers[0] if call.single else answers)

    async def complete(self, request: web.Request) -> web.Response:
        """POST /v1/chat/completions."""
        try:
            call = self._chat.read(await request.read())
            async with self._frontend.generation(call.jobs) as generation:
                await generation.end()
                waiting = generation.waiting[0]
        except QueueFull as error:
            return error_answer(503, str(error))
        except ValueError as error:
            return schema_error(error)
        name = self._identity.served_model_name
        return json_answer(completion(waiting.job, waiting.progress, model=name, text=self._text))

    def _answer(
        self, waiting: Waiting, generation: GenerateCall, progress: Progress, sent: SentSoFar | None = None
    ) -> dict[str, Any]:
        version, clock = self._frontend.version, generation.clock()
        return answer(waiting.job, progress, version=version, clock=clock, text=self._text, sent=sent)

    async def _stream(self, request: web.Request, generation: GenerateCall, single: bool) -> web.StreamResponse:
        """Send progress as server-sent events; progress between two writes is merged into the next event."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        sent = [SentSoFar() for _ in generation.waiting]
        ended = [False] * len(sent)
        while not all(ended):
            await generation.change()
            for index, waiting in enumerate(generation.waiting):
                progress = waiting.progress
                if (
                    progress.finish is not None
                    and progress.finish.queued
                    and progress.num_tokens > sent[index].num_tokens
                ):
                    progress = progress._replace(finish=None)  # send the tokens sampled so far first
                if ended[index] or (progress.num_tokens == sent[index].num_tokens and progress.finish is None):
                    continue
                body = self._answer(waiting, generation, progress, sent[index] if self._incremental else None)
                if not single:
                    body["index"] = index
                shown = len(rendered_text(waiting.job, progress, self._text))
                sent[index] = SentSoFar(progress.num_tokens, max(shown, sent[index].num_characters))
                ended[index] = progress.finish is not None
                await response.write(b"data: " + msgspec.json.encode(body) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def health(self, _: web.Request) -> web.Response:
        """Check that the torch thread responds. Waits while generation is paused, as SGLang does."""
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await self._frontend.unpaused()
                await self._frontend.loads()
        except (TimeoutError, EngineStopped):
            return web.Response(status=503)
        return web.Response()

    async def ready(self, _: web.Request) -> web.Response:
        """Report whether generation is possible now."""
        return web.Response(status=503 if self._frontend.paused else 200)

    async def model_info(self, _: web.Request) -> web.Response:
        """Report the served model and its weight version."""
        identity = self._identity
        shape = identity.model.shape
        return json_answer(
            {
                "model_path": identity.model_path,
                "served_model_name": identity.served_model_name,
                "tokenizer_path": identity.model_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self._frontend.version,
                "load_format": identity.load_format,
                "disaggregation_mode": "null",
                "model_type": shape.model_type,
                "architectures": [shape.architecture],
                "has_image_understanding": False,
                "has_audio_understanding": False,
            }
        )

    async def server_info(self, _: web.Request) -> web.Response:
        """Report the server's flags."""
        identity = self._identity
        described = {
            "model_path": identity.model_path,
            "served_model_name": identity.served_model_name,
            "weight_version": self._frontend.version,
            "load_format": identity.load_format,
            "device": "cpu",
            "dtype": identity.dtype,
            "quantization": None,
            **dict.fromkeys(("tp_size", "dp_size", "pp_size", "ep_size"), 1),
            "version": "physarum-embedded",
            "startup_time": self._started_s,
        }
        states = [{"weight_version": self._frontend.version, "paused": self._frontend.paused}]
        return json_answer(described | identity.flags | {"internal_states": states})

    async def loads(self, _: web.Request) -> web.Response:
        """Report requests and tokens in the engine. `gen_throughput` is tokens per second since the last call."""
        loads = await self._frontend.loads()
        total = self._identity.flags["max_total_num_tokens"]
        now, (then, before) = time.perf_counter(), self._last_load
        self._last_load = (now, loads.num_generated)
        entry = {
            "dp_rank": 0,
            "num_running_reqs": loads.num_running,
            "num_waiting_reqs": loads.num_waiting,
            "num_total_reqs": loads.num_running + loads.num_waiting,
            "num_used_tokens": loads.num_used_tokens,
            "max_total_num_tokens": total,
            "max_running_requests": self._identity.flags["max_running_requests"],
            "token_usage": loads.num_used_tokens / total,
            "gen_throughput": (loads.num_generated - before) / max(now - then, 1e-9),
            "cache_hit_rate": 0.0,
            "queues": {"waiting": loads.num_waiting, "grammar": 0, "paused": 0, "retracted": loads.num_retracted},
        }
        return json_answer({"dp_rank_count": 1, "loads": [entry]})

    async def models(self, _: web.Request) -> web.Response:
        """List the model and its loaded adapters, in the format of OpenAI's API."""
        name = self._identity.served_model_name
        length = self._identity.flags["context_length"]
        model = {"id": name, "object": "model", "owned_by": "physarum", "root": name, "max_model_len": length}
        of_adapter = {"object": "model", "owned_by": "physarum", "parent": name, "max_model_len": None}
        adapters = [of_adapter | {"id": id, "root": path} for id, path in self._frontend.adapters.paths.items()]
        listed = [each | {"created": int(self._started_s)} for each in (model, *adapters)]
        return json_answer({"object": "list", "data": listed})

    async def abort(self, request: web.Request) -> web.Response:
        """Abort one request or all; answers at once, even for an unknown id."""
        body = await body_of(request, bodies.AbortBody)
        if body.abort_all:
            self._frontend.abort_all()
        elif body.rid:
            self._frontend.abort(body.rid)
        return web.Response()

    async def pause(self, request: web.Request) -> web.Response:
        """Pause generation."""
        body = await body_of(request, bodies.PauseBody)
        await self._frontend.pause(body.mode)
        return json_answer({"message": f"Generation paused successfully. mode={body.mode}", "status": "ok"})

    async def proceed(self, request: web.Request) -> web.Response:
        """Resume generation."""
        await body_of(request, bodies.ContinueBody)
        self._frontend.proceed()
        return json_answer({"message": "Generation continued successfully.", "status": "ok"})

    async def update_from_disk(self, request: web.Request) -> web.Response:
        """Update the weights from a checkpoint of the same model."""
        body = await body_of(request, bodies.UpdateFromDiskBody)
        started = time.perf_counter()
        load_format = body.load_format or self._identity.load_format
        if load_format == "dummy":
            return json_answer({"success": False, "message": NO_DUMMY, "num_paused_requests": 0}, status=400)
        try:
            updated = await self._frontend.update(
                lambda core: core.update_weights(
                    Path(body.model_path), version=body.weight_version, flush=body.flush_cache
                ),
                version=body.weight_version,
                abort_all=body.abort_all_requests,
            )
        except (ModelError, EngineRefusal) as error:
            return json_answer({"success": False, "message": str(error), "num_paused_requests": 0}, status=400)
        served = {"model_path": body.model_path, "served_model_name": body.model_path, "load_format": load_format}
        self._identity = self._identity._replace(**served)
        message = "Succeeded to update model weights."
        if not updated.flushed:
            message = "Weights were updated, but the cache was not flushed: requests still use it."
        log.info("weights_updated", weight_version=self._frontend.version, took_s=time.perf_counter() - started)
        return json_answer(
            {"success": updated.flushed, "message": message, "num_paused_requests": updated.num_paused_requests},
            status=200 if updated.flushed else 400,
        )

    async def update_version(self, request: web.Request) -> web.Response:
        """Set the weight version."""
        body = await body_of(request, bodies.UpdateVersionBody)
        await self._frontend.update_version(body.new_version, abort_all=body.abort_all_requests)
        message = f"Weight version updated to {body.new_version}"
        return json_answer({"success": True, "message": message, "new_version": body.new_version})

    async def flush(self, request: web.Request) -> web.Response:
        """Flush the cache once no request uses it, within `timeout` seconds."""
        try:
            timeout_s = min(float(request.query.get("timeout", "0")), MAX_FLUSH_WAIT_S)
        except ValueError as error:
            raise bodies.SchemaError(f"timeout: {error}") from error
        if await self._frontend.flush(timeout_s):
            return web.Response(text="Cache flushed.\n")
        return web.Response(status=400, text="Flush cache failed.\n")

    async def check_weights(self, request: web.Request) -> web.Response:
        """Hash the engine's fused tensors, with SGLang's names and format; they are not hashes of files."""
        body = await body_of(request, bodies.CheckerBody, needed=False)
        skip = frozenset(body.skip_tensor_list or ())
        try:
            checksums = await self._frontend.engine.call(lambda core: core.checksums(skip))
        except EngineRefusal as error:
            return json_answer({"success": False, "message": str(error), "ranks": []}, status=400)
        every = "".join(name + checksums[name] for name in sorted(checksums))
        of_rank = hashlib.sha256(every.encode()).hexdigest()
        rank = {"checksums": checksums, "per_gpu_checksum": of_rank, "parallelism_info": [{"tp_rank": 0}]}
        return json_answer(
            {
                "success": True,
                "message": "Success.",
                "ranks": [rank],
                "per_engine_checksum": hashlib.sha256(of_rank.encode()).hexdigest(),
            }
        )

    async def release(self, request: web.Request) -> web.Response:
        """Release memory."""
        body = await body_of(request, bodies.MemoryBody, needed=False)
        await self._frontend.engine.call(lambda core: core.release(body.tags or ()))
        return json_answer(None)

    async def resume(self, request: web.Request) -> web.Response:
        """Resume memory."""
        body = await body_of(request, bodies.MemoryBody, needed=False)
        await self._frontend.engine.call(lambda core: core.restore(body.tags or ()))
        return json_answer(None)

    async def slow_down(self, request: web.Request) -> web.Response:
        """Add a delay to every step."""
        body = await body_of(request, bodies.SlowDownBody)
        self._frontend.engine.slow_down(body.forward_sleep_time or 0.0)
        return json_answer(None)


def _answering(handler: Handler) -> Handler:
    """Convert errors that any endpoint may raise into SGLang's answers."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except bodies.SchemaError as error:
            return schema_error(error)
        except EngineRefusal as error:
            return error_answer(400, str(error))
        except EngineStopped as error:
            return error_answer(503, str(error))

    return handle


def _key_check(key: Secret) -> Middleware:
    """Return a middleware that refuses requests without the API key before it reads their body."""

    expected = Secret(f"Bearer {key.reveal()}")

    @web.middleware
    async def check(request: web.Request, handler: AnyHandler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if request.path.startswith(OPEN) or Secret(given) == expected:
            return await handler(request)
        return web.json_response({"error": "Unauthorized"}, status=401)

    return check


async def _streamed_error(request: web.Request, message: str) -> web.StreamResponse:
    """Build the error response to a streaming request: status 200 and an error event, as in SGLang."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    error = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
    await response.write(b"data: " + msgspec.json.encode({"error": error}) + b"\n\ndata: [DONE]\n\n")
    return response
