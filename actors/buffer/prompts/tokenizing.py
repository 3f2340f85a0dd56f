"""Chat templates and tokenizers; loads transformers only for models without tokenizer.json."""

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import numpy as np
from tokenizers import Tokenizer

from messages.arrays import Int32Array
from runtime.data.data_files import DataError

Messages = list[dict[str, Any]]
OPEN, CLOSE = "\ue000", "\ue001"  # characters for private use, around what a template marks as output
MARKED = "marks_output"  # variable of the template that turns the marks on
GENERATION = re.compile(r"\{%-?\s*generation\b")
TOOL_TEMPLATES = ("tool_use", "default")  # named templates to try, in order, for rows with tools


class Tokenizing(Protocol):
    """The tokenizer interface that prompts need."""

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
    if (directory / "tokenizer.json").is_file():
        return FastTokenizing(directory)
    if not any((directory / name).is_file() for name in ("tokenizer.model", "vocab.json")):
        raise DataError(f"{directory}: no tokenizer here: tokenizer.json, tokenizer.model or vocab.json is needed")
    return _load_by_transformers(directory, trust_remote_code=trust_remote_code)


class FastTokenizing:
    """tokenizer.json with the tokenizers library, chat template with jinja2: opens in 40 ms instead of seconds."""

    def __init__(self, directory: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception for any fault of the file
            raise DataError(f"{directory / 'tokenizer.json'}: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._directory = directory
        settings = _settings(directory)
        self._special = _special_tokens(settings)
        self._templates = _templates(directory, settings)
        self._compiled: dict[str, jinja2.Template] = {}

    def render(self, messages: Messages, *, tools: Any = None, **kwargs: Any) -> str:
        """Render as transformers' apply_chat_template does, with add_generation_prompt."""
        variables: dict[str, Any] = {**self._special, "add_generation_prompt": True, "documents": None, **kwargs}
        try:
            return self._template(bool(tools)).render(messages=messages, tools=tools, **variables)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template of {self._directory}: line {error.lineno}: {error.message}") from None
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template of {self._directory} refuses the messages: {error}") from None
        except Exception as error:  # noqa: BLE001 - a template is a program, and may raise anything
            raise ValueError(f"the chat template of {self._directory} fails: {error!r}") from None

    def render_marked(self, messages: Messages, *, tools: Any = None, **kwargs: Any) -> str | None:
        """Render with the marks of {% generation %}; None if the template has none."""
        if not GENERATION.search(self._source(bool(tools))):
            return None
        text = self.render(messages, tools=tools, **kwargs)
        if OPEN in text or CLOSE in text:
            raise ValueError("the messages have characters that mark the output of the chat template: U+E000 or U+E001")
        return self.render(messages, tools=tools, **{**kwargs, MARKED: True})

    def encode(self, texts: Sequence[str]) -> list[Int32Array]:
        """Tokenize all texts in one call, on the library's own threads."""
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise ValueError(str(error)) from None
        return [Int32Array(np.asarray(encoding.ids, dtype=np.int32)) for encoding in encodings]

    def _source(self, with_tools: bool) -> str:
        names = TOOL_TEMPLATES if with_tools else TOOL_TEMPLATES[1:]
        name = next((name for name in names if name in self._templates), None)
        if name is None:
            raise ValueError(f"{self._directory} has no chat template: chat_template.jinja or tokenizer_config.json")
        return self._templates[name]

    def _template(self, with_tools: bool) -> jinja2.Template:
        source = self._source(with_tools)
        if source not in self._compiled:
            self._compiled[source] = _environment().from_string(source)
        return self._compiled[source]


def _settings(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    try:
        settings: Any = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: {error}") from None
    if not isinstance(settings, dict):
        raise DataError(f"{path}: not a JSON object")
    return cast("dict[str, Any]", settings)


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
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return {"default": file.read_text(encoding="utf-8")}
        except (OSError, ValueError) as error:
            raise DataError(f"{file}: {error}") from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        try:
            return {f"{item['name']}": f"{item['template']}" for item in cast("list[dict[str, str]]", template)}
        except (KeyError, TypeError):
            path = directory / "tokenizer_config.json"
            raise DataError(f"{path}: chat_template: a list needs objects with name and template") from None
    return {"default": template} if isinstance(template, str) else {}


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

    def render(self, messages: Messages, *, tools: Any = None, **kwargs: Any) -> str:
        """Render with apply_chat_template and add_generation_prompt."""
        apply: Callable[..., str] = self._tokenizer.apply_chat_template
        options = {"add_generation_prompt": True, **kwargs}
        try:
            return apply(messages, tools=tools, tokenize=False, **options)
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
