"""The reward of sums.toml."""

import re

NEAR = 5  # distance from the right number at which a wrong one has half of the half point


def reward(sample):
    """1 for the right number alone, 0 to 0.5 for another, by its distance, -0.5 if more follows a number, -1 for text.

    A model that was asked for "the number only" first answers in sentences. The negative rewards teach the form, and
    are large enough that an entropy bonus does not lead away from it. Line ends around a number are allowed. Then the
    model repeats a number of the question, which is 0. A nearer number is better at every distance, so that nearly all
    prompts have unequal rewards: equal ones teach nothing.
    """
    text = sample.response.strip()
    if not re.fullmatch(r"-?[0-9]+", text):
        return -0.5 if re.match(r"-?[0-9]", text) else -1.0
    if text == sample.label:
        return 1.0
    if text in re.findall(r"[0-9]+", sample.prompt):
        return 0.0
    return 0.5 / (1 + abs(int(text) - int(sample.label)) / NEAR)
