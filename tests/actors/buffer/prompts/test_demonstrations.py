"""Conversations as token ids with a mask of the turns that train."""

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from actors.buffer.prompts.demonstrations import DemonstrationReader
from actors.buffer.prompts.prompts import LoadedData, fingerprint_of
from actors.buffer.prompts.source import load_data, load_prompts, steps_per_epoch
from actors.buffer.prompts.tokenizing import FastTokenizing, Tokenizing, TransformersTokenizing
from actors.buffer.prompts.turns import Piece, pieces_of
from messages import Prompt
from runtime.data.data_files import DataError
from runtime.settings.tables.prompts import DataConfig
from runtime.settings.tables.rollout import RolloutConfig
from tests.build.topology import topology_with

MODEL = (
    Path(__file__).resolve().parents[4] / "topologies/demo/models/reverse-digits"
)  # <pad> <end> <user> <assistant> ...
PAD, END, USER, ASSISTANT = range(4)  # <pad> <end> <user> <assistant> ...
TALK = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "23"},
    {"role": "user", "content": "4"},
    {"role": "assistant", "content": "5"},
]
# As several reasoning models do: what was thought is shown in the last turn alone.
FORGETS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and loop.last %}0{% endif %}{{ m.content }}"
    "{% if m.role == 'assistant' %}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizing() -> Tokenizing:
    return FastTokenizing(MODEL)


def model_with(tmp_path: Path, template: str) -> Path:
    directory = tmp_path / "model"
    shutil.copytree(MODEL, directory)
    (directory / "chat_template.jinja").write_text(template)
    return directory


def load(
    tmp_path: Path, tokenizing: Tokenizing, *rows: Any, settings: dict[str, Any] | None = None, **rollout: Any
) -> LoadedData:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"name": "d", "path": str(path), "input_key": "messages", "apply_chat_template": True, **(settings or {})}
    reader = DemonstrationReader(
        tokenizing, RolloutConfig(**{"rollout_batch_size": 1, "max_response_len": 99, **rollout})
    )
    return load_data(DataConfig(**config), reader)


