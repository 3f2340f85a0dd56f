"""The reward of sums.toml."""

import re

NEAR = 10  # distance from the right number beyond which a wrong one is as good as any other


def reward(sample):
    """1 for the right number alone, 0.2 to 0.5 for another, by its distance, 0.1 for text that begins with a number.

    A model that was asked for "the number only" first answers in sentences. The smaller rewards teach the form, then to
    come near. With 0 for all but the exact answer, nearly all prompts would have equal rewards, which teach nothing.
    """
    text = sample.response.strip()
    if not re.fullmatch(r"-?[0-9]+", text):
        return 0.1 if re.match(r"-?[0-9]", text) else 0.0
    distance = abs(int(text) - int(sample.label))
    return 1.0 if text == sample.label else 0.2 + 0.3 * max(0.0, 1 - distance / NEAR)
