"""The preference pairs of dpo.toml: reversals of two digits, each against another answer."""

import random

PROMPTS = [f"{number:02}" for number in range(100)]
HELD_OUT = PROMPTS[::5]  # in no pair before the last train step
TRAINED = [prompt for prompt in PROMPTS if prompt not in HELD_OUT]
STEPS, PAIRS = 60, 128  # train steps, and pairs in each


def pair(number):
    """Return a row: the prompt, the better response and the worse one. The same number gets the same row."""
    chance = random.Random(number)
    prompts = TRAINED if number < (STEPS - 1) * PAIRS else HELD_OUT
    prompt = prompts[number % len(prompts)]
    wrong = chance.choice([answer for answer in PROMPTS if answer != prompt[::-1]])
    return {"input": prompt, "chosen": prompt[::-1], "rejected": wrong}
