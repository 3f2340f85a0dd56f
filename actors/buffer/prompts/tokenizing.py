"""Chat templates and tokenizers; loads transformers only for models without tokenizer.json."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import numpy as np

from messages.arrays import Int32Array
from runtime.data.chat import Messages
from runtime.data.data_files import DataError
from runtime.models.directory import (
    CHAT_TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOOL_CHAT_TEMPLATE,
    VOCABULARIES,
    ModelError,
    check_links,
    has_file,
    open_tokenizer,
    read_json,
    read_text,
)
from runtime.util.memory import MemoryLimit

OPEN, CLOSE = "\ue000", "\ue001"  # characters for private use, around what a template marks as output
MARKED = "marks_output"  # variable of the template that turns the marks on
GENERATION = re.compile(r"\{%-?\s*generation\b")
ADDED_CHARS = 1 << 16  # that a template may add to a row, such as its own system prompt
TIMES_LONGER = 8  # a row may become so many times longer by escapes and indents
ENCODED_CHARS = 1 << 21  # tokenised in one call, unless one text is longer; the library takes some 100 bytes a token
RENDERING_BYTES = 512 << 20  # memory that rendering one row may take
TOO_MUCH_MEMORY = f"asks for more than {RENDERING_BYTES >> 20} MiB of memory"
_rendering = MemoryLimit(RENDERING_BYTES)
TOOL_TEMPLATES = ("tool_use", "default")  # named templates to try, in order, for rows with tools


class TooMuch(ValueError):
    """A chat template makes too long a text, or asks for too much memory."""


class Tokenizing(Protocol):
    """The tokenizer interface that prompts need."""

    def source(self, *, tools: Any = None) -> str:
        """Return the text of the chat template.

        Raises:
            ValueError: the model has no template.
        """
        ...

    def render(self, messages: Messages, *, tools: Any = None, **kwargs: Any) -> str:
        """Render chat messages as the text that the model continues.

        Raises:
            ValueError: the template refuses them, or the model has no template.
        """
        ...

    def render_marked(self, messages: Messages, *, tools: Any = None, **kwargs: Any) -> str | None:
        """Render with OPEN and CLOSE around what the template marks as output; None if it marks none.

        Raises:
            ValueError: the template refuses the messages, or a message has one of these characters.
        """
        ...

    def encode(self, texts: Sequence[str]) -> list[Int32Array]:
        """Tokenize texts without adding special tokens.

        Raises:
            ValueError: a text has no tokens in this vocabulary.
        """
        ...


def load_tokenizing(hf_checkpoint: str, *, trust_remote_code: bool = False) -> Tokenizing:
    """Open the tokenizer of a model directory; its code runs only with `trust_remote_code`.

    Raises:
        DataError: the directory has no tokenizer; names the directory and the missing files.
    """
    directory = Path(hf_checkpoint)
    try:
        check_links(directory)
        if has_file(directory, TOKENIZER):
            return FastTokenizing(directory)
        has_other = any(has_file(directory, name) for name in VOCABULARIES)
    except ModelError as error:
        raise DataError(str(error)) from None
    if not has_other:
        needed = f"{', '.join(VOCABULARIES[:-1])} or {VOCABULARIES[-1]}"
        raise DataError(f"{directory}: no tokenizer here: {needed} is needed")
    return _load_by_transformers(directory, trust_remote_code=trust_remote_code)


class FastTokenizing:
    """tokenizer.json with the tokenizers library, chat template with jinja2: opens in 40 ms instead of seconds."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = open_tokenizer(directory)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._directory = directory
        settings = _settings(directory)
        self._special = _special_tokens(settings)
        self._templates = _templates(directory, settings)

    def render(self, messages: Messages, *, tools: Any = None, **kwargs: Any) -> str:
        """Render as transformers' apply_chat_template does, with add_generation_prompt."""
        variables: dict[str, Any] = {**self._special, "add_generation_prompt": True, "documents": None, **kwargs}
        try:
            with _rendering:
                parts = _compiled(self.source(tools=tools)).generate(messages=messages, tools=tools, **variables)
                return _joined(parts, (messages, tools, kwargs))
        except (TooMuch, MemoryError) as error:
            raise TooMuch(f"the chat template of {self._directory} {str(error) or TOO_MUCH_MEMORY}") from None
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template of {self._directory}: line {error.lineno}: {error.message}") from None
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template of {self._directory} refuses the messages: {error}") from None
        except Exception as error:  # noqa: BLE001 - a template is a program, and may raise anything
            raise ValueError(f"the chat template of {self._directory} fails: {error!r}") from None

    def render_marked(self, messages: Messages, *, tools: Any = None, **kwargs: Any) -> str | None:
        """Render with the marks of {% generation %}; None if the template has none."""
        if not GENERATION.search(self.source(tools=tools)):
            return None
        text = self.render(messages, tools=tools, **kwargs)
        if OPEN in text or CLOSE in text:
            raise ValueError("the messages have characters that mark the output of the chat template: U+E000 or U+E001")
        return self.render(messages, tools=tools, **{**kwargs, MARKED: True})

    def encode(self, texts: Sequence[str]) -> list[Int32Array]:
        """Tokenize the texts in large parts, on the library's own threads."""
        found: list[Int32Array] = []
        for part in _parts(texts):
            try:
                encodings = self._tokenizer.encode_batch_fast(part, add_special_tokens=False)
            except Exception as error:  # noqa: BLE001 - the library raises bare Exception
                raise ValueError(str(error)) from None
            found += (Int32Array(np.asarray(encoding.ids, dtype=np.int32)) for encoding in encodings)
        return found

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


