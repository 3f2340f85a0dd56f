"""Fake seed server for initial weights: records the requests and sends no weights."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

Server = TypeVar("Server", bound=ThreadingHTTPServer)


@dataclass
class Seed:
    """State and recorded calls of the server."""

    port: int = 0
    label: str = "7@engine.policy.0.ab.1"
    is_ready: bool = True
    refuses: str = ""  # path of refused calls
    calls: list[tuple[str, str, Any]] = field(default_factory=list[tuple[str, str, Any]])  # path, key, body

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def posts(self) -> list[str]:
        return [path for path, _, body in self.calls if body is not None]

    def answer(self, handler: BaseHTTPRequestHandler) -> int:
        size = int(handler.headers.get("Content-Length", 0))
        body = json.loads(handler.rfile.read(size)) if size else None
        self.calls.append((handler.path, handler.headers.get("Authorization", ""), body))
        refused = handler.path == self.refuses or (handler.path == "/ready" and not self.is_ready)
        return 503 if refused else 200


@contextmanager
def standing_in(state: Seed) -> Iterator[Seed]:
    """Run the server on a port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = state.answer(self)
            body = json.dumps({"weight_version": state.label}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with served(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        state.port = server.server_port
        yield state


@contextmanager
def served(server: Server) -> Iterator[Server]:
    """Run a server in its own thread."""
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
