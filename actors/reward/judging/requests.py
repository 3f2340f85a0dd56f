"""Requests to judges and their answers, in the format of OpenAI's chat completions. Pure."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from actors.reward.causes import Cause as ScoreCause
from actors.reward.causes import seconds_of
from actors.reward.samples import GradedSample
from messages.plain import clipped

PATH: Final = "/chat/completions"  # below the base URL
MAX_REASON: Final = 300
MAX_TOKENS: Final = 1 << 40  # that a response may report
_PLACEHOLDER: Final = re.compile(r"\{(prompt|response|label|metadata\.([A-Za-z0-9_-]+))\}")
_BUSY: Final = (408, 425, 500, 502, 503, 504, 529)

Cause = Literal["timeout", "unreachable", "rate_limited", "failed", "refused", "bad_answer"]
FAILED: Final[Cause] = "failed"  # may be due to load on the server
CAUSES_OF_SCORES: Final[Mapping[Cause, ScoreCause]] = {
    "timeout": "timeout",
    "unreachable": "worker_lost",
    "rate_limited": "rate_limited",
    "failed": "worker_lost",
    "refused": "refused",
    "bad_answer": "bad_answer",
}


class JudgeError(Exception):
    """A judge gave no answer."""

    def __init__(self, cause: Cause, reason: str, *, status: int = 0, wait_s: float = 0.0) -> None:
        """Describe a failed request.

        Args:
            cause: its kind.
            reason: for people; without the API key.
            status: of the HTTP response; 0: there was none.
            wait_s: seconds after which the server wants the next request.
        """
        super().__init__(f"{cause}: {reason}")
        self.cause: Cause = cause
        self.status = status
        self.wait_s = wait_s


class JudgeAnswer(NamedTuple):
    """The text of an answer, whether it reached its limit, the whole response, and its tokens."""

    text: str
    truncated: bool
    body: bytes
    num_tokens: int = 0  # of prompt and answer; 0: the server did not report them


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    total_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)] | None = None  # else it would refill the budget


class _Completion(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...]
    usage: _Usage | None = None


def render(template: str, sample: GradedSample) -> str:
    """Fill the placeholders of a template. Braces that name no placeholder stay as they are.

    Raises:
        ValueError: the sample has no value for a placeholder.
    """

    def value_of(match: re.Match[str]) -> str:
        name, key = match.group(1, 2)
        value = sample.metadata.get(key) if key is not None else getattr(sample, name)
        if value is None:
            raise ValueError(f"the sample has no {name}, which the template of the judge names")
        return value if isinstance(value, str) else msgspec.json.encode(value).decode()

    return _PLACEHOLDER.sub(value_of, template)


def request_of(prompt: str, temperature: float, max_tokens: int, more: Mapping[str, Any]) -> dict[str, Any]:
    """Build the body of a request with one user message, without the model's name."""
    limit = {} if "max_completion_tokens" in more else {"max_tokens": max_tokens}
    return {"messages": [{"role": "user", "content": prompt}], "temperature": temperature, **limit, **more}


def answer_in(body: bytes) -> JudgeAnswer:
    """Read the answer in a response.

    Raises:
        JudgeError: the response has no text.
    """
    try:
        completion = msgspec.json.decode(body, type=_Completion)
        choice = completion.choices[0]
    except (msgspec.MsgspecError, IndexError, UnicodeDecodeError) as error:
        shown = clipped(body.decode("utf-8", "replace"), MAX_REASON)
        raise JudgeError("bad_answer", f"no chat completion: {error} in {shown!r}") from error
    if choice.message.content is None:
        raise JudgeError("bad_answer", f"the answer has no text; it ended with {choice.finish_reason!r}")
    num_tokens = (completion.usage.total_tokens or 0) if completion.usage is not None else 0
    return JudgeAnswer(choice.message.content, choice.finish_reason == "length", body, num_tokens)


def error_of(status: int, body: bytes, retry_after: str | None) -> JudgeError:
    """Classify a response without success."""
    text = clipped(" ".join(body.decode("utf-8", "replace").split()), MAX_REASON)
    reason = f"status {status}{text and f': {text}'}"
    if status == 429:
        return JudgeError("rate_limited", reason, status=status, wait_s=seconds_of(retry_after or ""))
    if status in _BUSY:
        return JudgeError("failed", reason, status=status, wait_s=seconds_of(retry_after or ""))
    return JudgeError("refused", reason, status=status)
