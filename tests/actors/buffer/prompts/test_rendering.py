"""Each text of a row's messages is in its rendering, or the row is refused by file, line and message.

The templates are those of tests/data/chat_templates, as models ship them and TRL marks them.
"""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.buffer.prompts.demonstrations import DemonstrationReader
from actors.buffer.prompts.prompts import PromptReader, Reader
from actors.buffer.prompts.tokenizing import FastTokenizing
from messages import Prompt
from runtime.data.data_files import DataError
from runtime.data.rows import read_rows
from runtime.settings.load import load_topology
from runtime.settings.reading.config import TopologyError
from runtime.settings.tables.prompts import DataConfig
from runtime.settings.tables.rollout import RolloutConfig
from tests.actors.buffer.prompts.test_chat_templates import TALK, TEMPLATES, THINKS, TOOLS, tokenizer_of, trained

Turns = list[dict[str, Any]]
ALL = sorted(file.stem for file in TEMPLATES.glob("*.jinja"))
LAPTOP = Path(__file__).resolve().parents[4] / "topologies/laptop.toml"
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
CALLS = TOOLS[1]["tool_calls"]
PARTS: Turns = [
    {"role": "user", "content": [{"type": "text", "text": "1+1"}, {"type": "text", "text": " = ?"}]},
    {"role": "assistant", "content": ["2"]},
]
FROM_PARQUET: Turns = [{**turn, "tool_calls": None, "reasoning_content": None} for turn in TALK]


def changed(turns: Turns, number: int, **fields: Any) -> Turns:
    found = copy.deepcopy(turns)
    found[number].update(fields)
    return found


def reader(directory: Path, *, sft: bool) -> Reader:
    tokenizing = FastTokenizing(directory)
    if sft:
        return DemonstrationReader(tokenizing, RolloutConfig(rollout_batch_size=1, max_response_len=10_000))
    return PromptReader(tokenizing, None)


def read(
    directory: Path, template: str, rows: Sequence[Any], *, sft: bool = False, **options: Any
) -> tuple[list[Prompt], str | None]:
    """Write rows (messages, or lines of text) to rows.jsonl, and return the prompts and the note."""
    tokenizer_of(directory, template)
    file = directory / "rows.jsonl"
    lines = [row if isinstance(row, str) else json.dumps({"input": row, "tools": options.get("tools")}) for row in rows]
    file.write_text("\n".join(lines), encoding="utf-8")
    options.pop("tools", None)
    data = DataConfig(name="d", path=str(file), apply_chat_template=True, rm_type="numeric", **options)
    own = reader(directory, sft=sft)
    return own.read(list(read_rows(data)), data), own.take_note()


def refused(directory: Path, template: str, row: Any, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(directory, template, [TALK[:-1] if not options.get("sft") else TALK, row], **options)
    place = f"{directory / 'rows.jsonl'}:2: "
    assert str(caught.value).startswith(place)
    return str(caught.value).removeprefix(place)


# Good rows


def good_rows(template: str) -> dict[str, Turns]:
    if template == "gptoss":  # it ends an answer in another way once more messages follow
        return {"one turn": TALK[:3], "parts": PARTS}
    rows = {"talk": TALK, "thinks": THINKS, "parts": PARTS, "null keys": FROM_PARQUET}
    thought = {"reasoning_content": "small"}
    rows["earlier thought"] = changed(TALK, 2, **thought)
    if template in ("llama3", "llama3_2", "llama3_training", "smollm2"):
        return rows  # it has no tools
    tools = copy.deepcopy(TOOLS)
    if template == "deepseekv3":  # it takes arguments only as text
        tools[1]["tool_calls"][0]["function"]["arguments"] = '{"a": 1}'
    rows |= {
        "tools": tools,
        "null content": changed(tools, 1, content=None),
        "no output": changed(tools, 2, content=""),
    }
    rows["text beside calls"] = changed(tools, 1, content="Let me add them.")
    rows["thought beside calls"] = changed(tools, 1, content="<think>\nI must add.\n</think>\n\n")
    rows["result in lines"] = changed(tools, 2, content='2\n"two"')
    return rows


@pytest.mark.parametrize("template", ALL)
def test_no_good_row_is_refused(tmp_path: Path, template: str) -> None:
    for name, turns in good_rows(template).items():
        tools = [ADD] if name != "talk" else None
        (demonstration,), _ = read(tmp_path, template, [turns], sft=True, tools=tools)
        (prompt,), _ = read(tmp_path, template, [turns[:-1]], tools=tools)
        assert "1+1" in demonstration.text, name
        assert "1+1" in prompt.text, name


def test_text_parts_are_joined(tmp_path: Path) -> None:
    (prompt,), _ = read(tmp_path, "qwen3", [PARTS[:1]])
    assert prompt.text == "<|im_start|>user\n1+1 = ?<|im_end|>\n<|im_start|>assistant\n"


def test_thoughts_of_earlier_turns_are_left_out_and_counted_once(tmp_path: Path) -> None:
    _, note = read(tmp_path, "qwen3", [THINKS[:-1], THINKS[:-1], TALK[:-1]])
    assert note == "the chat template leaves out 2 thoughts, or texts beside tool calls"
    _, note = read(tmp_path, "llama3", [TALK[:-1]], tools=[ADD])
    assert note == "the chat template leaves out the tools of 1 rows"
    assert read(tmp_path, "qwen3", [TALK[:-1]], tools=[ADD])[1] is None


@pytest.mark.parametrize("role", ["ipython", "observation", "developer", "function", "critic"])
def test_roles_that_the_template_renders_pass(tmp_path: Path, role: str) -> None:
    tokenizer_of(tmp_path, "qwen3")
    template = (
        "{% for m in messages %}{% if m.role in ['user', '" + role + "'] %}{{ m.content }};{% endif %}{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    data = DataConfig(name="d", path=str(tmp_path / "rows.jsonl"), apply_chat_template=True, rm_type="numeric")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input": [TALK[1], {"role": role, "content": "2"}]}))
    assert reader(tmp_path, sft=False).read(list(read_rows(data)), data)[0].text == "1+1?;2;"


