"""API key check, as with SGLang's --api-key."""

from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from runtime.util.secrets import Secret

OPEN: Final = ("/health",)  # needs no key, as in SGLang; the router calls it without one


def guard(key: Secret) -> Middleware:
    """Return a middleware that refuses requests without the key before it reads their body."""

    expected = Secret(f"Bearer {key.reveal()}")

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if request.path.startswith(OPEN) or Secret(given) == expected:
            return await handler(request)
        return web.json_response({"error": "Unauthorized"}, status=401)

    return check
