"""The grader of own-reward.toml. It runs in a sandboxed process of its own, so it may be slow, raise or crash."""


def reward(sample):
    """Half for the right length, half for the share of right digits.

    `sample` has prompt, response, label, metadata, status, truncated, response_len and index.
    """
    if sample.truncated:  # cut off at max_response_len: the model did not finish
        return {"score": 0.0, "right_digits": 0}
    right = sum(ours == theirs for ours, theirs in zip(sample.response, sample.label, strict=False))
    has_length = len(sample.response) == len(sample.label)
    return {"score": 0.5 * has_length + 0.5 * right / len(sample.label), "right_digits": right}
