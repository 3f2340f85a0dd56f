"""A session whose engine answers from a script, with a tap on what it gets; and clients as they were seen to behave.

The clients are models of what real ones sent: each takes an answer and returns the messages that it sends back.
"""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import anyio
import numpy as np

from actors.rollout.samples.conversation import Conversation
from actors.rollout.samples.sample import OpenSample
from actors.rollout.sessions.rendering import Rendering
from actors.rollout.sessions.session import Session
from actors.rollout.sglang.served_model import ServedModel
from messages import Int32Array, Prompt, SampleKey, SampleStatus, SamplingParams
from runtime.data.chat_template import ChatTemplate
from runtime.sessions.turns import ChatMessage, Tool, ToolCall

SCHEMA: Final = {"command": {"type": "string"}, "limit": {"type": "number"}, "note": {"type": "string"}}
TOOLS: Final = (Tool("bash", "Run a command.", {"type": "object", "properties": SCHEMA}),)
Script = Callable[[list[int], int], list[int]]  # prompt, most tokens -> sampled tokens; empty: the engine aborts


@dataclass
class Tap:
    """Stands between sessions and an engine: counts turns whose recorded prefix differs by ids."""

    model: ServedModel
    script: Script
    gate: anyio.Event | None = None  # turns wait for it
    asked: anyio.Event = field(default_factory=anyio.Event)  # the first turn has come
    params: list[SamplingParams] = field(default_factory=list[SamplingParams])
    num_turns: int = 0
    num_differing: int = 0
    sampled: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    prompts: list[list[int]] = field(default_factory=list[list[int]])
    recorded: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # by conversation of the sample

    async def ask(self, sample: OpenSample, params: SamplingParams, limit: int) -> bool:
        """Answer as an engine does, and store the turn."""
        prompt = [*sample.prompt_of(Int32Array()), *sample.buffer.ids.tolist(), *sample.pending.tolist()]
        self.num_turns += 1
        before = self.recorded.get(sample.part, [])
        self.num_differing += prompt[: len(before)] != before
        self.prompts.append(prompt)
        self.params.append(params)
        self.asked.set()
        if self.gate is not None:
            await self.gate.wait()
        ids = self.script(prompt, limit)
        if not ids:
            sample.turn_status = SampleStatus.ABORTED
            return False
        sample.buffer.append_input(sample.pending)
        log_probs = -np.arange(1, len(ids) + 1) / 1024
        sample.buffer.append(np.asarray(ids), log_probs, self.model.decode(ids), "3@engine")
        sample.take(SampleKey(group_id=0, attempt=0, index=0, part=sample.part), sample.prompt_of(Int32Array()))
        is_ended = ids[-1] in self.model.end_ids
        sample.turn_status = SampleStatus.COMPLETED if is_ended else SampleStatus.TRUNCATED
        sample.end_turn()
        self.sampled.append(tuple(ids))
        self.recorded[sample.part] = [*prompt, *ids]
        return False


@dataclass
class Scripted:
    """A session, its sample and its engine."""

    session: Session
    sample: OpenSample
    talk: Conversation
    tap: Tap

    @property
    def trained(self) -> list[tuple[int, ...]]:
        """The tokens that train: of each turn of each conversation of the sample."""
        found: list[tuple[int, ...]] = []
        for part in self.sample.parts:
            ids = part.buffer.ids.tolist()
            found += (tuple(ids[turn.start : turn.start + turn.num_tokens]) for turn in part.turns)
        return found


def rendering_of(directory: Path) -> tuple[Rendering, ServedModel]:
    """Open the template and the tokens of a model directory."""
    model = ServedModel.read(directory)
    return Rendering(ChatTemplate(directory), model), model


@asynccontextmanager
async def scripted_session(
    rendering: Rendering,
    model: ServedModel,
    script: Script,
    *,
    max_new_tokens: int = 100_000,
    sample: OpenSample | None = None,
    **options: Any,
) -> AsyncIterator[Scripted]:
    """Run a session inside of a conversation, as its generate function does; a sample may have tokens already."""
    sample = sample or OpenSample(index=0, prompt_len=0)
    tap = Tap(model, script)
    row = Prompt(data="d", row=0, text="", prompt_ids=Int32Array())
    params = SamplingParams(max_new_tokens=max_new_tokens)
    talk = Conversation(row, sample, params=params, ask=tap.ask, model=model)
    async with Session(talk, rendering, **options) as session:
        yield Scripted(session, sample, talk, tap)


Client = Callable[[ChatMessage, list[ChatMessage]], list[ChatMessage]]  # answer, results of its calls -> what is sent


def keeps_all(answer: ChatMessage, results: list[ChatMessage]) -> list[ChatMessage]:
    """openai, mini-swe-agent, openai-agents by Responses, Codex: all as it was."""
    return [answer, *results]


def drops_thoughts(answer: ChatMessage, results: list[ChatMessage]) -> list[ChatMessage]:
    """openai-agents by chat completions."""
    return [ChatMessage("assistant", answer.text, None, answer.tool_calls), *results]


def as_objects(answer: ChatMessage, results: list[ChatMessage]) -> list[ChatMessage]:
    """The anthropic client: arguments become an object; the order of keys and 1.0 stay."""
    return [_with_arguments(answer, lambda text: json.dumps(json.loads(text), separators=(",", ":"))), *results]


def claude_code(answer: ChatMessage, results: list[ChatMessage]) -> list[ChatMessage]:
    """Claude Code: keys in the order of the schema, and numbers as JavaScript writes them."""

    def rewritten(text: str) -> str:
        values = json.loads(text, parse_int=float)
        ordered = {key: values[key] for key in (*SCHEMA, *values) if key in values}
        return json.dumps({key: _in_javascript(value) for key, value in ordered.items()}, separators=(",", ":"))

    return [_with_arguments(answer, rewritten), *results]


def inspect_ai(answer: ChatMessage, results: list[ChatMessage]) -> list[ChatMessage]:
    """inspect-ai: arguments dumped again, and a line feed before the words if there were thoughts."""
    again = _with_arguments(answer, lambda text: json.dumps(json.loads(text)))
    text = ("\n" if answer.reasoning else "") + answer.text
    return [ChatMessage("assistant", text, answer.reasoning, again.tool_calls), *results]


def smolagents(answer: ChatMessage, results: list[ChatMessage]) -> list[ChatMessage]:
    """smolagents: calls become words, and results messages of the user."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
        for call in answer.tool_calls
    ]
    text = answer.text.strip() + (f"\nCalling tools:\n{calls}" if calls else "")
    return [ChatMessage("assistant", text), *(ChatMessage("user", f"Observation:\n{each.text}") for each in results)]


CLIENTS: Final[dict[str, Client]] = {
    "keeps all": keeps_all,
    "drops thoughts": drops_thoughts,
    "as objects": as_objects,
    "Claude Code": claude_code,
    "inspect-ai": inspect_ai,
    "smolagents": smolagents,
}


def _with_arguments(answer: ChatMessage, rewritten: Callable[[str], str]) -> ChatMessage:
    calls = tuple(ToolCall(call.id, call.name, rewritten(call.arguments)) for call in answer.tool_calls)
    return ChatMessage("assistant", answer.text, answer.reasoning, calls)


def _in_javascript(value: Any) -> Any:
    """A double as JavaScript writes it: without a fraction as an integer, with the digits that identify it."""
    if isinstance(value, bool) or not isinstance(value, float):
        return value
    return (
        int(repr(value).split("e")[0].replace(".", "").ljust(20, "0"))
        if value >= 1e19
        else int(value)
        if value.is_integer()
        else value
    )