def _parts(texts: Sequence[str]) -> Iterator[list[str]]:
    """Split texts into lists of at most ENCODED_CHARS characters, or of one text."""
    part: list[str] = []
    length = 0
    for text in texts:
        if part and length + len(text) > ENCODED_CHARS:
            yield part
            part, length = [], 0
        part.append(text)
        length += len(text)
    yield part


def _joined(parts: Iterable[str], given: Any) -> str:
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


class TransformersTokenizing:
    """Tokenizer loaded by transformers, for models without tokenizer.json; slow to start."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def source(self, *, tools: Any = None) -> str:
        """Return the text of the chat template."""
        template: Callable[..., str] = self._tokenizer.get_chat_template
        return template(tools=tools)

    def render(self, messages: Messages, *, tools: Any = None, **kwargs: Any) -> str:
        """Render with apply_chat_template and add_generation_prompt."""
        apply: Callable[..., str] = self._tokenizer.apply_chat_template
        options = {"add_generation_prompt": True, **kwargs}
        try:
            with _rendering:
                return _joined([apply(messages, tools=tools, tokenize=False, **options)], (messages, tools, kwargs))
        except (TooMuch, MemoryError) as error:
            raise TooMuch(f"the chat template {str(error) or TOO_MUCH_MEMORY}") from None
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from None
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            raise ValueError(f"the chat template fails: {error!r}") from None

    def render_marked(self, messages: Messages, *, tools: Any = None, **kwargs: Any) -> str | None:
        """Return None: marks of the template are not read without tokenizer.json."""
        return None

    def encode(self, texts: Sequence[str]) -> list[Int32Array]:
        """Tokenize all texts in one call."""
        batch: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return [Int32Array(np.asarray(ids, dtype=np.int32)) for ids in batch]


def _load_by_transformers(directory: Path, *, trust_remote_code: bool) -> Tokenizing:
    from transformers import AutoTokenizer  # takes seconds to import; most models do not need it

    load: Callable[..., Any] = cast("Any", AutoTokenizer).from_pretrained
    try:
        return TransformersTokenizing(load(directory, trust_remote_code=trust_remote_code, local_files_only=True))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise DataError(f"{directory}: no tokenizer could be loaded: {error}") from None
