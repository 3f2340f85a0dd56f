"""The filter of own-filter.toml. It runs in the filter actor and sees summaries of groups, not tokens: be quick."""


def has_contrast(group):
    """Keep a group if its samples differ in reward; otherwise all advantages are 0 and it teaches nothing.

    `group` has group_id, attempt, data, prompt_len and metadata, and one entry per sample in rewards, scores,
    response_lens, statuses, indices and sample_metadata. Return True or False, or (False, reason): the metrics count
    each reason.
    """
    if max(group.rewards) == min(group.rewards):
        return False, "no_contrast"
    return True
