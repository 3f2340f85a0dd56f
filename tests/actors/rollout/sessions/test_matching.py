"""A message that a client sends back in its own writing is the recorded one; one that says something else is not."""

import pytest

from actors.rollout.sessions.matching import Meaning, arguments_said, difference
from runtime.sessions.turns import ChatMessage, ToolCall

SAMPLED = '{"description": "x",  "command":"echo hi", "limit": 5000.0, "id": 12345678901234567890}'


def asks(arguments: str, *, call_id: str = "call_1", **changes: str | None) -> ChatMessage:
    call = ToolCall(call_id, "bash", arguments)
    said = {"text": "Let me see.", "reasoning": "Look first.", **changes}
    return ChatMessage("assistant", said["text"] or "", said["reasoning"], (call,))


@pytest.mark.parametrize(
    "sent",
    [
        asks('{"command":"echo hi","description":"x","limit":5000,"id":12345678901234567000}'),  # Claude Code
        asks('{"command": "echo hi", "description": "x", "limit": 5000.0, "id": 1.2345678901234567e19}'),
        asks(SAMPLED, text="\nLet me see."),  # inspect-ai, if there were thoughts
        asks(SAMPLED, text="Let me see.  "),
        asks(SAMPLED, reasoning=None),  # openai-agents
        asks(SAMPLED, reasoning="\nLook first.\n"),
        asks(SAMPLED, call_id="another"),  # by its place
    ],
)
def test_another_writing_says_the_same(sent: ChatMessage) -> None:
    assert difference(Meaning(asks(SAMPLED)), Meaning(sent)) is None


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        (asks('{"command": "echo ho"}'), "arguments"),
        (asks(SAMPLED, text="Let me look."), "text"),
        (asks(SAMPLED, reasoning="Something else."), "thoughts"),
        (ChatMessage("assistant", "Let me see.", "Look first."), "text"),
        (ChatMessage("user", "Let me see."), "text"),
    ],
)
def test_what_says_something_else_differs_by_name(sent: ChatMessage, found: str) -> None:
    assert difference(Meaning(asks(SAMPLED)), Meaning(sent)) == found


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ('{"a": 1, "b": [1.0, -0.0]}', '{"b":[1,0],"a":1e0}'),
        ('{"a": "caf\\u00e9"}', '{"a": "cafe\u0301"}'),
        ("", "{}"),
        ('{"a": 1e400}', '{"a": 9e999}'),
        ("{broken", " {broken\n"),
        ("[" * 100_000, "[" * 100_000 + " "),  # too deep to parse
    ],
)
def test_arguments_are_compared_as_values(left: str, right: str) -> None:
    assert arguments_said(left) == arguments_said(right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ('{"a": true}', '{"a": 1}'),
        ('{"a": "1"}', '{"a": 1}'),
        ('{"a": null}', "{}"),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": " x"}', '{"a": "x"}'),
    ],
)
def test_other_values_are_other_arguments(left: str, right: str) -> None:
    assert arguments_said(left) != arguments_said(right)


def test_the_answer_of_a_tool_is_matched_by_the_call_that_it_answers() -> None:
    recorded = Meaning(ChatMessage("tool", "3", tool_call_id="ours"))
    sent = Meaning(ChatMessage("tool", "3", tool_call_id="theirs"))
    assert difference(recorded, sent) == "text"
    assert difference(recorded, sent, {"theirs": "ours"}) is None
    assert difference(recorded, Meaning(ChatMessage("tool", "3"))) is None


def test_a_developer_is_the_system_by_its_newer_name() -> None:
    assert (
        difference(Meaning(ChatMessage("system", "Be brief.")), Meaning(ChatMessage("developer", "Be brief."))) is None
    )
