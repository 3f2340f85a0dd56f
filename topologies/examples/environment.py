"""The generate function of environment.toml: an environment that gives rewards itself, and a second conversation."""


async def play(conversation):
    """Reverse two digits; then a helper, who sees only this answer, reverses it again.

    Each conversation has a reward of its own, so there is no grader. The trainer gets both as parts of one sample.
    """
    answer = await conversation.generate(max_new_tokens=4)
    conversation.reward = agreement(answer, conversation.label)
    shown = "".join(letter for letter in answer if letter.isdigit())[:2] or "00"
    helper = conversation.open(f"<user>{shown}<assistant>")  # its context: nothing of the conversation before
    again = await helper.generate(max_new_tokens=4)
    helper.reward = agreement(again, shown[::-1])
    helper.sample_metadata["asked"] = shown  # filters and dumps see it


def agreement(answer, right):
    """Share of positions where both agree."""
    return sum(ours == theirs for ours, theirs in zip(answer, right, strict=False)) / max(len(answer), len(right), 1)