# Refused rows


@pytest.mark.parametrize("sft", [False, True])
@pytest.mark.parametrize(
    ("template", "number", "fields", "said"),
    [
        ("qwen3", 1, {"role": "human"}, "message 1 has the role 'human', which the chat template does not name"),
        ("llama3", 1, {"role": "human"}, "message 1 has the role 'human', which the chat template does not name"),
        ("qwen3", 1, {"role": "User"}, "message 1 has the role 'User'"),
        ("qwen3", 2, {"role": "gpt"}, "message 2 has the role 'gpt'"),
        ("qwen3", 0, {"role": "developer"}, 'leaves out the content "Be brief."'),
        ("deepseekv3", 0, {"role": "observation"}, 'leaves out the content "Be brief."'),
        (
            "qwen3",
            1,
            {"content": None},
            "message 1 (user) has content = null; allowed: a text, or a list of text parts",
        ),
        ("qwen3", 1, {"content": 123}, "message 1 (user) has content = 123"),
        ("glm4moe", 1, {"content": {"text": "1"}}, 'message 1 (user) has content = {"text": "1"}'),
        ("qwen3", 1, {"content": " \n"}, "message 1 (user) has an empty content"),
        ("qwen3", 2, {"content": []}, "message 2 (assistant) has an empty content"),
        ("qwen3", 2, {"content": "", "tool_calls": []}, "message 2 (assistant) has an empty content"),
        ("qwen3", 1, {"content": [{"type": "image_url"}]}, 'message 1 (user) has a part of type "image_url"'),
        ("qwen3", 1, {"content": [{"type": "audio"}]}, 'message 1 (user) has a part of type "audio"'),
        ("qwen3", 1, {"content": [{"type": "text"}]}, "message 1 (user) has a part without a text"),
        ("qwen3", 2, {"reasoning_content": 1}, "message 2 (assistant) has reasoning_content = 1; allowed: a text"),
        ("qwen3", 2, {"tool_calls": "add"}, 'message 2 (assistant) has tool_calls = "add"; allowed: a list of objects'),
        ("qwen3", 2, {"tool_calls": [{"id": "1"}]}, "message 2 (assistant) has a tool call without a name"),
        ("qwen3", 2, {"function_call": {"name": "add"}}, 'leaves out the tool call "add"'),
        ("llama3", 2, {"tool_calls": CALLS}, 'message 2 (assistant): the chat template leaves out the tool call "add"'),
        ("qwen3", 2, {"content": "b<think>c</think>d"}, 'leaves out the content "b"'),
    ],
)
def test_a_message_that_the_template_drops_is_refused(
    tmp_path: Path, sft: bool, template: str, number: int, fields: dict[str, Any], said: str
) -> None:
    turns = changed(TALK, number, **fields)
    assert said in refused(tmp_path, template, turns if sft else turns[:-1], sft=sft)


def test_a_mistyped_content_key_is_refused(tmp_path: Path) -> None:
    turns = [{"role": "user", "contents": "1+1?"}]
    assert refused(tmp_path, "qwen3", turns) == "input: message 0 (user) has no content, but role, contents"


