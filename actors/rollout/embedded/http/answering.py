"""What all endpoints read and answer with."""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from actors.rollout.embedded.http import bodies

JSON: Final = "application/json"

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def body_of(request: web.Request, struct: type[T], *, needed: bool = True) -> T:
    """What a request says; one that needs no body may have none.

    Raises:
        SchemaError: it is not JSON, or a field has the wrong type.
    """
    data = await request.read()
    return bodies.decode_body(data if data or needed else b"{}", struct)


def json_answer(body: object, *, status: int = 200) -> web.Response:
    """An answer that is JSON."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type=JSON)


def error_answer(status: int, message: str) -> web.Response:
    """A refusal, as most of SGLang's endpoints put it."""
    return json_answer({"error": {"message": message}}, status=status)


def schema_error(error: Exception) -> web.Response:
    """A refusal of a body that is not what the endpoint wants."""
    body = {"object": "error", "message": str(error), "type": "BadRequestError", "param": None, "code": 400}
    return json_answer(body, status=400)
