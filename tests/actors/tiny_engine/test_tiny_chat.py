"""POST /v1/chat/completions of a real tiny engine: the model's chat template, OpenAI's answer, bad requests."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.tiny_engine.http.chat import ChatTemplate
from actors.tiny_engine.model.text import Text
from tests.support.distilling import STUDENT, write_teacher
from tests.support.tiny_engine import RunningEngine, post, running_engine

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "47"}]


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    directory = write_teacher(tmp_path_factory.mktemp("chat") / "m")
    with running_engine(directory) as engine:
        yield engine


def chat(engine: RunningEngine, **fields: Any) -> tuple[int, Any]:
    return post(f"{engine.url}{CHAT}", {"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": 5} | fields)


def test_the_answer_is_that_of_the_rendered_prompt(chatting: RunningEngine) -> None:
    status, answer = chat(chatting)
    assert status == 200
    text = Text.load(STUDENT)
    assert text is not None
    ids = text.encode("<user>47<assistant>", add_special_tokens=False)
    assert len(ids) == 4
    params = {"temperature": 0, "max_new_tokens": 5}
    generated = post(f"{chatting.url}/generate", {"input_ids": ids, "sampling_params": params})[1]
    choice = answer["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == generated["text"]
    assert choice["finish_reason"] == generated["meta_info"]["finish_reason"]["type"]
    number = generated["meta_info"]["completion_tokens"]
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": number, "total_tokens": 4 + number}
    assert answer["object"] == "chat.completion"


def test_without_a_limit_an_answer_may_fill_the_context(chatting: RunningEngine) -> None:
    _, answer = chat(chatting, max_tokens=None)
    usage = answer["usage"]
    assert answer["choices"][0]["finish_reason"] == "stop" or usage["total_tokens"] >= 60


def test_a_seed_repeats_an_answer(chatting: RunningEngine) -> None:
    first, second = (chat(chatting, temperature=1.0, seed=3, max_tokens=20)[1]["choices"][0] for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stream": True}, "not supported"),
        ({"n": 2}, "not supported"),
        ({"messages": "47"}, "Expected `array`"),
        ({"temperature": -1}, "`float` >= 0"),
        ({"messages": [{"role": "user", "content": "1" * 99}]}, "longer than the model's context length"),
        ({"messages": [{"role": "user"}]}, None),
    ],
)
def test_a_bad_request_is_refused(fields: dict[str, Any], words: str | None, chatting: RunningEngine) -> None:
    status, answer = chat(chatting, **fields)
    if words is None:  # an undefined value renders as nothing, as in transformers
        assert status == 200
    else:
        assert (status, words in answer["message"]) == (400, True), answer


def test_of_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    for names, expected in ((["tool_use", "default"], "of default"), (["tool_use"], None)):
        named = [{"name": name, "template": f"of {name}"} for name in names]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        template = ChatTemplate.load(tmp_path)
        assert (template and template.render([{"content": "a"}], {})) == expected


def test_a_template_comes_from_its_file_or_the_config_and_may_refuse(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<e>"}, "chat_template": "old"}')
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content | tojson }}{{ eos_token }}{% endfor %}{% if no %}"
        "{{ raise_exception('not so') }}{% endif %}"
    )
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render([{"content": "a<b"}], {}) == '"a<b"<e>'
    with pytest.raises(ValueError, match="refuses these messages: not so"):
        template.render([], {"no": True})
