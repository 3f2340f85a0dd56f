"""Serve a small model on the CPU with SGLang's HTTP API: python -m actors.tiny_engine --model-path DIR.

If PHYSARUM_ENGINE_KEY is set, requests need it as a bearer token, as with SGLang's --api-key.
"""

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from runtime.bus.addresses import ENGINE_KEY_VARIABLE
from runtime.models.config import ModelDescription, ModelError, read_tiny_engine_model
from runtime.models.readers import MAX_CONTEXT
from runtime.models.safetensors import safetensors_files
from runtime.util.exit_codes import EXIT_INPUT_ERROR
from runtime.util.imports import collecting_nothing, without


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT.

    Returns:
        0 after a signal, 1 if the engine crashed, 2 if a flag or the model directory cannot be used.
    """
    flags = _parser().parse_args(argv)
    flags.started = time.perf_counter()
    flags.key = os.environ.pop(ENGINE_KEY_VARIABLE, None)  # not an argument, since all users can read command lines
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before torch is imported, to prevent a thread pool
    try:
        description = read_tiny_engine_model(flags.model_path, flags.ignore_config_keys)
        flags.context_length = _context_length(flags, description)
        if flags.load_format == "auto":
            safetensors_files(flags.model_path)
        listener = _bound(flags.host, flags.port)
    except (ModelError, OSError) as error:
        return _refused(error)
    with listener:
        preload([])
        from actors.tiny_engine.http.serve import serve

        try:
            return serve(flags, description, listener)  # an OSError from here on is a crash
        except ModelError as error:
            return _refused(error)


def preload(_arguments: Sequence[str]) -> None:
    """Import the server, also in the template that forks this process: torch takes a second."""
    with collecting_nothing(), without("rich"):  # structlog would load it, for a terminal
        import_module("actors.tiny_engine.http.serve")


def _refused(error: Exception) -> int:
    print(f"tiny engine: {error}", file=sys.stderr)  # noqa: T201 - a command's one line of error
    return EXIT_INPUT_ERROR


def _context_length(flags: argparse.Namespace, description: ModelDescription) -> int:
    wanted = flags.context_length or description.max_context
    if wanted > description.max_context:
        raise ModelError(f"--context-length {wanted}: the model's context has {description.max_context} tokens")
    return min(wanted, flags.max_total_tokens or wanted)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m actors.tiny_engine", description=__doc__)
    add = parser.add_argument
    add("--model-path", type=Path, required=True, help="directory with config.json and safetensors weights")
    add("--ignore-config-keys", nargs="+", default=[], metavar="KEY", help="keys of config.json to leave out")
    add("--host", default="127.0.0.1")
    add("--port", type=_within(0, 65535), default=30000, help="0: any free port")
    add("--served-model-name", help="model name in /v1/models; default: the model path")
    add(
        "--max-running-requests", type=_within(1, 4096), default=64, help="maximum number of requests decoded at a time"
    )
    add(
        "--max-queued-requests",
        type=_within(0, 1_000_000),
        default=4096,
        help="maximum number of queued requests; further ones get a 503",
    )
    add(
        "--max-total-tokens",
        type=_within(2, 1 << 40),
        help="maximum tokens of all running requests together; default: no limit",
    )
    add(
        "--context-length",
        type=_within(2, MAX_CONTEXT),
        help="maximum tokens of a prompt and its response; default: the model's",
    )
    add(
        "--load-format", choices=("auto", "dummy"), default="auto", help="dummy: draw random weights from --random-seed"
    )
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and activations")
    add("--random-seed", type=int, default=0)
    add("--weight-version", default="default")
    add("--stream-interval", type=_within(1, MAX_CONTEXT), default=1, help="tokens per streamed chunk")
    add(
        "--incremental-streaming-output",
        action="store_true",
        help="each chunk holds only its new tokens, not all tokens so far",
    )
    _add_lora(add)
    return parser


def _add_lora(add: Callable[..., object]) -> None:
    """Add SGLang's arguments for LoRA adapters."""
    add("--enable-lora", action="store_true", help="serve LoRA adapters")
    add("--max-lora-rank", type=_within(1, 4096), default=64, help="highest rank of an adapter")
    add("--lora-target-modules", nargs="+", default=["all"], metavar="NAME", help="layers with adapters; all: any")
    add("--max-loras-per-batch", type=_within(1, 4096), default=8, help="adapters decoded at a time, with the base")
    add(
        "--max-loaded-loras",
        type=_within(1, 1 << 20),
        help="maximum number of loaded adapters; beyond it, the least recently used one is unloaded; default: no limit",
    )


def _within(low: int, high: int) -> Callable[[str], int]:
    """Return an argparse type for integers in [low, high]."""

    def integer(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not in {low}..{high}")
        return value

    return integer


def _bound(host: str, port: int) -> socket.socket:
    """Bind a socket, which reserves the port and refuses connections until it listens.

    Raises:
        OSError: the host does not resolve, or the port is in use; names both.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is closed, and torch's teardown costs half a second of CPU
