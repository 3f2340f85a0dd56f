"""What a sampled turn says, in each format: arguments as they were sampled, broken calls as words."""

import json

import pytest

from actors.rollout.sessions.formats import FORMATS, OTHER, format_of
from actors.rollout.sessions.tool_calls import (
    Call,
    Parsed,
    bare_json,
    harmony,
    marked_calls,
    tagged_arguments,
    tagged_json,
)
from runtime.sessions.turns import Tool, ToolCall
from tests.support.chat_models import CHAT_MODELS, TEMPLATES, written

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}, "limit": {"type": "number"}}}
TOOLS = {"bash": Tool("bash", "Run a command.", SCHEMA)}
RAW = '{"limit":  1e3, "command": "echo \\u00e9"}'


def format_named(name: str):
    return format_of((TEMPLATES / f"{CHAT_MODELS[name].template}.jinja").read_text())


@pytest.mark.parametrize("name", CHAT_MODELS)
def test_each_format_reads_a_call_as_it_was_sampled(name: str) -> None:
    text = written(name, "", None, [ToolCall("", "bash", RAW)])
    parsed = format_named(name).parse(text[: text.rindex("<")], TOOLS, False)
    assert parsed.text.strip() == ""
    assert [call.name for call in parsed.calls] == ["bash"]
    if name == "glm4":  # writes values, not JSON
        assert json.loads(parsed.calls[0].arguments) == json.loads(RAW)
    else:
        assert parsed.calls[0].arguments == RAW


def test_templates_have_their_format() -> None:
    found = {name: format_named(name).name for name in CHAT_MODELS}
    assert set(found.values()) == {each.name for each in FORMATS}
    assert format_of("{{ messages[0].content }}") is OTHER


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "bash", "arguments": {"command": "x"',
        '{"name": "bash", "arguments": {"command": NaN}}',
        '{"name": "bash", "arguments": ["x"]}',
        '{"name": "bash<|im_end|>", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "bash", "arguments": {}} and more',
        '{"name": "bash", "arguments": ' + "[" * 100_000,
        "",
    ],
)
def test_a_broken_call_stays_words(body: str) -> None:
    text = f"I try.\n<tool_call>\n{body}\n</tool_call>"
    assert tagged_json(text, TOOLS, False) == Parsed(text, None, ())


def test_a_broken_call_among_others_stays_where_it_was() -> None:
    good = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    parsed = tagged_json(f"One\n{good}\n<tool_call>\n{{broken\n</tool_call>", TOOLS, False)
    assert parsed.text == "One<tool_call>\n{broken\n</tool_call>"
    assert parsed.calls == (Call("bash", '{"command": "ls"}'),)


def test_arguments_in_a_string_are_the_json_in_it() -> None:
    body = json.dumps({"name": "bash", "arguments": '{"command":  "ls"}'})
    assert tagged_json(f"<tool_call>{body}</tool_call>", TOOLS, False).calls == (Call("bash", '{"command":  "ls"}'),)


@pytest.mark.parametrize(
    ("text", "in_thoughts", "reasoning", "rest"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, "hm", "yes"),
        ("hm\n</think>\n\nyes", True, "hm", "yes"),
        ("hm\n</think>\n\nyes", False, "hm", "yes"),
        ("hm", True, "hm", ""),  # cut off
        ("<think>\n\n</think>\n\nyes", False, None, "yes"),
        ("I write <think> tags", False, None, "I write <think> tags"),
    ],
)
def test_thoughts_come_before_the_words(text: str, in_thoughts: bool, reasoning: str | None, rest: str) -> None:
    assert tagged_json(text, TOOLS, in_thoughts) == Parsed(rest, reasoning, ())


@pytest.mark.parametrize("parse", [tagged_json, bare_json, marked_calls, harmony, tagged_arguments])
def test_without_tools_there_are_no_calls(parse) -> None:
    for name in CHAT_MODELS:
        assert parse(written(name, "x", None, [ToolCall("", "bash", "{}")]), {}, False).calls == ()


def test_bare_json_calls_several_tools_in_one_answer_and_answers_in_json() -> None:
    one = '{"name": "bash", "parameters": {"command": "ls"}}'
    assert bare_json(f"<|python_tag|>{one}; {one}", TOOLS, False).calls == (Call("bash", '{"command": "ls"}'),) * 2
    assert bare_json('{"name": "Bob", "age": 3}', TOOLS, False) == Parsed('{"name": "Bob", "age": 3}', None, ())


def test_harmony_writes_the_recipient_before_or_after_the_channel() -> None:
    before = " to=functions.bash<|channel|>commentary json<|message|>{}<|call|>"
    after = "<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{}<|call|>"
    assert harmony(before, TOOLS, False).calls == harmony(after, TOOLS, False).calls == (Call("bash", "{}"),)
    thinks = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{after}"
    assert harmony(thinks, TOOLS, False) == Parsed("", "hm", (Call("bash", "{}"),))
    assert harmony("<|channel|>final<|message|>Yes.", TOOLS, False) == Parsed("Yes.", None, ())


def test_marked_calls_may_have_bare_arguments() -> None:
    call = '<｜tool▁call▁begin｜>bash<｜tool▁sep｜>{"command":  "ls"}<｜tool▁call▁end｜>'
    parsed = marked_calls(f"See:<｜tool▁calls▁begin｜>{call}{call}<｜tool▁calls▁end｜>", TOOLS, False)
    assert parsed == Parsed("See:", None, (Call("bash", '{"command":  "ls"}'),) * 2)


def test_glm_writes_values_by_their_schema() -> None:
    keys_and_values = (("command", "123"), ("limit", "5"))
    body = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in keys_and_values)
    text = f"<tool_call>bash\n{body}</tool_call>"
    assert tagged_arguments(text, TOOLS, False).calls == (Call("bash", '{"command": "123", "limit": 5}'),)
    assert tagged_arguments("<tool_call>bash\n</tool_call>", TOOLS, False).calls == (Call("bash", "{}"),)
    broken = "<tool_call>bash\n<arg_key>command</arg_key>\n</tool_call>"
    assert tagged_arguments(broken, TOOLS, False) == Parsed(broken, None, ())
