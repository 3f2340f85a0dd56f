"""The tiny engine behind the real sglang-router: registration, generation, streams, aborts at the worker."""

from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import anyio
import pytest

from runtime.node.supervisor.ports import free_port
from tests.support.tiny_client import EngineClient
from tests.support.tiny_engine import RunningEngine, running_engine, running_router, write_config

pytestmark = [pytest.mark.anyio, pytest.mark.slow]  # two engines and a router start, for all tests


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningEngine]]:
    directory: Path = tmp_path_factory.mktemp("routed")
    write_config(directory)
    with (
        running_engine(directory, "--load-format", "dummy", "--weight-version", "a") as first,
        running_engine(directory, "--load-format", "dummy", "--weight-version", "b") as second,
    ):
        yield [first, second]


@pytest.fixture(scope="module")
def router_url(engines: list[RunningEngine]) -> Iterator[str]:
    with running_router(free_port(), *(engine.url for engine in engines)) as url:
        yield url


@pytest.fixture
async def router(router_url: str, engines: list[RunningEngine]) -> AsyncGenerator[EngineClient]:
    async with EngineClient(router_url) as client:
        with anyio.fail_after(200):
            while (await client.get("/workers")).body["total"] < len(engines):
                pass
        yield client


async def test_requests_posted_to_the_router_reach_all_workers(
    router: EngineClient, engines: list[RunningEngine]
) -> None:
    listed = (await router.get("/workers")).body["workers"]
    assert {worker["url"] for worker in listed} == {engine.url for engine in engines}
    assert all(worker["is_healthy"] for worker in listed)
    answers = [await router.generate(rid=f"r{index}") for index in range(4)]
    assert [answer["meta_info"]["id"] for answer in answers] == ["r0", "r1", "r2", "r3"]
    assert {answer["meta_info"]["weight_version"] for answer in answers} == {"a", "b"}
    assert all(len(answer["meta_info"]["output_token_logprobs"]) == 6 for answer in answers)


async def test_batches_and_streams_pass_the_router(router: EngineClient) -> None:
    answers = await router.generate(input_ids=[[3], [4], [5]], rid="batch")
    assert [answer["meta_info"]["id"] for answer in answers] == ["batch_0", "batch_1", "batch_2"]
    chunks = [chunk async for chunk in router.stream(max_new_tokens=12)]
    assert len(chunks[-1]["output_ids"]) == 12


async def test_bad_requests_come_back_as_the_engine_put_them(router: EngineClient) -> None:
    answer = await router.post("/generate", {"input_ids": [3, 64], "sampling_params": {"max_new_tokens": 2}})
    assert answer.status == 400
    assert "out of the vocabulary" in answer.text


async def test_a_routed_request_is_aborted_at_its_worker(router: EngineClient, engines: list[RunningEngine]) -> None:
    workers = [EngineClient(engine.url) for engine in engines]
    async with workers[0], workers[1], anyio.create_task_group() as group:
        for worker in workers:
            await worker.post("/slow_down", {"forward_sleep_time": 0.01})
        reasons: list[str] = []

        async def generate(rid: str) -> None:
            answer = await router.generate(rid=rid, max_new_tokens=500)
            reasons.append(answer["meta_info"]["finish_reason"]["type"])

        for rid in ("x", "y"):
            group.start_soon(generate, rid)
        for worker in workers:
            await worker.until(running=1)
        for worker in workers:  # the router does not say which worker has a request: all are told
            for rid in ("x", "y"):
                assert (await worker.post("/abort_request", {"rid": rid})).status == 200
        for worker in workers:
            await worker.until(running=0)
            await worker.post("/slow_down", {"forward_sleep_time": 0})
    assert reasons == ["abort", "abort"]
