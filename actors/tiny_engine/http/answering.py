"""Request bodies and answers shared by all endpoints."""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from actors.tiny_engine.http import bodies

JSON: Final = "application/json"

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def body_of(request: web.Request, struct: type[T], *, needed: bool = True) -> T:
    """Decode a request's body; unless `needed`, an empty body counts as {}.

    Raises:
        SchemaError: the body is not JSON, or a field has the wrong type.
    """
    data = await request.read()
    return bodies.decode_body(data if data or needed else b"{}", struct)


def json_answer(body: object, *, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type=JSON)


def error_answer(status: int, message: str) -> web.Response:
    """An error answer, in the format of most SGLang endpoints."""
    return json_answer({"error": {"message": message}}, status=status)


def schema_error(error: Exception) -> web.Response:
    """An error answer to an invalid body."""
    body = {"object": "error", "message": str(error), "type": "BadRequestError", "param": None, "code": 400}
    return json_answer(body, status=400)
