"""Chat templates of model directories, rendered as transformers does."""

import json
import re
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from runtime.data.chat import Messages
from runtime.data.data_files import DataError
from runtime.models.directory import (
    CHAT_TEMPLATE,
    TOKENIZER_CONFIG,
    TOOL_CHAT_TEMPLATE,
    has_file,
    read_json,
    read_text,
)
from runtime.util.memory import MemoryLimit

OPEN, CLOSE = "\ue000", "\ue001"  # characters for private use, around what a template marks as output
MARKED = "marks_output"  # variable of the template that turns the marks on
GENERATION = re.compile(r"\{%-?\s*generation\b")
ADDED_CHARS = 1 << 16  # that a template may add to a row, such as its own system prompt
TIMES_LONGER = 8  # a row may become so many times longer by escapes and indents
RENDERING_BYTES = 512 << 20  # memory that rendering one row may take
TOO_MUCH_MEMORY = f"asks for more than {RENDERING_BYTES >> 20} MiB of memory"
rendering_limit = MemoryLimit(RENDERING_BYTES)
TOOL_TEMPLATES = ("tool_use", "default")  # named templates to try, in order, for rows with tools


class TooMuch(ValueError):
    """A chat template makes too long a text, or asks for too much memory."""


class ChatTemplate:
    """The chat template of a model directory; another one for conversations with tools, if the model has it."""

    def __init__(self, directory: Path) -> None:
        """Read the template and the texts of special tokens. Raises DataError: a file cannot be read."""
        self._directory = directory
        settings = _settings(directory)
        self._special = _special_tokens(settings)
        self._templates = _templates(directory, settings)

    def render(self, messages: Messages, *, tools: Any = None, **kwargs: Any) -> str:
        """Render as transformers' apply_chat_template does, with add_generation_prompt."""
        variables: dict[str, Any] = {**self._special, "add_generation_prompt": True, "documents": None, **kwargs}
        try:
            with rendering_limit:
                parts = _compiled(self.source(tools=tools)).generate(messages=messages, tools=tools, **variables)
                return joined(parts, (messages, tools, kwargs))
        except (TooMuch, MemoryError) as error:
            raise TooMuch(f"the chat template of {self._directory} {str(error) or TOO_MUCH_MEMORY}") from None
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template of {self._directory}: line {error.lineno}: {error.message}") from None
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template of {self._directory} refuses the messages: {error}") from None
        except Exception as error:  # noqa: BLE001 - a template is a program, and may raise anything
            raise ValueError(f"the chat template of {self._directory} fails: {error!r}") from None

    def source(self, *, tools: Any = None) -> str:
        """Return the text of the chat template; models may have another one for rows with tools."""
        names = TOOL_TEMPLATES if tools else TOOL_TEMPLATES[1:]
        name = next((name for name in names if name in self._templates), None)
        if name is None:
            raise ValueError(f"{self._directory} has no chat template: chat_template.jinja or tokenizer_config.json")
        return self._templates[name]


def _settings(directory: Path) -> dict[str, Any]:
    return read_json(directory, TOKENIZER_CONFIG, dict[str, Any]) if has_file(directory, TOKENIZER_CONFIG) else {}


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """bos_token and the like, for templates; values are strings, or objects with the string in `content`."""
    tokens: dict[str, str] = {}
    for name, value in settings.items():
        content = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _templates(directory: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name; most models have only "default"."""
    if has_file(directory, CHAT_TEMPLATE):
        named = {"default": CHAT_TEMPLATE, "tool_use": TOOL_CHAT_TEMPLATE}
        return {name: read_text(directory, file) for name, file in named.items() if has_file(directory, file)}
    template = settings.get("chat_template")
    if isinstance(template, list):
        try:
            return {f"{item['name']}": f"{item['template']}" for item in cast("list[dict[str, str]]", template)}
        except (KeyError, TypeError):
            raise DataError(
                f"{directory / TOKENIZER_CONFIG}: chat_template: a list needs objects with name and template"
            ) from None
    return {"default": template} if isinstance(template, str) else {}


def joined(parts: Iterable[str], given: Any) -> str:
    """Join the parts of a rendered text. It may be longer than what was given to the template, within a bound.

    Raises:
        TooMuch: the text is longer.
    """
    found: list[str] = []
    length, most, is_exact = 0, ADDED_CHARS, False
    for part in parts:
        found.append(part)
        length += len(part)
        if length > most and not is_exact:  # few texts are so long: others do without this size
            most, is_exact = ADDED_CHARS + TIMES_LONGER * len(json.dumps(given, default=str)), True
        if length > most:
            raise TooMuch(f"makes a text of {length:,} characters or more; with these messages at most {most:,}")
    return "".join(found)


@lru_cache(maxsize=64)
def _compiled(source: str) -> jinja2.Template:
    """Compile a chat template, which takes 10 to 100 ms. All data sets of a process share it."""
    return _environment().from_string(source)


def _environment() -> jinja2.Environment:
    """The jinja2 environment of transformers: sandbox, loop controls, {% generation %}, unescaped JSON."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        loader=jinja2.FunctionLoader(_refuse_another),
    )
    environment.filters["tojson"] = _to_json
    functions = cast("dict[str, Any]", environment.globals)  # its declared type allows jinja2's own functions only
    functions.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


def _refuse_another(name: str) -> NoReturn:
    raise jinja2.TemplateError(f"it includes {name!r}, but a chat template must be a single file")


class _Generation(jinja2.ext.Extension):
    """Parses {% generation %}, which marks the assistant's output; renders its content unchanged, or between marks."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [_mark(OPEN, line), *body, _mark(CLOSE, line)]


def _mark(text: str, line: int) -> jinja2.nodes.Output:
    """Return the statement that writes a mark if the variable MARKED is set."""
    nodes = jinja2.nodes
    chosen = nodes.CondExpr(nodes.Name(MARKED, "load"), nodes.Const(text), nodes.Const(""))
    return nodes.Output([chosen], lineno=line)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
