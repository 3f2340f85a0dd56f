"""Sessions of agents: CPU time of a turn besides its sampling, and memory. Prints JSON.

`matching_ms` is the time to find a history of 200 messages in the tree, for a client that sends all as it was and for
one that writes every message anew. `rendering_share` is the time to render the tails of a session of 128 turns and
64,000 tokens, by the time to render the whole conversation before each turn; both are measured in pairs, at every
eighth turn.
`kb` is the memory of the tree of such a session, beyond its tokens and its messages.

Run: python -m tests.bench.bench_sessions
"""

import argparse
import json
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from actors.rollout.sessions.rendering import Rendering
from actors.rollout.sessions.tree import SampledTurn, Tree
from actors.rollout.sglang.served_model import ServedModel
from messages import Float32Array, Int32Array
from runtime.sessions.turns import ChatMessage, ToolCall, TurnRequest
from tests.support.chat_models import CHAT_MODELS, write_chat_model
from tests.support.scripted_session import TOOLS, claude_code, rendering_of

NUM_TOKENS: Final = 500  # of a turn
EVERY: Final = 8  # turns; one of them is measured
REPEATS: Final = 20
START: Final = (ChatMessage("system", "Be brief."), ChatMessage("user", "Which files are there?"))


def messages_of(num_turns: int, result: str) -> list[ChatMessage]:
    """A conversation of turns that call a tool, with its answers."""
    found = [*START]
    for number in range(num_turns):
        call = ToolCall(
            f"call_{number}", "bash", f'{{"note": "n",  "command": "cat file_{number}", "limit": {number}.0}}'
        )
        found.append(ChatMessage("assistant", "Let me see the next file.", "It may be there.", (call,)))
        found.append(ChatMessage("tool", result, tool_call_id=call.id))
    return found


def recorded(messages: list[ChatMessage]) -> Tree:
    """The tree of a session that had this conversation."""
    tree, turn = Tree(), SampledTurn(Int32Array(), Int32Array(), Float32Array(), (), "tool_calls")
    for place, message in enumerate(messages):
        if message.role == "assistant":
            request = TurnRequest(tuple(messages[:place]), TOOLS)
            tree.end(tree.start(request, tree.find(request)), message, turn)
    return tree


def matching(num_messages: int) -> dict[str, float]:
    """Median milliseconds to find a history."""
    messages = messages_of(num_messages // 2 - 1, "a line of a file\n" * 60)
    tree = recorded(messages)
    anew = [
        claude_code(each, [])[0]
        if each.role == "assistant"
        else ChatMessage(each.role, each.text + "\n", None, (), each.tool_call_id)
        for each in messages
    ]
    found: dict[str, float] = {}
    for name, sent in (("as it was", messages), ("written anew", anew)):
        times = [timed(lambda sent=sent: tree.find(copied(sent))) for _ in range(REPEATS)]
        assert len(tree.find(copied(sent)).rest) <= 1  # the last answer of a tool is new
        found[name] = round(1e3 * statistics.median(times), 3)
    return found


def copied(messages: list[ChatMessage]) -> TurnRequest:
    """A request with messages of its own, as one that was decoded has."""
    own = (ChatMessage(m.role, m.text, m.reasoning, (*m.tool_calls,), m.tool_call_id) for m in messages)
    return TurnRequest(tuple(own), TOOLS)


def timed(run: Callable[[], object]) -> float:
    """CPU seconds of a call."""
    started = time.process_time()
    run()
    return time.process_time() - started


def rendering_share(rendering: Rendering, model: ServedModel, num_turns: int) -> dict[str, float]:
    """Time of all tails by the time of all whole conversations."""
    line = "a line of a file\n"
    messages = messages_of(num_turns, line * ((NUM_TOKENS - 60) // len(model.encode(line))))
    end = model.encode(CHAT_MODELS["qwen3"].special[0])[-1]
    tails = wholes = 0.0
    for place, message in enumerate(messages):
        if message.role == "tool" and place % (2 * EVERY) == 3:
            tails += timed(lambda m=message, p=place: rendering.tail(messages[p - 1], end, [m], TOOLS))
            wholes += timed(lambda p=place: rendering.whole(messages[: p + 1], TOOLS))
    num_tokens = len(rendering.whole(messages, TOOLS).ids)
    turn_ms, whole_ms = (round(1e3 * total * EVERY / num_turns, 3) for total in (tails, wholes))
    return {"share": round(tails / wholes, 4), "tail_ms": turn_ms, "whole_ms": whole_ms, "num_tokens": num_tokens}


def memory_kb(num_turns: int) -> float:
    """Memory of the tree of a session, without the messages that it keeps."""
    messages = messages_of(num_turns, "a line of a file\n")
    tracemalloc.start()
    tree = recorded(messages)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(tree.branches) == 1
    return round(size / 1024, 1)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=128, help="of a session that is rendered")
    parser.add_argument("--messages", type=int, default=200, help="of a history that is matched")
    args = parser.parse_args()
    results: dict[str, Any] = {"matching_ms": matching(args.messages), "kb": memory_kb(args.turns)}
    results["rendering_share"] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in CHAT_MODELS:
            results["rendering_share"][name] = rendering_share(
                *rendering_of(write_chat_model(Path(folder) / name, name)), args.turns
            )
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