def test_a_tools_result_that_is_an_object_is_refused_where_it_is_not_written_as_json(tmp_path: Path) -> None:
    turns = changed(TOOLS, 2, content={"sum": 2})[:-1]
    for template in ("qwen3", "qwen2_5"):  # the first writes nothing, the second {'sum': 2}
        said = refused(tmp_path, template, turns)
        assert said.startswith(
            'input: message 2 (tool): the chat template leaves out the content {"sum": 2}; give it as'
        )
    assert '{"sum": 2}' in read(tmp_path, "llama3_1", [turns])[0][0].text


def test_a_dropped_text_that_stands_elsewhere_too_is_refused(tmp_path: Path) -> None:
    for text in ("You", "Be brief.", "2"):
        turns = [{"role": "developer", "content": text}, *TALK[:-1]]
        assert "message 0 (developer)" in refused(tmp_path, "qwen3", turns)


def test_a_thought_of_the_trained_answer_is_refused_where_its_key_is_not_read(tmp_path: Path) -> None:
    turns = changed(TALK, 4, reasoning_content="larger")
    assert 'leaves out the reasoning_content "larger"' in refused(tmp_path, "qwen2_5", turns, sft=True)
    (row,), _ = read(tmp_path, "qwen3", [turns], sft=True)
    assert row.response.endswith("<think>\nlarger\n</think>\n\n4<|im_end|>\n")


@pytest.mark.parametrize(
    "line",
    [
        '{"input": "1", "input": "2"}',
        '{"input": [{"role": "user", "content": "1", "content": "2"}]}',
        '{"input": "\\u0022", "metadata": {"a": 1, "a": 2}}',
        '{"input": "\\u0022\\u0022", "in\\u0070ut": "2"}',
        '{"input": "1", "metadata": "{\\"a\\": 1, \\"a\\": 2}"}',
    ],
)
def test_a_key_twice_is_refused(tmp_path: Path, line: str) -> None:
    assert "is there twice in one object" in refused(tmp_path, "qwen3", line)


def test_a_quote_in_a_text_is_no_key_that_is_there_twice(tmp_path: Path) -> None:
    lines = ['{"input": "\\u0022a\\" \\\\", "metadata": "{\\"a\\": 1}"}', '{"input": "\\u00e4", "b": {"input": 1}}']
    prompts, _ = read(tmp_path, "qwen3", lines)
    assert [prompt.text.split("\n")[1].removesuffix("<|im_end|>") for prompt in prompts] == ['"a" \\', "ä"]


# Prompts that end with an answer


def test_a_prompt_that_ends_with_an_answer_is_refused_unless_the_response_continues_it(tmp_path: Path) -> None:
    turns = [TALK[1], {"role": "assistant", "content": "The sum is "}]
    said = (
        "input: message 1, the last one, is of the assistant; leave it out, or set continue_final_message = true for d"
    )
    assert refused(tmp_path, "qwen2_5", turns).startswith(said)
    opened = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    for template, start in (("qwen2_5", ""), ("qwen3", "<think>\n\n</think>\n\n")):
        (prompt, other), _ = read(tmp_path, template, [turns, turns[:1]], continue_final_message=True)
        assert prompt.text.endswith(f"{opened}{start}The sum is ")
        assert other.text.endswith(opened)


def test_a_tool_call_cannot_be_continued(tmp_path: Path) -> None:
    said = refused(tmp_path, "qwen3", TOOLS[:2], continue_final_message=True)
    assert "has tool calls, which no response can continue" in said


def test_transformers_own_argument_is_named() -> None:
    with pytest.raises(TopologyError, match=r"set data\.0\.continue_final_message = true instead"):
        load_topology(LAPTOP, ["data.0.apply_chat_template_kwargs.continue_final_message=true"])


# Empty thoughts


@pytest.mark.parametrize(
    ("template", "empty"),
    [
        ("qwen3", "<think>\n\n</think>\n\n"),
        ("qwen3_training", "<think>\n\n</think>\n\n"),
        ("glm4moe", "\n<think></think>"),
        ("glm4moe_training", "\n<think></think>"),
    ],
)
def test_an_empty_thought_trains_only_if_the_generation_prompt_does_not_give_it(
    tmp_path: Path, template: str, empty: str
) -> None:
    turns = TALK[:3]
    for options, is_given in (({}, False), ({"enable_thinking": True}, False), ({"enable_thinking": False}, True)):
        (text,) = trained(tmp_path, template, turns, **options)
        assert text.startswith(empty) != is_given
        (prompt,), _ = read(tmp_path, template, [turns[:-1]], apply_chat_template_kwargs=options)
        assert prompt.text.endswith(empty) == is_given
