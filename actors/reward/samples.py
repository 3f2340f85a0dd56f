"""A sample as graders see it. Grader processes import this module, so it does not import NumPy."""

from array import array
from typing import Any, Literal, TypeVar

import msgspec


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of the model: the tokens [start, end) of the response, and their text."""

    start: int
    end: int
    text: str = ""


class GradedSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The argument of reward functions; has the fields of messages.work.ScoreItem."""

    index: int = 0  # among the samples of its prompt group
    part: int = 0  # number among the fan-out siblings of one index
    prompt: str = ""  # rendered text
    response: str = ""
    status: str = "completed"  # or "truncated": it reached its token limit without an end of turn
    response_len: int = 0  # tokens
    label: Any = None  # unchanged from the data file
    metadata: dict[str, Any] = {}  # unchanged from the data file
    sample_metadata: dict[str, Any] = {}  # of this sample alone, set by a generate function
    evaluation: bool = False  # whether this is a sample of an evaluation
    packed_prompt_ids: bytes | None = None  # `prompt_ids` and `tokens` as int32, `log_probs` as float32, little-endian
    packed_tokens: bytes | None = None
    packed_log_probs: bytes | None = None
    turn_spans: tuple[Turn, ...] | None = None  # `turns`
    per: Literal["sample", "turn", "token"] = "sample"  # what a list of rewards is for
    judge_answer: str = ""  # the text of the judge, for parsers alone
    judge_truncated: bool = False  # the judge's answer reached its token limit

    @property
    def truncated(self) -> bool:
        """Whether the response ended without an end of turn."""
        return self.status != "completed"

    @property
    def prompt_ids(self) -> "array[int]":
        """Token ids of the prompt.

        Raises:
            ValueError: `reward.sample_fields` does not name them.
        """
        return array("i", _asked("prompt_ids", self.packed_prompt_ids))

    @property
    def tokens(self) -> "array[int]":
        """Token ids of the response, those between turns included.

        Raises:
            ValueError: `reward.sample_fields` does not name them.
        """
        return array("i", _asked("tokens", self.packed_tokens))

    @property
    def log_probs(self) -> "array[float]":
        """Log-probs of the policy that sampled, one per token; 0 for tokens between turns.

        Raises:
            ValueError: `reward.sample_fields` does not name them.
        """
        return array("f", _asked("log_probs", self.packed_log_probs))

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of the model, in order.

        Raises:
            ValueError: `reward.sample_fields` does not name them.
        """
        return _asked("turns", self.turn_spans)


_T = TypeVar("_T")


def _asked(name: str, value: _T | None) -> _T:
    if value is None:
        where = f'In a run, add "{name}" to reward.sample_fields; in bin/try, samples of a dump have them'
        raise ValueError(f"sample.{name}: the sample comes without them. {where}")
    return value
