"""Answers of sessions, for tests of what is written from them."""

from runtime.sessions.turns import ChatMessage, Finish, ToolCall, TurnAnswer


def answer(
    text: str = "", *calls: ToolCall, reasoning: str | None = None, finish: Finish | None = None, prompt: int = 11
) -> TurnAnswer:
    """An answer of three tokens."""
    message = ChatMessage("assistant", text, reasoning, calls)
    finish = finish or ("tool_calls" if calls else "stop")
    return TurnAnswer(message, finish, prompt, token_ids=(5, 6, 2), log_probs=(-0.5, -0.25, float("-inf")))


def bash_call(number: int = 1, arguments: str = '{"cmd":  "echo hi"}') -> ToolCall:
    """A call with two spaces in its arguments."""
    return ToolCall(f"call_{number}", "bash", arguments)