def error(tmp_path: Path, tokenizing: Tokenizing, *rows: Any, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(tmp_path, tokenizing, *rows, settings=settings)
    return str(caught.value).removeprefix(f"{tmp_path}/rows.jsonl")


def columns(prompt: Prompt) -> tuple[list[int], list[int], list[int]]:
    assert prompt.response_ids is not None
    assert prompt.loss_mask is not None
    return prompt.prompt_ids.tolist(), prompt.response_ids.tolist(), prompt.loss_mask.tolist()


def test_turns_of_the_assistant_train_with_their_end(tmp_path: Path, tokenizing: Tokenizing) -> None:
    (prompt,) = load(tmp_path, tokenizing, {"messages": TALK}).prompts
    assert columns(prompt) == (
        [USER, 7, ASSISTANT],
        [8, 9, END, USER, 10, ASSISTANT, 11, END],
        [1, 1, 1, 0, 0, 0, 1, 1],
    )
    assert (prompt.text, prompt.response) == ("<user>1<assistant>", "23<end><user>4<assistant>5<end>")
    assert prompt.rm_type is None


@pytest.mark.parametrize("key", ["step_loss_mask", "weight"])
def test_a_turn_may_be_left_untrained(tmp_path: Path, tokenizing: Tokenizing, key: str) -> None:
    turns = [TALK[0], {**TALK[1], key: 0}, TALK[2], {**TALK[3], key: 1}]
    (prompt,) = load(tmp_path, tokenizing, {"messages": turns}).prompts
    assert columns(prompt) == ([USER, 7, ASSISTANT, 8, 9, END, USER, 10, ASSISTANT], [11, END], [1, 1])


def test_what_follows_the_last_turn_that_trains_is_part_of_the_response(tmp_path: Path, tokenizing: Tokenizing) -> None:
    (prompt,) = load(tmp_path, tokenizing, {"messages": TALK[:3]}).prompts
    assert columns(prompt) == ([USER, 7, ASSISTANT], [8, 9, END, USER, 10], [1, 1, 1, 0, 0])


def test_a_text_and_its_label_are_two_turns_or_laid_end_to_end(tmp_path: Path, tokenizing: Tokenizing) -> None:
    row, names = {"question": "12", "answer": "34"}, {"input_key": "question", "label_key": "answer"}
    (chat,) = load(tmp_path, tokenizing, row, settings=names).prompts
    assert columns(chat) == ([USER, 7, 8, ASSISTANT], [9, 10, END], [1, 1, 1])
    (plain,) = load(tmp_path, tokenizing, row, settings={**names, "apply_chat_template": False}).prompts
    assert columns(plain) == ([7, 8], [9, 10], [1, 1])


PAIR: dict[str, Any] = {"input_key": "q", "chosen_key": "good", "rejected_key": "bad"}


def responses(prompt: Prompt) -> tuple[list[int], list[int], list[int]]:
    given, chosen, _ = columns(prompt)
    assert prompt.rejected is not None
    assert prompt.rejected.loss_mask.tolist() == [1] * len(prompt.rejected.response_ids)
    return given, chosen, prompt.rejected.response_ids.tolist()


@pytest.mark.parametrize(
    "row",
    [
        {"q": "12", "good": "34", "bad": "5"},
        {"q": [{"role": "user", "content": "12"}], "good": "34", "bad": "5"},
        {
            "q": "12",
            "good": [{"role": "assistant", "content": "34"}],
            "bad": [{"role": "assistant", "content": "5"}],
        },
        {
            "good": [{"role": "user", "content": "12"}, {"role": "assistant", "content": "34"}],
            "bad": [{"role": "user", "content": "12"}, {"role": "assistant", "content": "5"}],
        },
    ],
    ids=["texts", "a conversation and texts", "messages", "whole conversations"],
)
def test_a_preference_pair_has_two_responses_to_one_prompt(
    tmp_path: Path, tokenizing: Tokenizing, row: dict[str, Any]
) -> None:
    (prompt,) = load(tmp_path, tokenizing, row, settings=PAIR).prompts
    assert responses(prompt) == ([USER, 7, 8, ASSISTANT], [9, 10, END], [11, END])
    assert prompt.response == "34<end>"


def test_earlier_turns_of_the_assistant_belong_to_the_prompt_of_a_pair(tmp_path: Path, tokenizing: Tokenizing) -> None:
    (prompt,) = load(tmp_path, tokenizing, {"q": TALK[:3], "good": "5", "bad": "4"}, settings=PAIR).prompts
    given, chosen, rejected = responses(prompt)
    assert (given[3:], chosen, rejected) == ([8, 9, END, USER, 10, ASSISTANT], [11, END], [10, END])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"q": "1", "good": "2", "bad": "2"}, ":1: the chosen and the rejected response are the same"),
        ({"q": "1", "good": "2"}, ":1: no column 'bad' (rejected_key); there are: q, good"),
        ({"q": "1", "good": "", "bad": "2"}, ":1: good is empty"),
        ({"q": "1", "good": 3, "bad": "2"}, ":1: good = 3: expected a string or a list of chat messages"),
        ({"good": "3", "bad": "2"}, ":1: good is a text, so the row needs the column 'q'"),
        (
            {
                "good": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "3"}],
                "bad": [{"role": "user", "content": "2"}, {"role": "assistant", "content": "4"}],
            },
            ":1: the chosen and the rejected response follow different prompts",
        ),
    ],
)
def test_a_row_that_is_no_preference_pair_is_refused(
    tmp_path: Path, tokenizing: Tokenizing, row: dict[str, Any], said: str
) -> None:
    assert error(tmp_path, tokenizing, row, **PAIR) == said


def test_a_pair_with_a_long_rejected_response_is_left_out(tmp_path: Path, tokenizing: Tokenizing) -> None:
    rows = {"q": "1", "good": "2", "bad": "34567"}, {"q": "1", "good": "2", "bad": "3"}
    loaded = load(tmp_path, tokenizing, *rows, settings=PAIR, max_response_len=4)
    assert (len(loaded.prompts), loaded.num_too_long) == (1, 1)
    both = load(tmp_path, tokenizing, *rows, settings=PAIR)
    assert fingerprint_of(both.prompts[:1]) != fingerprint_of(both.prompts[1:])


