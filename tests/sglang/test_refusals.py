"""The contract: what a server refuses is a refusal, and what a server would die of is never sent."""

from pathlib import Path

import anyio
import pytest

from actors.rollout.requests.request import GenerateRequest, SampleInput
from actors.rollout.samples.conversation import Conversation
from actors.rollout.samples.sample import OpenSample, fresh_samples
from actors.rollout.sglang.errors import RequestRefused
from actors.rollout.sglang.facts import KEPT_OF_INPUT
from actors.rollout.sglang.memory import EngineMemory
from actors.rollout.sglang.served_model import ServedModel
from messages import Int32Array, Prompt, SampleStatus, SamplingParams
from tests.sglang.model import CONTEXT, UNKNOWN, VOCAB_SIZE
from tests.sglang.rig import Rig, body_of, readers_of, request
from tests.sglang.wire import recorded
from tests.support.sampled import KEY

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

PROMPT = [3, 4, 5]
GENERATE = "POST /generate"
OUTSIDE = VOCAB_SIZE + 70_000


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def streamed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def ask(rig: Rig, asked: GenerateRequest, streamed: bool) -> None:
    """Send a request as it is, once."""
    if streamed:
        await rig.client.stream(rig.fleet.serving.router, body_of(asked), readers_of(asked)[0])
    else:
        await rig.client.generate(rig.fleet.serving.router, body_of(asked), readers_of(asked))


@pytest.mark.behaviour("an error is a refusal, also in a stream that was answered with 200")
async def test_error_chunk_is_a_refusal(rig: Rig, streamed: bool) -> None:
    with pytest.raises(RequestRefused, match="temperature"):
        await ask(rig, request(PROMPT, 300, temperature=-1.0), streamed)


@pytest.mark.behaviour("a prompt over the context is refused, and one that leaves no room for SGLang's own tokens")
@pytest.mark.parametrize("length", [CONTEXT + 88, CONTEXT, CONTEXT - KEPT_OF_INPUT])
async def test_prompt_over_the_context(rig: Rig, streamed: bool, length: int) -> None:
    with pytest.raises(RequestRefused, match=r"exceeds|longer"):
        await ask(rig, request([3] * length, 1), streamed)


@pytest.mark.behaviour("a prompt and a response that exceed the context together are refused")
async def test_response_over_the_context(rig: Rig, streamed: bool) -> None:
    with pytest.raises(RequestRefused, match="exceeds"):
        await ask(rig, request([3] * 300, CONTEXT - 300 + 1), streamed)


@pytest.mark.behaviour("a refused request is not sent again, and the others go on")
async def test_refused_once(rig: Rig) -> None:
    tokens: list[int] = []

    async def bystander() -> None:
        (answer,) = (await rig.generate(request(PROMPT, 40))).answers
        tokens.append(len(answer.output_ids))

    async with recorded(rig.fleet.serving.router) as wire:
        rig.fleet._target.router = wire.url  # pyright: ignore[reportPrivateUsage]
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(bystander)
            with pytest.raises(RequestRefused):
                await rig.generate(request([3] * CONTEXT, 300, streamed=True))
        assert wire.times_sent(GENERATE) == 4
    assert tokens == [40, 40, 40]


@pytest.mark.behaviour("a token id outside the vocabulary is never sent")
@pytest.mark.parametrize("token", [VOCAB_SIZE, OUTSIDE, -1])
async def test_token_outside_the_vocabulary_is_never_sent(rig: Rig, streamed: bool, token: int) -> None:
    async with recorded(rig.fleet.serving.router) as wire:
        rig.fleet._target.router = wire.url  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(
            RequestRefused, match=f"not sent: {token} is not a token of the model, whose vocabulary has 64"
        ):
            await rig.generate(request([3, token, 4], 300, streamed=streamed))
        (answer,) = (await rig.generate(request([3, VOCAB_SIZE - 1], 8))).answers
        assert len(answer.output_ids) == 8
        assert wire.times_sent(GENERATE) == 1


@pytest.mark.behaviour("a token outside the vocabulary that a user's function appends is never sent")
async def test_appended_token_outside_the_vocabulary_is_never_sent(rig: Rig, contract_model: Path) -> None:
    prompt = Prompt(data="d", row=0, text="", prompt_ids=Int32Array(PROMPT), label="", rm_type="exact_match")

    async def ask_for_turn(sample: OpenSample, params: SamplingParams, limit: int) -> bool:
        asked = request(PROMPT, limit, stop=params.stop)
        asked.inputs = [SampleInput(Int32Array(PROMPT), sample.buffer, sample.pending)]
        await rig.generator.generate(asked)
        sample.take(KEY, prompt.prompt_ids)
        sample.turn_status = asked.readers[0].status
        return False

    async def two_turns(conversation: Conversation) -> None:
        await conversation.generate(max_new_tokens=8)
        for outside in (VOCAB_SIZE, OUTSIDE, -1):
            with pytest.raises(ValueError, match=f"{outside} is not a token of the model, whose vocabulary has 64"):
                conversation.append_ids([5, outside])
        conversation.append_ids([5, VOCAB_SIZE - 1])
        await conversation.generate(max_new_tokens=8)

    async with recorded(rig.fleet.serving.router) as wire:
        rig.fleet._target.router = wire.url  # pyright: ignore[reportPrivateUsage]
        (sample,) = fresh_samples(1, prompt.prompt_ids)
        model = ServedModel.read(contract_model)
        conversation = Conversation(
            prompt, sample, params=SamplingParams(max_new_tokens=100), ask=ask_for_turn, model=model
        )
        assert await conversation.run(two_turns) is SampleStatus.COMPLETED
        assert [turn.num_tokens for turn in sample.turns] == [8, 8]
        assert sample.buffer.ids[8:10].tolist() == [5, VOCAB_SIZE - 1]
        assert wire.times_sent(GENERATE) == 2
        assert wire.times_sent(f",{OUTSIDE}") == 0


@pytest.mark.behaviour("a stop text that cannot be encoded is never sent, nor are more than 32")
async def test_stop_that_cannot_be_encoded_is_never_sent(rig: Rig, streamed: bool) -> None:
    async with recorded(rig.fleet.serving.router) as wire:
        rig.fleet._target.router = wire.url  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(RequestRefused, match="not sent: the model's tokenizer cannot encode"):
            await rig.generate(request(PROMPT, 300, streamed=streamed, stop=(".", UNKNOWN)))
        with pytest.raises(RequestRefused, match="not sent: 33 stop texts"):
            await rig.generate(request(PROMPT, 300, streamed=streamed, stop=(".",) * 33))
        (answer,) = (await rig.generate(request(PROMPT, 8, stop=("abcabc",) * 32))).answers
        assert len(answer.output_ids) == 8
        assert wire.times_sent(GENERATE) == 1


@pytest.mark.behaviour("memory is released while idle and resumed once: a second resume is never sent")
async def test_release_and_resume_in_order(rig: Rig) -> None:
    async with recorded(rig.server.url) as wire:
        memory = EngineMemory(rig.client, wire.url)
        await memory.release("kv_cache", "weights")
        await memory.release("weights")
        await memory.resume("weights")
        await rig.client.update_weights(rig.server.url, str(rig.weights[1]), "1@test")
        await memory.resume("weights")
        await memory.resume()
        await memory.resume()
        assert wire.times_sent("POST /release_memory_occupation") == 1
        assert wire.times_sent("POST /resume_memory_occupation") == 2
    (answer,) = (await rig.generate(request(PROMPT, 20))).answers
    assert len(answer.output_ids) == 20
