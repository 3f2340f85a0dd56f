"""Who is answered: those with the key, as SGLang does with --api-key."""

from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from runtime.secrets import Secret

OPEN: Final = ("/health",)  # asked without a key, by the router too; SGLang leaves it open


def guard(key: Secret) -> Middleware:
    """Refuses every request without the key, before its body is read."""

    expected = Secret(f"Bearer {key.reveal()}")

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if request.path.startswith(OPEN) or Secret(given) == expected:
            return await handler(request)
        return web.json_response({"error": "Unauthorized"}, status=401)

    return check
