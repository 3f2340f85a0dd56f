"""Signs of garbled output: usual texts have none, and each kind of garbled text has its own."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.samples.garbled import BYTES, REPETITION, SCRIPT, signs_of

WORDS = (
    "we first compute the sum of both numbers and then divide it by their product because that is what the question "
    "asks so the value must be between zero and one which we check at the end by putting it back into the equation"
).split()


def prose(num_words: int) -> str:
    draw = random.Random(1)
    return " ".join(draw.choice(WORDS) for _ in range(num_words))


@pytest.mark.parametrize(
    ("text", "prompt", "signs"),
    [
        (prose(600), "x", ()),
        ("".join(f"{row} | {row * row} | {row * 37 % 101}\n" for row in range(200)), "x", ()),
        (prose(600) + "the answer is 4. " * 200, "x", (REPETITION,)),
        ("0" * 2000, "x", (REPETITION,)),
        ("0" * 200, "x", ()),  # too short to say
        ("the area is π·r², about 3,14 cm — or so", "x", ()),
        ("ответ: 4", "сколько будет 2 + 2?", ()),
        ("答えは4です", "2 + 2 は何ですか", ()),
        ("答案是四，因为二加二", "2 + 2 は何ですか", ()),  # Han characters are in both
        ("the answer 因为 ответ is", "what is it?", (SCRIPT,)),
        (prose(600) + " 因", "what is it?", ()),  # a name, or a slip
        ("a\ufffdb\ufffdc\ufffd", "x", (BYTES,)),
        ("", "", ()),
    ],
)
def test_signs_of_a_text(text: str, prompt: str, signs: tuple[str, ...]) -> None:
    assert signs_of(text, prompt) == signs


@given(st.text(max_size=300), st.text(max_size=30))
def test_a_response_in_the_script_of_its_prompt_has_no_other_script(text: str, prompt: str) -> None:
    assert SCRIPT not in signs_of(text, text + prompt)
