"""Unmodified clients against a listener, in the interpreter of .venv-agents. Each one writes a line of JSON.

The environment has URL and the key of each client's session, as an agent gets them.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import anthropic
import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

URL = os.environ["URL"]
TASK = "Add until you are done."
PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
OPENAI_TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}
RESPONSES_TOOL = {"type": "function", "name": "add", "description": "adds", "parameters": PARAMETERS, "strict": False}
ANTHROPIC_TOOL = {"name": "add", "description": "adds", "input_schema": PARAMETERS}


def result_of(arguments: str | dict[str, Any]) -> str:
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return str(given["a"] + given["b"])


def openai_client(name: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{URL}/v1", api_key=os.environ[name], **options)


def anthropic_client(name: str, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=URL, auth_token=os.environ[name], api_key=None, **options)


def chat(name: str) -> str:
    client, messages = openai_client(name), list[Any]([{"role": "user", "content": TASK}])
    while True:
        answer = client.chat.completions.create(model="m", messages=messages, tools=[OPENAI_TOOL])
        message = answer.choices[0].message
        messages.append(message)
        if answer.choices[0].finish_reason != "tool_calls":
            return message.content
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result_of(call.function.arguments)})


def chat_stream(name: str) -> str:
    client, messages = openai_client(name), list[Any]([{"role": "user", "content": TASK}])
    while True:
        with client.chat.completions.stream(
            model="m", messages=messages, tools=[OPENAI_TOOL], stream_options={"include_usage": True}
        ) as stream:
            answer = stream.get_final_completion()
        assert answer.usage.completion_tokens == 3
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if answer.choices[0].finish_reason != "tool_calls":
            return message.content
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result_of(call.function.arguments)})


def responses(name: str, *, stream: bool = False) -> str:
    client, items = openai_client(name), list[Any]([{"role": "user", "content": TASK}])
    while True:
        fields = {"model": "m", "input": items, "tools": [RESPONSES_TOOL], "store": False}
        if stream:
            with client.responses.stream(**fields) as events:
                answer = events.get_final_response()
        else:
            answer = client.responses.create(**fields)
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        for call in calls:
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result_of(call.arguments)})


def messages(name: str, *, stream: bool = False) -> str:
    client, history = anthropic_client(name), list[Any]([{"role": "user", "content": TASK}])
    while True:
        fields = {"model": "m", "max_tokens": 64, "messages": history, "tools": [ANTHROPIC_TOOL]}
        if stream:
            with client.messages.stream(**fields) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(**fields)
        history.append({"role": "assistant", "content": answer.content})
        if answer.stop_reason != "tool_use":
            return answer.content[-1].text
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": result_of(block.input)}
            for block in answer.content
            if block.type == "tool_use"
        ]
        history.append({"role": "user", "content": results})


@function_tool
def add(a: float, b: float) -> str:
    """Add two numbers."""
    return str(a + b)


def agent(name: str, kind: type, *, stream: bool = False) -> str:
    async def run() -> str:
        client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=os.environ[name])
        made = Agent(
            name="adder",
            instructions="Add.",
            model=kind(model="m", openai_client=client),
            tools=[add],
            model_settings=ModelSettings(),
        )
        if not stream:
            return (await Runner.run(made, TASK, max_turns=50)).final_output
        streamed = Runner.run_streamed(made, TASK, max_turns=50)
        async for _ in streamed.stream_events():
            pass
        return streamed.final_output

    return asyncio.run(run())


def errors(name: str) -> dict[str, str]:
    """What each client makes of refusals; a retry would show as a request more."""
    found = dict[str, str]()
    for case in ("unknown", "control", "ended", "full", "late"):
        key = os.environ[f"{name}_{case}"]
        streams = (False, True) if case in ("full", "late") else (False,)
        for stream in streams:
            where = f"{case}{' stream' if stream else ''}"
            found[f"openai {where}"] = raised(ask_openai, key, stream)
            found[f"anthropic {where}"] = raised(ask_anthropic, key, stream)
    return found


def ask_openai(key: str, stream: bool) -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=key)
    answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": TASK}], stream=stream)
    if stream:
        list(answer)


def ask_anthropic(key: str, stream: bool) -> None:
    client = anthropic.Anthropic(base_url=URL, api_key=key)
    history = [{"role": "user", "content": TASK}]
    answer = client.messages.create(model="m", max_tokens=9, messages=history, stream=stream)
    if stream:
        list(answer)


def raised(call: Callable[[str, bool], None], key: str, stream: bool) -> str:
    try:
        call(key, stream)
    except (openai.APIError, anthropic.APIError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def held(name: str) -> dict[str, str]:
    """Clients whose read time-out is shorter than the turn."""
    options = {"timeout": 1.5, "max_retries": 0}
    client, other = openai_client(name, **options), anthropic_client(name, **options)
    answers = dict[str, str]()
    for case in ("chat", "responses", "messages"):
        asked = [{"role": "user", "content": case}]
        streamed = [{"role": "user", "content": f"{case} stream"}]
        if case == "chat":
            answers[case] = client.chat.completions.create(model="m", messages=asked).choices[0].message.content
            with client.chat.completions.stream(model="m", messages=streamed) as stream:
                answers[f"{case} stream"] = stream.get_final_completion().choices[0].message.content
        elif case == "responses":
            answers[case] = client.responses.create(model="m", input=asked).output_text
            with client.responses.stream(model="m", input=streamed) as stream:
                answers[f"{case} stream"] = stream.get_final_response().output_text
        else:
            fields = {"model": "m", "max_tokens": 9}
            answers[case] = other.messages.create(messages=asked, **fields).content[0].text
            with other.messages.stream(messages=streamed, **fields) as stream:
                answers[f"{case} stream"] = stream.get_final_message().content[0].text
    return answers


def joined(name: str) -> str:
    """A client whose time-outs make it repeat the request before the turn ends."""
    client = openai_client(name, timeout=0.4, max_retries=10)
    return (
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": TASK}])
        .choices[0]
        .message.content
    )


CLIENTS: dict[str, Callable[[str], Any]] = {
    "chat": chat,
    "chat_stream": chat_stream,
    "responses": responses,
    "responses_stream": lambda name: responses(name, stream=True),
    "messages": messages,
    "messages_stream": lambda name: messages(name, stream=True),
    "agents_chat": lambda name: agent(name, OpenAIChatCompletionsModel),
    "agents_chat_stream": lambda name: agent(name, OpenAIChatCompletionsModel, stream=True),
    "agents_responses": lambda name: agent(name, OpenAIResponsesModel),
    "agents_responses_stream": lambda name: agent(name, OpenAIResponsesModel, stream=True),
    "errors": errors,
    "held": held,
    "joined": joined,
}

if __name__ == "__main__":
    set_tracing_disabled(True)
    for wanted in sys.argv[1:]:
        sys.stdout.write(json.dumps({"client": wanted, "saw": CLIENTS[wanted](wanted)}) + "\n")
