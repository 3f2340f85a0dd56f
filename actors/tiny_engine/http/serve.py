"""Builds the engine and runs it until a signal arrives or the torch thread crashes."""

import argparse
import asyncio
import logging
import os
import signal
import socket
import time
from functools import partial
from typing import Final

import structlog
import uvloop
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from actors.rollout.sglang.facts import KEPT_OF_INPUT
from actors.rollout.sglang.served_model import ServedModel
from actors.tiny_engine.engine.adapters import LoadedAdapters
from actors.tiny_engine.engine.core import Core, Settings
from actors.tiny_engine.engine.frontend import Frontend
from actors.tiny_engine.engine.thread import EngineThread
from actors.tiny_engine.http.api import CallReader, Limits
from actors.tiny_engine.http.chat import ChatReader, ChatTemplate
from actors.tiny_engine.http.server import Identity, TinyServer
from actors.tiny_engine.model.adapters import AdapterReader
from actors.tiny_engine.model.forward import DTYPES, SAFETENSORS_DTYPE
from actors.tiny_engine.model.text import Text
from runtime.models.config import ModelDescription
from runtime.process.logs import configure_logging
from runtime.settings.torch_threads import num_torch_threads, usable_cores
from runtime.util.secrets import Secret

SHUTDOWN_TIMEOUT_S: Final = 0.5  # for open connections, after requests are aborted
log: structlog.stdlib.BoundLogger = structlog.get_logger()


def serve(flags: argparse.Namespace, model: ModelDescription, listener: socket.socket) -> int:
    """Serve on a bound socket.

    Returns:
        0 after a signal, 1 if the torch thread crashed.

    Raises:
        ModelError: the weights or the tokenizer cannot be loaded.
    """
    configure_logging("engine", os.environ.get("PHYSARUM_RUN", ""))
    logging.getLogger("aiohttp.server").addFilter(_worth_logging)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(flags, model, listener))


async def _serve(flags: argparse.Namespace, model: ModelDescription, listener: socket.socket) -> int:
    ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _end, ended, None)
    text = Text.load(flags.model_path)
    frontend = Frontend(
        max_requests=flags.max_running_requests + flags.max_queued_requests,
        version=flags.weight_version,
        adapters=LoadedAdapters(_adapter_reader(flags, model), flags.max_loaded_loras),
    )
    threads = num_torch_threads(model.shape, os.environ, usable_cores())
    build = partial(_core, flags, model, text)
    engine = EngineThread(build, frontend.deliver, partial(_end, ended), num_threads=threads)
    frontend.engine = engine
    try:
        await engine.start()
        server = _server(flags, model, frontend, text)
        runner = web.AppRunner(
            server.application(), handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT_S
        )
        await runner.setup()
        try:
            await web.SockSite(runner, listener).start()
            address = listener.getsockname()
            took_s = time.perf_counter() - flags.started
            log.info("engine_started", host=address[0], port=address[1], torch_threads=threads, took_s=took_s)
            error = await ended
        finally:
            frontend.abort_all()
            await runner.cleanup()
    finally:
        engine.stop()
    if error is not None:
        log.error("engine_crashed", error=repr(error), exc_info=error)
    return 0 if error is None else 1


def _worth_logging(record: logging.LogRecord) -> bool:
    """Filter out errors about requests that are not HTTP/1.1: sglang-router tries HTTP/2 on every new worker."""
    return not (record.exc_info and isinstance(record.exc_info[1], BadHttpMessage))


def _end(ended: "asyncio.Future[BaseException | None]", error: BaseException | None) -> None:
    if not ended.done():
        ended.set_result(error)


def _core(flags: argparse.Namespace, model: ModelDescription, text: Text | None) -> Core:
    settings = Settings(
        max_running_requests=flags.max_running_requests,
        context_length=flags.context_length,
        max_total_tokens=flags.max_total_tokens,
        random_seed=flags.random_seed,
        dummy=flags.load_format == "dummy",
        weight_version=flags.weight_version,
        dtype=flags.dtype,
        max_loras_per_batch=flags.max_loras_per_batch if flags.enable_lora else None,
    )
    core = Core(flags.model_path, model, settings)
    if text is not None:
        core.use_detokenizer(partial(text.decode, skip_special_tokens=False))
    return core


def _adapter_reader(flags: argparse.Namespace, model: ModelDescription) -> AdapterReader | None:
    if not flags.enable_lora:
        return None
    dtype = DTYPES[SAFETENSORS_DTYPE[flags.dtype]]
    return AdapterReader(model.shape, dtype, max_rank=flags.max_lora_rank, targets=flags.lora_target_modules)


def _server(flags: argparse.Namespace, model: ModelDescription, frontend: Frontend, text: Text | None) -> TinyServer:
    limits = Limits(
        vocab_size=model.shape.vocab_size,
        context_length=flags.context_length,
        eos_token_ids=model.eos_token_ids | ServedModel.read(flags.model_path).end_ids,  # includes the tokenizer's
        stream_interval=flags.stream_interval,
        random_seed=flags.random_seed,
    )
    num_slots = flags.max_total_tokens or flags.max_running_requests * flags.context_length
    identity = Identity(
        model=model,
        model_path=str(flags.model_path),
        served_model_name=flags.served_model_name or str(flags.model_path),
        load_format=flags.load_format,
        dtype=flags.dtype,
        flags={
            "host": flags.host,
            "port": flags.port,
            "random_seed": flags.random_seed,
            "context_length": flags.context_length,
            "max_running_requests": flags.max_running_requests,
            "max_total_num_tokens": num_slots,
            "max_req_input_len": min(flags.context_length, num_slots) - KEPT_OF_INPUT,
            "max_queued_requests": flags.max_queued_requests,
            "stream_interval": flags.stream_interval,
            "incremental_streaming_output": flags.incremental_streaming_output,
            "enable_lora": flags.enable_lora,
            "max_lora_rank": flags.max_lora_rank,
            "lora_target_modules": flags.lora_target_modules,
            "max_loras_per_batch": flags.max_loras_per_batch,
            "max_loaded_loras": flags.max_loaded_loras,
        },
    )
    incremental = flags.incremental_streaming_output
    reader, key = CallReader(limits, text), None if flags.key is None else Secret(flags.key)
    chat = ChatReader(reader, text, ChatTemplate.load(flags.model_path), limits.context_length)
    return TinyServer(frontend, reader, text, identity, chat=chat, incremental=incremental, key=key)
