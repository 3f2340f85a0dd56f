"""The reward of sums.toml."""

import re


def reward(sample):
    """1 for the right number alone, 0.3 for another number alone, 0.1 for text that begins with a number.

    A model that was asked for "the number only" first answers in sentences. The smaller rewards teach the form; with 0
    for all but the exact answer, nearly all prompts would have equal rewards, which teach nothing.
    """
    text = sample.response.strip()
    if re.fullmatch(r"-?[0-9]+", text):
        return 1.0 if text == sample.label else 0.3
    return 0.1 if re.match(r"-?[0-9]", text) else 0.0
