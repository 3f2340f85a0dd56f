"""A session in a rollout actor, with a scripted engine: what the engine gets, what is stored, and a halt in a turn."""

from pathlib import Path
from typing import Any

import pytest

from actors.rollout.samples.conversation import Conversation
from actors.rollout.sessions.rendering import Rendering
from actors.rollout.sessions.session import Session
from actors.rollout.sglang.served_model import ServedModel
from messages import RoundHalted, SampleStatus
from messages.events import GroupAborted
from runtime.bus.bus import Bus
from runtime.data.chat_template import ChatTemplate
from runtime.sessions.turns import ChatMessage, ToolCall, TurnAnswer, TurnRequest
from runtime.settings.topology import Topology
from tests.actors.rollout.samples.test_conversation import one_sample, segments_of
from tests.build.topology import topology_with
from tests.support.chat_models import write_chat_model, written
from tests.support.rollout import announcement, completed, next_event, rollout_actor, until_applied
from tests.support.scripted_engine import ScriptedEngine, serving
from tests.support.scripted_session import TOOLS, claude_code

pytestmark = pytest.mark.anyio

ASK = ChatMessage("user", "What is in the file?")
CALL = ToolCall("", "bash", '{"note": "n",  "command": "cat a", "limit": 3.0}')
ANSWERS: list[TurnAnswer] = []
TREES: list[Session] = []


async def plays(conversation: Conversation) -> None:
    """Claude Code calls a tool, gets its answer, and takes the answer back and asks for something else."""
    rendering = Rendering(ChatTemplate(conversation.model.directory), conversation.model)
    async with Session(conversation, rendering) as session:
        TREES.append(session)
        first = await session.turn(TurnRequest((ASK,), TOOLS))
        (call,) = first.message.tool_calls
        history = [ASK, *claude_code(first.message, [ChatMessage("tool", "one line", tool_call_id=call.id)])]
        second = await session.turn(TurnRequest(tuple(history), TOOLS))
        third = await session.turn(TurnRequest((*history[:-1], ChatMessage("user", "Stop.")), TOOLS))
        ANSWERS.extend((first, second, third))
    conversation.reward = 0.5


@pytest.fixture
def model(tmp_path: Path) -> ServedModel:
    ANSWERS.clear()
    TREES.clear()
    return ServedModel.read(write_chat_model(tmp_path / "model", "qwen3"))


def answering(model: ServedModel, engine: ScriptedEngine) -> None:
    """Let the engine call a tool in its first answer, and say something in the others."""
    texts = [written("qwen3", "I look.", "hm", [CALL]), "It has one line.<|im_end|>", "Stopped.<|im_end|>"]
    ids = [model.encode(text) for text in texts]

    def script(prompt: list[int], params: dict[str, Any]) -> list[int]:
        turn = model.decode(prompt).count("<|im_start|>assistant") - 1
        return ids[2] if "Stop." in model.decode(prompt) else ids[turn]

    engine.script = script


def topology(model: ServedModel) -> Topology:
    generate = f"{__name__}:plays"
    return topology_with(model={"hf_checkpoint": str(model.directory)}, rollout={"custom_generate": generate})


async def test_the_engine_gets_recorded_tokens_and_each_turn_is_stored_once(
    bus: Bus, router_url: str, model: ServedModel
) -> None:
    engine = ScriptedEngine()
    answering(model, engine)
    async with serving(engine), rollout_actor(bus, router_url, [engine], topology(model)):
        await bus.publish(announcement(1))
        await bus.publish(one_sample())
        event = await completed(bus)
    prompts = [request["input_ids"] for request in engine.requests]
    first, second, third = ANSWERS
    recorded = [*prompts[0], *first.token_ids]
    assert prompts[1][: len(recorded)] == prompts[2][: len(recorded)] == recorded
    assert "<tool_response>\none line" in model.decode(prompts[1][len(recorded) :])
    assert "user\nStop." in model.decode(prompts[2][len(recorded) :])
    main, fork = event.samples
    assert (main.part, fork.part, main.status, main.reward) == (0, 1, SampleStatus.COMPLETED, 0.5)
    stored = [[segment.response_ids.tolist() for segment in await segments_of(bus, sample)] for sample in event.samples]
    assert stored == [[list(first.token_ids), list(second.token_ids)], [list(third.token_ids)]]
    assert (await segments_of(bus, fork))[0].prompt_ids.tolist() == prompts[2]
    assert main.metadata["session"] == {"turns": 3, "extended": 1, "forks": {"text": 1}}


async def test_a_turn_goes_on_after_a_halt_with_new_weights_and_its_spans_say_so(
    bus: Bus, router_url: str, model: ServedModel
) -> None:
    engine = ScriptedEngine(hold=True)
    answering(model, engine)
    async with serving(engine), rollout_actor(bus, router_url, [engine], topology(model)):
        await bus.publish(announcement(1))
        await bus.publish(one_sample())
        await engine.wait_for_streams(1)
        await bus.publish(RoundHalted(incarnation=1, round=0))
        halted, _ = await next_event(bus, GroupAborted)
        assert isinstance(halted, GroupAborted)
        begun = engine.requests[0]["input_ids"]
        kept = (await segments_of(bus, halted.samples[0]))[0].response_ids.tolist()
        full = engine.script(begun, {})
        engine.script = lambda prompt, params: full[len(prompt) - len(begun) :]
        engine.hold = False
        await bus.publish(announcement(2))
        await until_applied(bus, 2)
        rest = engine.script
        answering(model, engine)
        others = engine.script
        engine.script = lambda prompt, params: (
            rest(prompt, params) if len(engine.requests) == 2 else others(prompt, params)
        )
        await bus.publish(one_sample(attempt=1, round=1, carried=halted.samples))
        event = await completed(bus)
    assert len(TREES) == 1, "the function was not called again"
    assert engine.requests[1]["input_ids"] == [*begun, *kept]
    assert ANSWERS[0].token_ids == tuple(full)
    first = min(TREES[0].tree.sampled, key=lambda node: node.depth)
    assert first.turn is not None
    spans = [(span.version, span.start, span.end) for span in first.turn.weight_spans]
    assert spans == [(1, 0, len(kept)), (2, len(kept), len(full))]
    assert event.samples[0].metadata["session"]["turns"] == 3
