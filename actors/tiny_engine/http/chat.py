"""POST /v1/chat/completions: messages become a prompt by the model's chat template, answers OpenAI's format."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, cast

import jinja2
import msgspec
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from actors.rollout.sglang.facts import KEPT_OF_RESPONSE
from actors.tiny_engine.http.api import Call, CallReader, Job
from actors.tiny_engine.http.bodies import OneOrMany, decode_body
from actors.tiny_engine.http.rendering import Progress, rendered_text
from actors.tiny_engine.model.text import Text
from runtime.models.directory import CHAT_TEMPLATE, TOKENIZER_CONFIG, has_file, read_json, read_text

TOKENS: Final = ("bos_token", "eos_token", "pad_token", "unk_token")  # that templates may name
Count = Annotated[int, msgspec.Meta(ge=1)]


class ChatBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a request. Unknown keys are ignored, as in SGLang."""

    messages: tuple[dict[str, Any], ...]
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: int = -1
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: OneOrMany = None
    seed: int | None = None
    n: int = 1
    stream: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class ChatTemplate:
    """The chat template of a model directory, as transformers renders it."""

    def __init__(self, source: str, names: dict[str, str]) -> None:
        """Compile a template.

        Args:
            source: in Jinja.
            names: texts of special tokens, by the names that templates use.
        """
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise  # pyright: ignore[reportArgumentType] - typed by its first values
        self._template = environment.from_string(source)
        self._names = names

    @classmethod
    def load(cls, directory: Path) -> "ChatTemplate | None":
        """Load the template of a model directory if it has one."""
        has_config, has_file_of_its_own = has_file(directory, TOKENIZER_CONFIG), has_file(directory, CHAT_TEMPLATE)
        found: dict[str, Any] = read_json(directory, TOKENIZER_CONFIG, dict[str, Any]) if has_config else {}
        source = read_text(directory, CHAT_TEMPLATE) if has_file_of_its_own else found.get("chat_template")
        if isinstance(source, list):  # of named templates
            named = [item for item in cast("list[Any]", source) if isinstance(item, dict)]
            source = next((item.get("template") for item in named if item.get("name") == "default"), None)
        if not isinstance(source, str):
            return None
        tokens = {name: found[name] for name in TOKENS if found.get(name) is not None}
        return cls(source, {name: _text_of(token) for name, token in tokens.items()})

    def render(self, messages: Sequence[dict[str, Any]], more: dict[str, Any]) -> str:
        """Render messages, followed by the start of an answer.

        Raises:
            ValueError: the template refuses the messages.
        """
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **{**self._names, **more})
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error


def _text_of(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)  # pyright: ignore[reportUnknownArgumentType]


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # without HTML escapes, as transformers does


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


class ChatReader:
    """Converts bodies of POST /v1/chat/completions into calls."""

    def __init__(self, reader: CallReader, text: Text | None, template: ChatTemplate | None, context: int) -> None:
        self._reader = reader
        self._text = text
        self._template = template
        self._context = context

    def read(self, data: bytes) -> Call:
        """Validate a body and build its request.

        Raises:
            SchemaError: the body is not JSON, or a field has the wrong type.
            ValueError: a value is impossible or unsupported.
        """
        body = decode_body(data, ChatBody)
        if self._text is None or self._template is None:
            raise ValueError("the model directory has no tokenizer.json, or no chat template")
        if body.stream or body.n != 1:
            raise ValueError("stream and n > 1 are not supported by the tiny engine here")
        rendered = self._template.render(body.messages, body.chat_template_kwargs)
        ids = self._text.encode(rendered, add_special_tokens=False)
        room = max(1, self._context - len(ids) - KEPT_OF_RESPONSE)
        params = {
            "max_new_tokens": body.max_completion_tokens or body.max_tokens or room,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop,
            "sampling_seed": body.seed,
        }
        return self._reader.read(msgspec.json.encode({"input_ids": ids, "sampling_params": params}))


def completion(job: Job, progress: Progress, *, model: str, text: Text | None) -> dict[str, Any]:
    """Build the response to a request that has ended."""
    request, finish = job.request, progress.finish
    message = {"role": "assistant", "content": rendered_text(job, progress, text), "tool_calls": None}
    choice = {
        "index": 0,
        "message": message | {"reasoning_content": None},
        "logprobs": None,
        "finish_reason": finish.type if finish else None,
        "matched_stop": finish.matched if finish else None,
    }
    prompt, generated = len(request.prompt_ids), progress.num_tokens
    usage = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
    head = {"id": request.rid, "object": "chat.completion", "created": int(time.time()), "model": model}
    return {**head, "choices": [choice], "usage": usage}
