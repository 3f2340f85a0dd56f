"""Which text trains under the chat templates of well-known models, and that it is what others train.

tests/data/chat_templates has the templates as models ship them, and TRL's versions that mark the output. All are from
trl 1.16.0 (Apache-2.0). The tokenizer is tiny: one token per byte.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actors.buffer.prompts.tokenizing import FastTokenizing
from actors.buffer.prompts.turns import pieces_of

TEMPLATES = Path(__file__).resolve().parents[3] / "data" / "chat_templates"
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]
THINKS: list[dict[str, Any]] = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>\nsmall\n</think>\n\n2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>\nlarger\n</think>\n\n4"},
]
TOOLS: list[dict[str, Any]] = [
    {"role": "user", "content": "1+1?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]


def tokenizer_of(directory: Path, template: str) -> Any:
    """Write a model directory with a byte tokenizer and a template; return it as transformers' tokenizer."""
    vocabulary = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(["<bos>", "<eos>"])
    plain.save(str(directory / "tokenizer.json"))
    text = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    (directory / "chat_template.jinja").write_text(text, encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = text
    return fast


def trained(directory: Path, template: str, turns: list[dict[str, Any]], **options: Any) -> list[str]:
    tokenizer_of(directory, template)
    return [piece.text for piece in pieces_of(turns, FastTokenizing(directory), **options) if piece.trains]


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
TRAINED_TEXTS = {
    ("qwen2_5", "talk"): ["2<|im_end|>\n", "4<|im_end|>\n"],
    ("qwen2_5", "thinks"): [
        "<think>\nsmall\n</think>\n\n2<|im_end|>\n",
        "<think>\nlarger\n</think>\n\n4<|im_end|>\n",
    ],
    ("qwen2_5", "tools"): [CALL, "It is 2.<|im_end|>\n", "Yes.<|im_end|>\n"],
    # The thoughts of earlier turns are dropped, and the last turn always has some.
    ("qwen3", "talk"): ["2<|im_end|>\n", "<think>\n\n</think>\n\n4<|im_end|>\n"],
    ("qwen3", "thinks"): ["2<|im_end|>\n", "<think>\nlarger\n</think>\n\n4<|im_end|>\n"],
    ("qwen3", "tools"): [CALL, "It is 2.<|im_end|>\n", "<think>\n\n</think>\n\nYes.<|im_end|>\n"],
    ("llama3_1", "talk"): ["2<|eot_id|>", "4<|eot_id|>"],
    ("llama3_1", "thinks"): ["<think>\nsmall\n</think>\n\n2<|eot_id|>", "<think>\nlarger\n</think>\n\n4<|eot_id|>"],
    ("llama3_1", "tools"): [
        '{"name": "add", "parameters": {"a": 1}}<|eot_id|>',
        "It is 2.<|eot_id|>",
        "Yes.<|eot_id|>",
    ],
    # A turn ends with the role of the next one, which does not train.
    ("glm4moe", "talk"): ["\n<think></think>\n2", "\n<think></think>\n4"],
    ("glm4moe", "thinks"): ["\n<think></think>\n2", "\n<think>larger</think>\n4"],
    # What it opens in generation, <think>, it does not render: no thought trains.
    ("deepseekv3", "talk"): ["2<｜end▁of▁sentence｜>", "4<｜end▁of▁sentence｜>"],
    ("deepseekv3", "thinks"): ["\n\n2<｜end▁of▁sentence｜>", "\n\n4<｜end▁of▁sentence｜>"],
}
CONVERSATIONS = {"talk": TALK, "thinks": THINKS, "tools": TOOLS}


@pytest.mark.parametrize(("template", "conversation"), TRAINED_TEXTS)
def test_what_trains(tmp_path: Path, template: str, conversation: str) -> None:
    texts = TRAINED_TEXTS[template, conversation]
    assert trained(tmp_path, template, CONVERSATIONS[conversation]) == texts
    whole = FastTokenizing(tmp_path).render(CONVERSATIONS[conversation], add_generation_prompt=False)
    assert "".join(piece.text for piece in pieces_of(CONVERSATIONS[conversation], FastTokenizing(tmp_path))) == whole


MARKED_TEMPLATES = ("qwen2_5_training", "qwen3_training", "llama3_training", "glm4moe_training", "deepseekv3_training")


@pytest.mark.parametrize(
    ("template", "conversation"),
    [
        (template, conversation)
        for template in MARKED_TEMPLATES
        for conversation in CONVERSATIONS
        if (template, conversation) != ("llama3_training", "tools")  # Llama 3 knows no tools
    ],
)
def test_marks_of_a_template_are_the_masks_of_transformers(tmp_path: Path, template: str, conversation: str) -> None:
    turns = CONVERSATIONS[conversation]
    theirs = tokenizer_of(tmp_path, template).apply_chat_template(
        turns, return_dict=True, return_assistant_tokens_mask=True
    )
    ours = FastTokenizing(tmp_path)
    pieces = pieces_of(turns, ours)
    ids = ours.encode([piece.text for piece in pieces])
    assert [token for own in ids for token in own.tolist()] == theirs["input_ids"]
    masks = [int(piece.trains) for piece, own in zip(pieces, ids, strict=True) for _ in own.tolist()]
    assert masks == theirs["assistant_masks"]


@pytest.mark.parametrize(("plain", "marked"), [("qwen2_5", "qwen2_5_training"), ("llama3", "llama3_training")])
def test_our_search_finds_what_trl_marks(tmp_path: Path, plain: str, marked: str) -> None:
    for turns in (TALK, THINKS):
        theirs = [
            text.removeprefix("\n") for text in trained(tmp_path, marked, turns)
        ]  # they mark the header's end too
        assert trained(tmp_path, plain, turns) == theirs


def test_a_masked_turn_does_not_train_under_marks_either(tmp_path: Path) -> None:
    turns = [*TALK[:2], {**TALK[2], "step_loss_mask": 0}, *TALK[3:]]
    assert trained(tmp_path, "qwen2_5_training", turns) == ["\n4<|im_end|>\n"]
    assert trained(tmp_path, "qwen3", turns) == ["<think>\n\n</think>\n\n4<|im_end|>\n"]


ENDS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if loop.last and m.role == 'assistant' %}!{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "turns", "problem"),
    [
        (
            ENDS.replace("m.content", "m.content | upper"),
            TALK[1:],
            "message 1 of 4 .* it ends differently when more messages follow",
        ),
        (
            ENDS.replace("m.content", "m.content | length"),
            TALK[1:],
            "message 1 of 4 .* the template changes its text",
        ),
        (
            "{% for m in messages if m.role == 'user' %}{% generation %}x{% endgeneration %}{% endfor %}",
            TALK[:-1],
            "marks 2 outputs with {% generation %}, but 1 messages",
        ),
    ],
)
def test_a_turn_that_cannot_be_found_is_refused(
    tmp_path: Path, template: str, turns: list[dict[str, Any]], problem: str
) -> None:
    tokenizer_of(tmp_path, "qwen2_5")
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=problem):
        pieces_of(turns, FastTokenizing(tmp_path))


def test_characters_of_the_marks_in_a_message_are_refused(tmp_path: Path) -> None:
    for template, character in (("qwen2_5_training", "\ue000"), ("qwen3", chr(0xE010 + 2))):
        turns = [THINKS[0], {"role": "assistant", "content": f"2{character}"}, *THINKS[2:]]
        with pytest.raises(ValueError, match=r"U\+E000|private use"):
            trained(tmp_path, template, turns)
