"""A sample as graders see it. Grader processes import this module, so it does not import NumPy."""

from typing import Any

import msgspec


class GradedSample(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of reward functions; has the fields of messages.work.ScoreItem."""

    index: int = 0  # among the samples of its prompt group
    part: int = 0  # number among the fan-out siblings of one index
    prompt: str = ""  # rendered text
    response: str = ""
    status: str = "completed"  # or "truncated": it reached its token limit without an end of turn
    response_len: int = 0  # tokens
    label: Any = None  # unchanged from the data file
    metadata: dict[str, Any] = {}  # unchanged from the data file
    evaluation: bool = False  # whether this is a sample of an evaluation
    judge_answer: str = ""  # the text of the judge, for parsers alone
    judge_truncated: bool = False  # the judge's answer reached its token limit

    @property
    def truncated(self) -> bool:
        """Whether the response ended without an end of turn."""
        return self.status != "completed"
