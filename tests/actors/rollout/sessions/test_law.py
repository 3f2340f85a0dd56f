"""The law of sessions: no turn is sent to an engine whose recorded prefix differs by ids, whatever a client sends back.

Clients are models of what real ones sent, templates copies of the originals, sampled tokens not those that an encoding
of their text would have. Real vocabularies are not used, but SmolLM2's with each family's special tokens.
"""

import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from actors.rollout.sessions.rendering import Rendering
from actors.rollout.sglang.served_model import ServedModel
from runtime.sessions.turns import ChatMessage, ToolCall, TurnRequest
from tests.support.chat_models import CHAT_MODELS, smollm2_vocabulary, write_chat_model, written
from tests.support.scripted_session import CLIENTS, TOOLS, Scripted, rendering_of, scripted_session
from tests.support.smollm2 import packaged_file

pytestmark = pytest.mark.anyio

WORDS = ("Let me see. ", "caf\u00e9 \n\n", "Then:\n  {", "done ", '"x"', "\t1.0 ", " \u4f60\u597d", "a_b(c) ", "...")
ARGUMENTS = (
    '{"note": "x",  "command":"echo hi", "limit": 5000.0}',
    '{"command": "ls -l", "limit": 12345678901234567890}',
    '{ "limit": 1e3 , "command": "echo \\u00e9"}',
    '{"command": "echo \u00e9", "limit": 1.0}',
    '{"limit": 0.1, "note": "a\\nb", "command": "cat {}"}',
    '{"command": "true"}',
)


def split_anyhow(model: ServedModel, text: str, numbers: random.Random) -> list[int]:
    """Encode a text in random pieces, as a model may sample it."""
    ends = sorted({len(text), *(numbers.randrange(len(text) + 1) for _ in range(len(text) // 6))})
    pieces = (text[start:end] for start, end in zip([0, *ends], ends, strict=False))
    return list(chain.from_iterable(map(model.encode, pieces)))


class Model:
    """Samples answers of one family at random: thoughts, words, calls, sometimes cut off."""

    def __init__(self, name: str, model: ServedModel, seed: int) -> None:
        self._name, self._model, self._numbers = name, model, random.Random(seed)

    def __call__(self, prompt: list[int], limit: int) -> list[int]:
        numbers = self._numbers
        words = "".join(numbers.choices(WORDS, k=numbers.randrange(1, 6)))
        reasoning = "".join(numbers.choices(WORDS, k=4)).strip("\n") if numbers.random() < 0.6 else None
        most = 2 if CHAT_MODELS[self._name].has_parallel_calls else 1
        calls = [ToolCall("", "bash", numbers.choice(ARGUMENTS)) for _ in range(numbers.randrange(most + 1))]
        text = written(self._name, words, reasoning, calls)
        end = next(end for end in CHAT_MODELS[self._name].special[:3] if text.endswith(end))
        ids = split_anyhow(self._model, text.removesuffix(end), numbers)
        return ids if numbers.random() < 0.1 else [*ids, *self._model.encode(end)]


async def play(run: Scripted, client: str, numbers: random.Random, num_turns: int) -> None:
    """Let a client play one conversation: it calls tools, and asks again when there are none to call."""
    messages = [ChatMessage("system", "Be brief."), ChatMessage("user", "What is in the files?")]
    for turn in range(num_turns):
        answer = await run.session.turn(TurnRequest(tuple(messages), TOOLS))
        results = [
            ChatMessage("tool", "".join(numbers.choices(WORDS, k=3)), tool_call_id=call.id)
            for call in answer.message.tool_calls
        ]
        messages += CLIENTS[client](answer.message, results)
        if not results:
            messages.append(ChatMessage("user", f"And {turn}?"))


def models_of(directory: Path, vocabulary: str | None) -> Iterator[tuple[str, Rendering, ServedModel]]:
    for name in CHAT_MODELS:
        yield (name, *rendering_of(write_chat_model(directory / name, name, vocabulary=vocabulary)))


async def check_law(directory: Path, client: str, vocabulary: str | None, num_conversations: int) -> None:
    for name, rendering, model in models_of(directory, vocabulary):
        num_turns = num_extended = 0
        for seed in range(num_conversations):
            async with scripted_session(rendering, model, Model(name, model, seed)) as run:
                await play(run, client, random.Random(seed), 8)
            assert run.tap.num_differing == 0
            assert sorted(run.trained) == sorted(run.tap.sampled), "each sampled token trains, once"
            assert len(run.tap.sampled) == 8
            num_turns += 7
            num_extended += run.session.tree.num_extended
            if client != "smolagents":
                assert run.session.tree.forks == {}, (name, seed)
        if client != "smolagents":
            assert num_extended == num_turns


@pytest.mark.parametrize("client", CLIENTS)
async def test_no_recorded_prefix_differs(tmp_path: Path, client: str) -> None:
    await check_law(tmp_path, client, None, num_conversations=2)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("client", CLIENTS)
async def test_no_recorded_prefix_differs_with_the_vocabulary_of_a_model(tmp_path: Path, client: str) -> None:
    await check_law(tmp_path, client, smollm2_vocabulary(packaged_file()), num_conversations=20)


async def test_rendered_prompts_would_differ(tmp_path: Path) -> None:
    """What the law is about: the prompt of the next turn, rendered anew, mostly has other tokens than were sampled."""
    num_turns = num_alike = 0
    for name, rendering, model in models_of(tmp_path, None):
        async with scripted_session(rendering, model, Model(name, model, 0)) as run:
            await play(run, "keeps all", random.Random(0), 8)
        nodes = sorted(run.session.tree.sampled, key=lambda node: node.depth)
        for node, prompt in zip(nodes[1:], run.tap.prompts[1:], strict=True):
            messages = [each.meaning.message for each in node.path()[:-1] if each.meaning is not None]
            num_turns += 1
            num_alike += rendering.whole(messages, TOOLS).ids == prompt
    assert num_turns == 7 * len(CHAT_MODELS)
    assert num_alike < num_turns / 2
