"""A turn of an agent's session, asked by the listener for agents and answered by the rollout actor.

The listener reads and writes the dialects of clients (OpenAI chat and responses, Anthropic messages); the rollout actor
keeps the tree of messages and the tokens. Only these structs go between them.
"""

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

Role = Literal["system", "developer", "user", "assistant", "tool"]
Finish = Literal["stop", "tool_calls", "length"]
RefusalKind = Literal[
    "unknown_key",  # no session of this run has the key
    "forbidden",  # the key is known and may not do this, such as a model key that sets a reward
    "ended",  # the session has ended
    "context_full",  # the prompt alone does not fit into the model's context
    "parameter",  # a field of the request that is not served, or has a wrong value
    "failed",  # the session failed; the reason says why
]


class ToolCall(Struct, frozen=True):
    """A call of a tool by the model.

    Args:
        id: drawn by the session, unique in it; of a call that a client made up, the client's.
        name: of the tool.
        arguments: JSON as the model sampled it or the client sent it, unchanged.
    """

    id: str
    name: str
    arguments: str


class ChatMessage(Struct, frozen=True):
    """One message of a conversation.

    Args:
        role: who speaks.
        text: its words, white space kept.
        reasoning: the thoughts before the text; None: the client sent none, which says nothing about what was sampled.
        tool_calls: of an assistant message.
        tool_call_id: of a tool message: the call that it answers.
    """

    role: Role
    text: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


class Tool(Struct, frozen=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = {}


class TurnSampling(Struct, frozen=True):
    """What a request says about sampling. None: the recipe's value."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # of clients that send a prompt as tokens


class TurnRequest(Struct, frozen=True):
    """A request for the next assistant message.

    Args:
        messages: the whole conversation so far, as the client has it.
        tools: that the client offers.
        sampling: what the client asks for.
        model: as the client names it.
        prompt_ids: the prompt as tokens instead of messages, of clients that render themselves; else None.
        choice: number of the answer, if a client wants several to one prompt (`n`): each is a request of its own.
            Requests that are equal, also in this number, are repetitions and get one answer.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    sampling: TurnSampling = TurnSampling()
    model: str = ""
    prompt_ids: tuple[int, ...] | None = None
    choice: int = 0


class TurnAnswer(Struct, frozen=True):
    """The assistant message that was sampled.

    Args:
        message: parsed from the tokens.
        finish: why it ended.
        num_prompt_tokens: tokens of the prompt that the engine got.
        token_ids: sampled tokens, its end token too.
        log_probs: of the sampled tokens, in nats.
    """

    message: ChatMessage
    finish: Finish
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]


class TurnRefused(Exception):
    """A request that gets no answer: what the client did wrong, in words for its user.

    Args:
        kind: of the refusal.
        reason: for the client's user.
        num_tokens: of the prompt, if it does not fit.
        max_tokens: that the model's context has room for.
    """

    def __init__(self, kind: RefusalKind, reason: str, num_tokens: int = 0, max_tokens: int = 0) -> None:
        super().__init__(reason)
        self.kind: RefusalKind = kind
        self.reason = reason
        self.num_tokens, self.max_tokens = num_tokens, max_tokens
