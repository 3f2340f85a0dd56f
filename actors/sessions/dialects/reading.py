"""What all dialects share: how a body is decoded, which values are refused by name, and what a dialect has to write.

No text of a request is changed: white space, the form of arguments, and the order of messages stay. A field that
changes no token, such as `metadata`, is ignored. A field that asks for other tokens than those that are sampled is
refused by its name.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Final, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from runtime.sessions.turns import ChatMessage, ToolCall, TurnAnswer, TurnRefused, TurnRequest

MAX_STOPS: Final = 16
MAX_SAMPLES: Final = 16  # answers to one request
SHOWN_CHARS: Final = 60  # of a refused value
Neutral = Mapping[str, tuple[Any, ...]]  # fields that change what is sampled, and their values that do not
BILLING: Final = "x-anthropic-billing-header:"  # begins a system block of Claude Code that changes with each version

Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, lt=2**31)]
Count = Annotated[int, Meta(ge=1, lt=2**31)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Stop = Annotated[str, Meta(min_length=1, max_length=1000)]
Stops = Annotated[list[Stop], Meta(max_length=MAX_STOPS)]
T = TypeVar("T")

# A pair of surrogates, one alone (group 1), or another escape. JavaScript writes one alone where it cut a text.
_ESCAPE: Final = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
_PATH: Final = re.compile(r" - at `\$\.?(.*)`$")


class ParameterRefused(TurnRefused):
    """A field of a request is not served or has a wrong value.

    Args:
        param: path of the field, such as `messages[3].content`; empty: the whole body.
        reason: for the client's user.
    """

    def __init__(self, param: str, reason: str) -> None:
        super().__init__("parameter", f"{param}: {reason}" if param else reason)
        self.param = param


class Asked(NamedTuple):
    """A request as it was read.

    Args:
        request: for the session.
        stream: whether the client wants events.
        num_samples: answers that it wants.
        with_usage: whether its stream ends with a count of tokens, in the dialect that has a field for it.
        dropped_tools: names of tools that the server of the client's vendor would run; the model is not offered them.
    """

    request: TurnRequest
    stream: bool = False
    num_samples: int = 1
    with_usage: bool = False
    dropped_tools: tuple[str, ...] = ()


class Turn(NamedTuple):
    """What an answer is written from.

    Args:
        id: of the turn, letters and digits.
        created: Unix time in whole seconds.
        answers: one for each sample.
    """

    id: str
    created: int
    answers: tuple[TurnAnswer, ...] = ()


class Problem(NamedTuple):
    """An answer without a turn.

    Args:
        status: of HTTP.
        reason: for the client's user.
        param: the field that is at fault.
        is_full: the prompt does not fit into the context.
        num_tokens: of that prompt.
        max_tokens: room of the context.
        retry: whether the client should send the request again.
    """

    status: int
    reason: str
    param: str = ""
    is_full: bool = False
    num_tokens: int = 0
    max_tokens: int = 0
    retry: bool = False

    @classmethod
    def of(cls, refused: TurnRefused) -> "Problem":
        """Return what a refusal becomes."""
        param = refused.param if isinstance(refused, ParameterRefused) else ""
        is_full = refused.kind == "context_full"
        return cls(STATUS[refused.kind], refused.reason, param, is_full, refused.num_tokens, refused.max_tokens)


STATUS: Final[Mapping[str, int]] = {
    "unknown_key": 401,
    "forbidden": 403,
    "ended": 410,
    "context_full": 400,
    "parameter": 400,
    "failed": 410,
}


class Dialect(Protocol):
    """The form of requests and answers of one API."""

    def read(self, body: bytes) -> Asked:
        """Read a request.

        Raises:
            TurnRefused: it cannot be served; the reason names the field.
        """
        ...

    def answer(self, asked: Asked, turn: Turn) -> bytes:
        """Return the body of an answer."""
        ...

    def opening(self, asked: Asked, turn: Turn) -> bytes:
        """Return the events that begin a stream before the turn is sampled."""
        ...

    def hold(self, asked: Asked, turn: Turn) -> bytes:
        """Return what keeps an open stream from a time-out of its client, and changes nothing for it."""
        ...

    def events(self, asked: Asked, turn: Turn) -> Iterator[bytes]:
        """Return the events of an answer after those of the opening."""
        ...

    def problem(self, problem: Problem) -> bytes:
        """Return the body of an error."""
        ...

    def problem_event(self, problem: Problem) -> bytes:
        """Return the event that ends a stream with an error."""
        ...


@cache
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decode(body: bytes, kind: type[T]) -> T:
    """Decode a body.

    Raises:
        ParameterRefused: it is not JSON, or a field has a wrong type or value.
    """
    try:
        return _decoded(body, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _PATH.search(text)
        raise ParameterRefused(found[1] if found else "", _PATH.sub("", text)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ParameterRefused("", f"the body is not JSON in UTF-8: {error}") from None
    except RecursionError:
        raise ParameterRefused("", "the body is nested too deep") from None


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return _decoder(kind).decode(body)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        mended = _ESCAPE.sub(lambda found: b"\\ufffd" if found[1] else found[0], body)
        if mended == body:
            raise
        return _decoder(kind).decode(mended)


def refuse_others(body: Struct, neutral: Neutral) -> None:
    """Refuse fields whose value is none of those that change nothing.

    Raises:
        ParameterRefused: names the field, its value and what is allowed.
    """
    for name, allowed in neutral.items():
        value = getattr(body, name)
        if value is not None and value not in allowed:
            others = "".join(f" or send {shown(one)}" for one in allowed)
            raise ParameterRefused(
                name, f"{shown(value)} is not served, as it changes what is sampled; leave it out{others}"
            )


def shown(value: object) -> str:
    """Return how an error names a value."""
    try:
        text = msgspec.json.encode(value).decode()
    except RecursionError:
        text = "a value that is nested too deep"
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"


class Part(Struct):
    """A part of a content."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None


Content = str | list[Part] | None
TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text"})


def text_of(content: Content, where: str, joint: str = "\n") -> str:
    """Return the text of a content; a joint stands between its parts.

    Raises:
        ParameterRefused: a part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    for index, part in enumerate(content):
        if part.type not in TEXT_PARTS:
            raise ParameterRefused(
                f"{where}[{index}]", f"a part of type {shown(part.type)} is not served; text alone is"
            )
    return joint.join(part.text or part.refusal or "" for part in content)


def raw_text(value: Raw) -> str:
    """Return JSON that a client sent, unchanged; of a JSON string, what it holds."""
    given = bytes(value)
    return msgspec.json.decode(given, type=str) if given[:1] == b'"' else given.decode()


def top_k_of(value: int | None) -> int | None:
    """Return a number of likeliest tokens; 0 and -1 stand for all of them, as in other servers."""
    return value if value is not None and value > 0 else None


def not_empty(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Return the messages of a request.

    Raises:
        ParameterRefused: there are none.
    """
    if not messages:
        raise ParameterRefused("messages", "at least one is needed")
    return tuple(messages)


def object_of(call: ToolCall) -> Raw:
    """Return the arguments of a call as a JSON object, with the model's own white space and order."""
    try:
        is_object = isinstance(msgspec.json.decode(call.arguments), dict)
    except (msgspec.DecodeError, RecursionError):
        is_object = False
    return Raw(call.arguments.encode()) if is_object else Raw(msgspec.json.encode({"arguments": call.arguments}))


def event(content: Mapping[str, Any], name: str = "") -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(content) + b"\n\n"