def test_the_first_token_of_all_is_never_trained(tmp_path: Path) -> None:
    tokenizing = FastTokenizing(model_with(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}"))
    (prompt,) = load(tmp_path, tokenizing, {"messages": [{"role": "assistant", "content": "123"}]}).prompts
    assert columns(prompt) == ([7], [8, 9], [1, 1])


def test_our_masks_are_those_of_transformers(tmp_path: Path) -> None:
    """Its own way to them is marks in the template around what the assistant says."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<end>"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    directory = model_with(tmp_path, template)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    theirs = tokenizer.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    for tokenizing in (FastTokenizing(directory), TransformersTokenizing(tokenizer)):
        (prompt,) = load(tmp_path, tokenizing, {"messages": TALK}).prompts
        given, response, mask = columns(prompt)
        assert given + response == theirs["input_ids"]
        assert [0] * len(given) + mask == theirs["assistant_masks"]


def test_a_template_that_changes_earlier_turns_trains_what_it_renders(tmp_path: Path) -> None:
    tokenizing = FastTokenizing(model_with(tmp_path, FORGETS))
    assert pieces_of(TALK, tokenizing) == [
        Piece("<user>1<assistant>", False),
        Piece("23<end>", True),
        Piece("<user>4<assistant>", False),
        Piece("05<end>", True),
    ]
    turns = [TALK[0], {**TALK[1], "step_loss_mask": 0}, *TALK[2:]]
    assert pieces_of(turns, tokenizing) == [
        Piece("<user>1<assistant>23<end><user>4<assistant>", False),
        Piece("05<end>", True),
    ]


def test_a_turn_that_cannot_be_found_is_refused_with_the_line(tmp_path: Path) -> None:
    ends = FORGETS.replace("<end>", "{% if loop.last %}<end>{% else %}<pad>{% endif %}")
    tokenizing = FastTokenizing(model_with(tmp_path, ends))
    said = error(tmp_path, tokenizing, {"messages": TALK[:2]}, {"messages": TALK})
    assert said.startswith(
        ":2: message 1 of 4 (from 0) cannot be found in the rendered conversation: it ends differently"
    )
    assert '"step_loss_mask": 0' in said


def test_tools_and_arguments_reach_the_template(tmp_path: Path) -> None:
    template = (
        "{% if tools %}{{ tools | length }}{% endif %}{{ extra }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizing = FastTokenizing(model_with(tmp_path, template))
    arguments = {"extra": "9", "add_generation_prompt": True}
    row = {"messages": TALK[:2], "tools": [{"name": "add"}]}
    (prompt,) = load(tmp_path, tokenizing, row, settings={"apply_chat_template_kwargs": arguments}).prompts
    assert (prompt.text, prompt.response) == ("19<user>1<assistant>", "23")


def test_demonstrations_over_a_limit_are_left_out_and_counted(tmp_path: Path, tokenizing: Tokenizing) -> None:
    rows = [{"messages": [TALK[0], {"role": "assistant", "content": "1" * n}]} for n in (1, 4, 5)]
    rows.append({"messages": [{"role": "user", "content": "1234"}, TALK[1]]})
    for limits, kept in (
        ({"max_response_len": 5}, [0, 1, 3]),
        ({"max_prompt_len": 3}, [0, 1, 2]),
        ({"max_context_len": 8}, [0, 1]),
    ):
        loaded = load(tmp_path, tokenizing, *rows, **limits)
        assert [prompt.row for prompt in loaded.prompts] == kept
        assert loaded.num_too_long == 4 - len(kept)
    with pytest.raises(DataError, match=r"in the shortest one the response has 2 tokens, over the limit of 1 tokens"):
        load(tmp_path, tokenizing, *rows, max_response_len=1)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": TALK[:1]}, ":1: none of its 1 messages is one of the assistant to train on"),
        (
            {"messages": [TALK[0], {**TALK[1], "weight": 0}]},
            ":1: none of its 2 messages is one of the assistant to train on",
        ),
        ({"messages": [TALK[0], {**TALK[1], "weight": 0.5}]}, ":1: message 1 has weight = 0.5; allowed: 0 and 1"),
        (
            {"messages": "12"},
            ":1: no response to train on: set data.label_key to a column with the response text, or let messages",
        ),
        ({"messages": [TALK[0], {"role": "assistant", "content": "x"}]}, ":1: cannot be tokenised: "),
    ],
)
def test_rows_that_demonstrate_nothing_are_named(
    tmp_path: Path, tokenizing: Tokenizing, row: dict[str, Any], said: str
) -> None:
    assert error(tmp_path, tokenizing, row).startswith(said)


def test_the_fingerprint_changes_with_the_mask(tmp_path: Path, tokenizing: Tokenizing) -> None:
    turns = [*TALK[:3], {**TALK[3], "weight": 0}]
    loaded = [load(tmp_path, tokenizing, {"messages": talk}).prompts for talk in (TALK, turns)]
    assert loaded[0][0].response == loaded[1][0].response
    assert fingerprint_of(loaded[0]) != fingerprint_of(loaded[1])


def test_a_recipe_with_the_loss_of_sft_reads_demonstrations(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps({"messages": TALK}) + "\n") * 3)
    topology = topology_with(
        model={"hf_checkpoint": str(MODEL)},
        data=[{"name": "d", "path": str(path), "input_key": "messages", "apply_chat_template": True}],
        algorithm={"loss": {"type": "sft"}},
    )
    assert columns(load_prompts(topology).prompt(0))[2] == [1, 1, 1, 0, 0, 0, 1, 1]
    assert steps_per_epoch(topology) == 1


def test_a_function_may_make_demonstrations(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        'def talk(number):\n    return {"input": str(number), "label": str(number + 1)}\n'
    )
    topology = topology_with(
        model={"hf_checkpoint": str(MODEL)},
        data=[{"name": "d", "source": f"{tmp_path}/mine.py:talk", "label_key": "label", "apply_chat_template": True}],
        algorithm={"loss": {"type": "sft"}},
    )
    with closing(load_prompts(topology)) as prompts:
        made = prompts.prompt(8)
    assert columns(made) == ([USER, 14, ASSISTANT], [15, END], [1, 1])
