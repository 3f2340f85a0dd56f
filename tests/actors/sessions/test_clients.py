"""Unmodified clients from PyPI hold tool-using conversations with the listener, and read its errors as it means them.

Behind the link are scripted sessions. A turn that extends the conversation as it was answered is what the tree of a
session matches; so each request has to have the messages of the one before, its answer, and results of tools.
"""

import json
import os
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import anyio
import pytest

from actors.sessions.listener import ListenerSettings, listening
from runtime.sessions.keys import KeyPair
from runtime.sessions.turns import ChatMessage, ToolCall, TurnAnswer, TurnRefused, TurnRequest
from tests.build.turns import answer
from tests.support.scripted_sessions import ScriptedSessions, connected

ROOT: Final = Path(__file__).parents[3]
PROGRAM: Final = Path(__file__).with_name("agent_clients.py")
NUM_TURNS: Final = 30
SETTINGS: Final = ListenerSettings(hold_every_s=0.2, first_byte_s=20)


def adding(request: TurnRequest) -> TurnAnswer:
    """Call a tool in each turn, two at once in some, with arguments that are easily written otherwise."""
    turn = sum(message.role == "assistant" for message in request.messages)
    if turn == NUM_TURNS:
        return answer("done", reasoning="enough")
    texts = ['{"a":  1, "b": 2.0}', '{"b": 1e3, "a": -0.5}', '{ "a": 12345678901234567890, "b": 0 }']
    calls = [ToolCall(f"call_{turn}_{number}", "add", texts[(turn + number) % 3]) for number in range(1 + turn % 2)]
    return answer(" let me\n" if turn % 3 else "", *calls, reasoning="hm\n" if turn % 4 else None)


def run_clients(run_dir: Path, sessions: ScriptedSessions, keys: dict[str, str], *clients: str) -> dict[str, Any]:
    """Run clients in their own interpreter; return what each one saw."""
    subprocess.run([ROOT / "bin" / "setup", "--with", "agents", "--if-needed"], check=True, timeout=300)
    saw = dict[str, Any]()

    async def running() -> None:
        with anyio.fail_after(300):
            async with listening(run_dir, SETTINGS) as url, connected(run_dir, sessions):
                environment = {"URL": url, "PATH": os.environ["PATH"]} | keys
                command = [str(ROOT / ".venv-agents" / "bin" / "python"), "-I", str(PROGRAM), *clients]
                done = await anyio.run_process(command, env=environment, check=False)
                assert done.returncode == 0, done.stderr.decode()[-3000:]
                saw.update({(line := json.loads(one))["client"]: line["saw"] for one in done.stdout.splitlines()})

    anyio.run(running)
    return saw


def model_keys(sessions: ScriptedSessions) -> dict[str, str]:
    return {name: pair.model.reveal() for name, pair in sessions.pairs.items()}


def seen_as(client: str, message: ChatMessage) -> ChatMessage:
    """Return what of an answer a client keeps: some drop the thoughts, and some write the arguments anew."""
    reasoning = None if client.startswith("agents_chat") or not message.reasoning else message.reasoning
    calls = message.tool_calls
    if client.startswith("messages"):
        calls = tuple(ToolCall(call.id, call.name, json.dumps(json.loads(call.arguments))) for call in calls)
    return ChatMessage("assistant", message.text, reasoning, calls)


@pytest.mark.slow
@pytest.mark.parametrize(
    "clients",
    [
        ("chat_stream", "messages", "agents_chat", "agents_responses_stream"),
        pytest.param(
            ("chat", "responses", "responses_stream", "messages_stream", "agents_chat_stream", "agents_responses"),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_conversations_with_tools_are_extended_and_never_change(tmp_path: Path, clients: tuple[str, ...]) -> None:
    sessions = ScriptedSessions(*clients, script=adding)
    saw = run_clients(tmp_path, sessions, model_keys(sessions), *clients)
    assert saw == dict.fromkeys(clients, "done")
    for client in clients:
        requests = [request for session, request in sessions.turns if session == client]
        assert len(requests) == NUM_TURNS + 1
        for before, request in pairwise(requests):
            answered = seen_as(client, adding(before).message)
            number = len(before.messages)
            said, *results = request.messages[number:]
            assert request.messages[:number] == before.messages
            assert seen_as(client, said) == answered
            assert [result.tool_call_id for result in results] == [call.id for call in answered.tool_calls]
            assert request.tools == before.tools


@pytest.mark.slow
def test_errors_slow_turns_and_repeats_are_what_clients_take_them_for(tmp_path: Path) -> None:
    names = ("errors_control", "errors_ended", "errors_full", "errors_late", "held", "joined")
    sessions = ScriptedSessions(*names)
    keys = model_keys(sessions)
    keys["errors_control"] = sessions.pairs["errors_control"].control.reveal()
    keys["errors_unknown"] = KeyPair.new("errors_control").model.reveal()
    full = TurnRefused("context_full", "It does not fit.", num_tokens=9, max_tokens=8)
    sessions.scripts["errors_full"] = lambda request: full
    sessions.scripts["errors_late"] = lambda request: TurnRefused("failed", "The sandbox is gone.")
    sessions.slow = {"errors_late": 1.0, "held": 2.5, "joined": 1.5}
    sessions.ended = ("errors_ended",)
    saw = run_clients(tmp_path, sessions, keys, "errors", "held", "joined")
    assert {case: found.partition(":")[0] for case, found in saw["errors"].items()} == {
        "openai unknown": "AuthenticationError",
        "anthropic unknown": "AuthenticationError",
        "openai control": "PermissionDeniedError",
        "anthropic control": "PermissionDeniedError",
        "openai ended": "APIStatusError",
        "anthropic ended": "APIStatusError",
        "openai full": "BadRequestError",
        "anthropic full": "BadRequestError",
        "openai full stream": "BadRequestError",
        "anthropic full stream": "BadRequestError",
        "openai late": "APIConnectionError",
        "anthropic late": "APIConnectionError",
        "openai late stream": "APIError",
        "anthropic late stream": "APIStatusError",
    }
    assert saw["held"] == {text: text for text in saw["held"]}
    assert saw["joined"] == "Add until you are done."
    turns = Counter(session for session, _ in sessions.turns)
    # A cut is repeated twice by each client, and an error event by none. The case `joined` repeats while its turn runs.
    assert turns == {"errors_full": 4, "errors_late": 2 * 3 + 2, "held": 6, "joined": 1}
