"""An endpoint with OpenAI's API on this machine's loopback address, through which users' graders call judges.

The name of the model chooses the judge. The endpoint stays while engines end and move, and keeps API keys to itself.
"""

import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
from aiohttp import web

from actors.reward.judging.judge import Judge
from actors.reward.judging.requests import PATH, Cause, JudgeError
from runtime.util.secrets import Secret

URL_VARIABLE: Final = "PHYSARUM_JUDGE_URL"  # environment variables of grader processes
KEY_VARIABLE: Final = "PHYSARUM_JUDGE_KEY"
HOST: Final = "127.0.0.1"
MAX_BODY_BYTES: Final = 8 << 20
SHUTDOWN_S: Final = 0.5
STATUS: Final[Mapping[Cause, int]] = {
    "timeout": 504,
    "unreachable": 502,
    "rate_limited": 429,
    "failed": 503,
    "bad_answer": 502,
}


@asynccontextmanager
async def gateway(judges: Mapping[str, Judge]) -> AsyncGenerator[dict[str, str]]:
    """Serve the judges on a free port. Yields the environment variables of grader processes.

    The key keeps other users of the machine out.
    """
    key = Secret.random()
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_post(f"/v1{PATH}", _Endpoint(judges, key).complete)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, 0)
        await site.start()
        port = runner.addresses[0][1]
        yield {URL_VARIABLE: f"http://{HOST}:{port}/v1", KEY_VARIABLE: key.reveal()}
    finally:
        await runner.cleanup()


class _Endpoint:
    def __init__(self, judges: Mapping[str, Judge], key: Secret) -> None:
        self._judges = judges
        self._expected = f"Bearer {key.reveal()}".encode()

    async def complete(self, request: web.Request) -> web.Response:
        """POST /v1/chat/completions."""
        given = request.headers.get("Authorization", "").encode()
        if not secrets.compare_digest(given, self._expected):
            return _error(401, "refused", f"the key is not {KEY_VARIABLE} of the grader's environment")
        try:
            body = msgspec.json.decode(await request.read(), type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return _error(400, "refused", f"the body is no JSON object: {error}")
        judge = self._judges.get(str(body.pop("model", None)))
        if judge is None:
            return _error(404, "refused", f"model names no judge; allowed: {', '.join(self._judges)}")
        if body.get("stream"):
            return _error(400, "refused", "stream = true is not supported")
        try:
            answer = await judge.ask(body)
        except JudgeError as error:
            return _error(STATUS.get(error.cause, error.status or 400), error.cause, str(error))
        return web.Response(body=answer.body, content_type="application/json")


def _error(status: int, cause: Cause, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": cause, "code": status}}, status=status)
