"""Chat templates and tokenizers; loads transformers only for models without tokenizer.json."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import jinja2
import numpy as np

from messages.arrays import Int32Array
from runtime.data.chat import Messages
from runtime.data.chat_template import (
    CLOSE,
    GENERATION,
    MARKED,
    OPEN,
    TOO_MUCH_MEMORY,
    ChatTemplate,
    TooMuch,
    joined,
    rendering_limit,
)
from runtime.data.data_files import DataError
from runtime.models.directory import (
    TOKENIZER,
    VOCABULARIES,
    ModelError,
    check_links,
    has_file,
    open_tokenizer,
)

ENCODED_CHARS = 1 << 21  # tokenised in one call, unless one text is longer; the library takes some 100 bytes a token


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
        self._template = ChatTemplate(directory)

    def render(self, messages: Messages, *, tools: Any = None, **kwargs: Any) -> str:
        """Render as transformers' apply_chat_template does, with add_generation_prompt."""
        return self._template.render(messages, tools=tools, **kwargs)

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
        return self._template.source(tools=tools)


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
            with rendering_limit:
                return joined([apply(messages, tools=tools, tokenize=False, **options)], (messages, tools, kwargs))
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
