"""What a grader sees of a sample. Light: grader processes import this and no numpy."""

from typing import Any

import msgspec


class GradedSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample as reward functions get it; the fields of messages.work.ScoreItem."""

    index: int = 0  # among the samples of its prompt group
    part: int = 0  # fan-out siblings of one index
    prompt: str = ""  # rendered text
    response: str = ""
    status: str = "completed"  # or "truncated": it ran into its token limit and has no end of turn
    response_len: int = 0  # tokens
    label: Any = None  # as it stands in the data file
    metadata: dict[str, Any] = {}  # as it stands in the data file

    @property
    def truncated(self) -> bool:
        """Whether the response ended without an end of turn."""
        return self.status != "completed"
