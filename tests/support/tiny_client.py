"""HTTP client for tests of the tiny engine: calls, streams, and waiting for the load that the engine reports."""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, Self

import aiohttp
import anyio

TIMEOUT_S: Final = 15.0
PROMPT: Final = [3, 4, 5]


class Answer:
    """Status and body of an answer. The body is decoded if it is JSON."""

    def __init__(self, status: int, data: bytes) -> None:
        self.status = status
        self.text = data.decode()
        try:
            self.body: Any = json.loads(data)
        except ValueError:
            self.body = None


class EngineClient:
    """A connection pool to one server."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self.url = url
        self._headers = {"Content-Type": "application/json", **(headers or {})}

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def post(self, path: str, body: object | None = None) -> Answer:
        data = None if body is None else json.dumps(body).encode()
        return await self.send(path, data)

    async def send(self, path: str, data: bytes | None) -> Answer:
        async with self._session.post(self.url + path, data=data) as response:
            return Answer(response.status, await response.read())

    async def get(self, path: str) -> Answer:
        async with self._session.get(self.url + path) as response:
            return Answer(response.status, await response.read())

    async def request(self, method: str, path: str, body: object) -> Answer:
        async with self._session.request(method, self.url + path, data=json.dumps(body).encode()) as response:
            return Answer(response.status, await response.read())

    async def generate(self, **fields: Any) -> Any:
        """POST /generate with `PROMPT`, unless fields name another prompt. Return the body of the 200 answer."""
        answer = await self.post("/generate", generate_body(**fields))
        assert answer.status == 200, answer.text
        return answer.body

    async def stream(self, **fields: Any) -> AsyncIterator[Any]:
        """Yield the chunks of a streamed POST /generate. Check that [DONE] ends them."""
        data = json.dumps(generate_body(stream=True, **fields)).encode()
        done = False
        async with self._session.post(f"{self.url}/generate", data=data) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            async for line in response.content:
                if not line.strip():
                    continue
                assert not done
                payload = line.removeprefix(b"data: ").strip()
                done = payload == b"[DONE]"
                if not done:
                    yield json.loads(payload)
        assert done

    async def until(self, *, running: int | None = None, waiting: int | None = None) -> None:
        """Poll the engine until it reports these numbers of requests."""
        with anyio.fail_after(TIMEOUT_S):
            while True:
                (load,) = (await self.get("/v1/loads")).body["loads"]
                if running in (None, load["num_running_reqs"]) and waiting in (None, load["num_waiting_reqs"]):
                    return

    async def until_generated(self, num_tokens: int) -> None:
        """Poll the engine until it holds at least this number of tokens of running requests."""
        with anyio.fail_after(TIMEOUT_S):
            while (await self.get("/v1/loads")).body["loads"][0]["num_used_tokens"] < num_tokens:
                pass


def generate_body(*, max_new_tokens: int = 6, params: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Build a body for /generate. Defaults: `PROMPT`, no end of text, log-probs."""
    sampling = {"max_new_tokens": max_new_tokens, "ignore_eos": True} | (params or {})
    prompt: dict[str, Any] = {} if "text" in fields else {"input_ids": PROMPT}
    return prompt | {"sampling_params": sampling, "return_logprob": True} | fields
