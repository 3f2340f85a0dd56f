"""The clock engine: its responses have the same length however they are interrupted, and its clock takes its time."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.bench.clock_engine import DIGIT_ZERO, TOKEN, ClockEngine
from tests.bench.long_tail import Clock, Lengths

LENGTHS = Lengths(mean=48, sigma=1.0, cap=384)
FAST = Clock(0.0005, 0.0, 8)
PROMPT = [DIGIT_ZERO + digit for digit in (0, 0, 0, 0, 1, 7)]

pytestmark = pytest.mark.anyio


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def post(self, path: str, **body: Any) -> Any:
        async with self._session.post(f"{self._url}/{path}", json=body) as answer:
            return await answer.json(content_type=None)

    async def generate(self, index: int, *, prefix: int = 0, limit: int = 384, attempt: int = 0) -> Any:
        return await self.post("generate", **self.body(index, prefix=prefix, limit=limit, attempt=attempt))

    @staticmethod
    def body(index: int, *, prefix: int = 0, limit: int = 384, attempt: int = 0) -> dict[str, Any]:
        ids = PROMPT + [TOKEN] * prefix
        return {"rid": f"lease{attempt}-{index}-0", "input_ids": ids, "sampling_params": {"max_new_tokens": limit}}

    async def parts(self, index: int, interval: int) -> list[Any]:
        """A streamed answer."""
        body = {**self.body(index), "stream": True}
        body["sampling_params"]["stream_interval"] = interval
        async with self._session.post(f"{self._url}/generate", json=body) as answer:
            lines = [line async for line in answer.content if line.strip()]
        assert lines.pop().strip() == b"data: [DONE]"
        return [json.loads(line.removeprefix(b"data: ")) for line in lines]

    async def num_tokens(self) -> int:
        async with self._session.get(f"{self._url}/clock") as answer:
            return (await answer.json())["num_tokens"]

    async def wait_for_tokens(self, number: int) -> None:
        while await self.num_tokens() < number:
            pass


@asynccontextmanager
async def serving(clock: Clock = FAST) -> AsyncIterator[Client]:
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    engine = ClockEngine(clock, LENGTHS)
    runner = web.ServerRunner(web.Server(engine.handle, access_log=None))
    await runner.setup()
    ticking = asyncio.create_task(engine.run())
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        async with aiohttp.ClientSession() as session:
            yield Client(session, f"http://{host}:{port}")
    finally:
        ticking.cancel()
        with suppress(asyncio.CancelledError):
            await ticking
        await runner.cleanup()


async def test_a_response_is_as_long_as_was_drawn_for_its_prompt_and_sample() -> None:
    async with serving() as client:
        for index in range(4):
            answer = await client.generate(index)
            assert answer["output_ids"] == [TOKEN] * LENGTHS.of(17, index)
            assert len(answer["meta_info"]["output_token_logprobs"]) == LENGTHS.of(17, index)


async def test_a_response_in_two_pieces_is_as_long_as_in_one() -> None:
    async with serving() as client:
        first = await client.generate(0, limit=5)
        assert first["meta_info"]["finish_reason"]["type"] == "length"
        rest = await client.generate(0, prefix=5, attempt=1)
        assert 5 + len(rest["output_ids"]) == LENGTHS.of(17, 0)
        assert rest["meta_info"]["finish_reason"]["type"] == "stop"


async def test_an_abort_keeps_the_tokens() -> None:
    async with serving(Clock(0.01, 0.0, 8)) as client, asyncio.timeout(20):
        waiting = asyncio.create_task(client.generate(0))
        await client.wait_for_tokens(3)
        await client.post("abort_request", abort_all=True)
        answer = await waiting
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(answer["output_ids"]) == await client.num_tokens() >= 3


async def test_a_paused_sample_goes_on_under_the_new_weights() -> None:
    async with serving(Clock(0.005, 0.0, 8)) as client, asyncio.timeout(20):
        waiting = asyncio.create_task(client.generate(0))
        await client.wait_for_tokens(3)
        await client.post("pause_generation", mode="in_place")
        await client.post("update_weights_from_disk", weight_version="7")
        await client.post("continue_generation")
        answer = await waiting
        spans = answer["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == ["0", "7"]
        assert (spans[0]["start"], spans[-1]["end"]) == (0, LENGTHS.of(17, 0))
        assert spans[0]["end"] == spans[1]["start"] >= 3


@pytest.mark.slow
async def test_an_update_waits_for_running_samples_and_holds_new_ones_back() -> None:
    async with serving(Clock(0.005, 0.0, 8)) as client, asyncio.timeout(20):
        waiting = asyncio.create_task(client.generate(0))
        await client.wait_for_tokens(1)
        updating = asyncio.create_task(client.post("update_weights_from_disk", weight_version="7"))
        late = asyncio.create_task(client.generate(1))
        old, _, new = await asyncio.gather(waiting, updating, late)
        assert [span["version"] for span in old["meta_info"]["weight_versions"]] == ["0"]
        assert new["meta_info"]["weight_versions"][-1]["version"] == "7"


async def test_a_stream_tells_of_all_tokens_so_far() -> None:
    async with serving() as client:
        parts = await client.parts(0, interval=4)
        lengths = [len(part["output_ids"]) for part in parts]
        assert lengths == sorted(lengths)
        assert lengths[-1] == LENGTHS.of(17, 0)
        assert parts[-1]["meta_info"]["finish_reason"]["type"] == "stop"


async def test_a_token_step_takes_its_time() -> None:
    async with serving(Clock(0.002, 0.001, 8)) as client:
        begun = asyncio.get_running_loop().time()
        await asyncio.gather(*(client.generate(index) for index in range(3)))
        took_s = asyncio.get_running_loop().time() - begun
        assert took_s >= max(LENGTHS.of(17, index) for index in range(3)) * 0.003
