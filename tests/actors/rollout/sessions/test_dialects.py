"""Answers that go out in each dialect, and come back as clients send them: each turn goes on from the recorded one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.sessions.dialects.chat import ChatDialect
from actors.sessions.dialects.messages import MessagesDialect
from actors.sessions.dialects.reading import Turn
from actors.sessions.dialects.responses import ResponsesDialect
from runtime.sessions.turns import TurnAnswer
from tests.actors.rollout.sessions.test_law import Model
from tests.support.chat_models import write_chat_model
from tests.support.scripted_session import SCHEMA, rendering_of, scripted_session

pytestmark = pytest.mark.anyio

NUM_TURNS = 8
PARAMETERS: dict[str, Any] = {"type": "object", "properties": SCHEMA}
Body = dict[str, Any]


def chat_body(history: list[Any]) -> Body:
    tool = {"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}
    return {"model": "m", "messages": [{"role": "user", "content": "Go."}, *history], "tools": [tool]}


def chat_follow_up(answer: Body, number: int) -> list[Any]:
    """The openai client: the message as it was, with an answer to each call."""
    message = answer["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in message.get("tool_calls") or ()
    ]
    return [message, *(results or [{"role": "user", "content": f"More {number}"}])]


def responses_body(history: list[Any]) -> Body:
    tool = {"type": "function", "name": "bash", "parameters": PARAMETERS}
    return {"model": "m", "input": [{"role": "user", "content": "Go."}, *history], "tools": [tool], "store": False}


def responses_follow_up(answer: Body, number: int) -> list[Any]:
    """openai-agents and Codex: all items as they were, with an output of each call."""
    calls = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call, "output": "ok"} for call in calls]
    return [*answer["output"], *(results or [{"role": "user", "content": f"More {number}"}])]


def messages_body(history: list[Any]) -> Body:
    tool = {"name": "bash", "input_schema": PARAMETERS}
    messages = [{"role": "user", "content": "Go."}, *history]
    return {"model": "m", "max_tokens": 5000, "messages": messages, "tools": [tool]}


def messages_follow_up(answer: Body, number: int) -> list[Any]:
    """The anthropic client: blocks as they were, and cache_control on the newest message alone."""
    calls = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call, "content": "ok"} for call in calls]
    marked = {"type": "text", "text": f"More {number}", "cache_control": {"type": "ephemeral"}}
    return [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results or [marked]}]


DIALECTS: dict[str, tuple[Any, Callable[[list[Any]], Body], Callable[[Body, int], list[Any]]]] = {
    "chat": (ChatDialect(), chat_body, chat_follow_up),
    "responses": (ResponsesDialect(), responses_body, responses_follow_up),
    "messages": (MessagesDialect(), messages_body, messages_follow_up),
}


@pytest.mark.parametrize("name", ["qwen3", "glm4", "gpt-oss"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_turn_that_comes_back_is_found_again(tmp_path: Path, dialect: str, name: str) -> None:
    rendering, model = rendering_of(write_chat_model(tmp_path, name))
    spoken, body, follow_up = DIALECTS[dialect]
    answers: list[TurnAnswer] = []
    async with scripted_session(rendering, model, Model(name, model, 1)) as run:
        history: list[Any] = []
        for number in range(NUM_TURNS):
            asked = spoken.read(json.dumps(body(history)).encode())
            answers.append(await run.session.turn(asked.request))
            written = json.loads(spoken.answer(asked, Turn(f"t{number}", 0, (answers[-1],))))
            history += follow_up(written, number)
    assert run.session.tree.forks == {}
    assert run.session.tree.num_extended == NUM_TURNS - 1
    assert run.tap.num_differing == 0
    assert run.trained == [answer.token_ids for answer in answers]
    assert any(answer.message.tool_calls for answer in answers)
