"""The preference pairs of dpo.toml and rm.toml: reversals of two digits, each against another answer."""

import random

PROMPTS = [f"{number:02}" for number in range(100)]
TRAINED = [prompt for prompt in PROMPTS if int(prompt) % 5]  # data/held-out-pairs.jsonl has the others


def pair(number):
    """Return a row: the prompt, the better response and the worse one. The same number gets the same row."""
    chance = random.Random(number)
    prompt = TRAINED[number % len(TRAINED)]
    wrong = chance.choice([answer for answer in PROMPTS if answer != prompt[::-1]])
    return {"input": prompt, "chosen": prompt[::-1], "rejected": wrong}
