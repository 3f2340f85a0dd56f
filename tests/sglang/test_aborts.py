"""The contract: requests that are ended early, wherever they are, and what is left of them."""

import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest

from actors.rollout.requests.request import GenerateRequest
from actors.rollout.sglang.errors import RequestRefused
from messages import SampleStatus
from tests.sglang.model import DOT, DOTTED, EOS
from tests.sglang.rig import Rig, body_of, readers_of, request, until, until_read
from tests.sglang.server import NUM_SLOTS
from tests.support.sampled import Generated, generate

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

PROMPT = [3, 4, 5]
LONG = 300  # tokens: long enough to be streamed
SLOW_S = 0.03  # of a step: an abort meets a request on its way


class Asked:
    """Requests under way, and what became of them."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.generated: dict[str, Generated | None] = {}
        self.requests: dict[str, GenerateRequest] = {}

    async def ask(self, request: GenerateRequest, streamed: bool) -> None:
        # SGLang aborts an id again 2 s after its stream has ended
        asked = self.requests[request.rid] = replace(request, rid=uuid.uuid4().hex, may_stream=streamed)
        self.generated[request.rid] = await generate(self._rig.generator, asked)

    def check(self, rid: str) -> int:
        """An answer that was aborted makes a good segment and may go on; how many tokens it has."""
        generated = self.generated[rid]
        assert generated is not None
        (answer,) = generated.answers
        packed = answer.segment
        spans = packed.weight_spans
        assert sum(span.end - span.start for span in spans) == len(answer.output_ids)
        assert len(packed.rollout_log_probs) == len(answer.output_ids)
        assert answer.status is SampleStatus.ABORTED
        return len(answer.output_ids)


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def streamed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.behaviour("abort of a running request: what it sampled is its answer")
async def test_abort_of_a_running_request(rig: Rig, streamed: bool) -> None:
    asked = Asked(rig)
    await rig.slow_down(SLOW_S)
    async with anyio.create_task_group() as group:
        group.start_soon(asked.ask, request(PROMPT, LONG, rid="a", round=1), streamed)
        await rig.until_tokens(20)
        rig.generator.running.halt(1)
    assert asked.check("a") >= 10


@pytest.mark.behaviour("abort of a queued request: its answer has no tokens")
async def test_abort_of_a_queued_request(rig: Rig, streamed: bool) -> None:
    asked = Asked(rig)
    await rig.slow_down(SLOW_S)
    async with anyio.create_task_group() as group:
        for index in range(NUM_SLOTS):
            group.start_soon(asked.ask, request(PROMPT, LONG, rid=f"r{index}", round=2), streamed)
        await rig.until_tokens(NUM_SLOTS)
        group.start_soon(asked.ask, request(PROMPT, LONG, rid="q", round=1), streamed)
        await rig.until_load(lambda load: load["num_waiting_reqs"] >= 1)
        rig.generator.running.halt(1)
        await until(lambda: "q" in asked.generated)
        rig.generator.running.halt(2)
    assert asked.check("q") == 0


@asynccontextmanager
async def halted_while_paused(rig: Rig, asked: Asked, mode: str, streamed: bool) -> AsyncGenerator[None]:
    """A request of which something is sampled is paused and then halted; the pause ends with the block."""
    await rig.slow_down(SLOW_S)
    async with anyio.create_task_group() as group:
        group.start_soon(asked.ask, request(PROMPT, LONG, rid="a", round=1), streamed)
        await rig.until_tokens(20)
        if streamed:
            await until(lambda: "a" in asked.requests)
            await until_read(asked.requests["a"], 10)
        await rig.client.pause(rig.server.url, mode)
        rig.generator.running.halt(1)
        yield
        await rig.client.proceed(rig.server.url)


@pytest.mark.behaviour("abort of a retracted request: what was streamed of it is its answer")
async def test_abort_of_a_retracted_request(rig: Rig, streamed: bool) -> None:
    asked = Asked(rig)
    async with halted_while_paused(rig, asked, "retract", streamed):
        await until(lambda: "a" in asked.generated)
    assert asked.check("a") >= 10 if streamed else asked.check("a") == 0
    sent = asked.requests["a"]
    assert sent.readers[0].meta.id == f"{sent.rid}-0", "it was sent once"


@pytest.mark.behaviour("abort of a request that a pause froze: it ends when the pause does")
async def test_abort_of_a_frozen_request(rig: Rig, streamed: bool) -> None:
    asked = Asked(rig)
    async with halted_while_paused(rig, asked, "in_place", streamed):
        await anyio.sleep(1.5)
        assert "a" not in asked.generated
    assert asked.check("a") >= 10


@pytest.mark.behaviour("abort of a request that came during a pause: it ends soon after the pause")
async def test_abort_of_a_request_that_came_during_a_pause(rig: Rig, streamed: bool) -> None:
    asked = Asked(rig)
    await rig.slow_down(SLOW_S)
    await rig.client.pause(rig.server.url, "in_place")
    async with anyio.create_task_group() as group:
        group.start_soon(asked.ask, request(PROMPT, LONG, rid="a", round=1), streamed)
        await until(lambda: "a" in asked.requests and bool(asked.requests["a"].readers))  # it is sent now
        await anyio.sleep(0.5)  # mostly it has arrived by then; if not, it is not aborted either
        rig.generator.running.halt(1)
        await anyio.sleep(1.0)
        assert "a" not in asked.generated
        await rig.client.proceed(rig.server.url)
    assert asked.check("a") < LONG


@pytest.mark.behaviour("a request id that is in use is refused, and its owner goes on")
async def test_request_id_in_use(rig: Rig) -> None:
    asked = request(PROMPT, LONG)
    body = body_of(asked)
    await rig.slow_down(SLOW_S)

    async with anyio.create_task_group() as group:
        group.start_soon(rig.client.generate, rig.fleet.serving.router, body, readers_of(asked))
        await rig.until_tokens(8)
        with pytest.raises(RequestRefused, match="Duplicate request ID"):
            await rig.client.generate(rig.fleet.serving.router, body, readers_of(request(PROMPT, 60)))
        with pytest.raises(RequestRefused, match="Duplicate request ID"):
            await rig.client.stream(rig.fleet.serving.router, body, readers_of(request(PROMPT, 60))[0])
        await rig.slow_down(0)
    assert asked.inputs[0].buffer.num_tokens  # SGLang aborts the id 2 s after the refused stream, so maybe not all


async def ended_when_aborted(rig: Rig, ends: set[int], streamed: bool, **params: Any) -> list[Generated]:
    """Interrupt requests until some of them got an end token in the step that aborted them."""
    found: list[Generated] = []

    async def ask(index: int) -> None:
        generated = await rig.generate(request([index + 2], LONG, streamed=streamed, **params))
        (answer,) = generated.answers
        ended = bool(answer.output_ids) and answer.output_ids[-1] in ends
        is_aborted = answer.status is SampleStatus.ABORTED
        assert is_aborted is generated.cut_short is not ended, "an answer that may go on has not ended"
        if ended and (rig.raw_ends[tuple(answer.output_ids)] or {}).get("type") == "abort":
            found.append(generated)

    await rig.slow_down(SLOW_S)
    with anyio.fail_after(600):
        while len(found) < 2:
            async with anyio.create_task_group() as group:
                for index in range(NUM_SLOTS):
                    group.start_soon(ask, index)
                await anyio.sleep(4 * SLOW_S)
                with anyio.move_on_after(0.5):
                    await rig.generator.running.interrupt(rig.server.url)
    return found


@pytest.mark.behaviour("an end token in the step of an abort: the sample has ended")
async def test_end_token_in_the_step_of_an_abort(rig: Rig, streamed: bool) -> None:
    await rig.update(3)
    for generated in await ended_when_aborted(rig, {EOS}, streamed):
        assert generated.answers[0].status is SampleStatus.COMPLETED


@pytest.mark.behaviour("a stop text in the step of an abort: the sample has ended, and its text there")
async def test_stop_text_in_the_step_of_an_abort(rig: Rig, streamed: bool) -> None:
    for generated in await ended_when_aborted(rig, {DOT, *DOTTED}, streamed, stop=(".",)):
        (answer,) = generated.answers
        assert answer.status is SampleStatus.COMPLETED
        assert answer.text.endswith(".")
        assert answer.text.count(".") == 1
