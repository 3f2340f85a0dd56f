"""Tokenizer, for model directories with a tokenizer.json."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.models.directory import TOKENIZER, has_file, open_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Text:
    """A fast tokenizer. Safe to share between threads."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, directory: Path) -> "Text | None":
        """Load tokenizer.json if the directory has one.

        Raises:
            ModelError: the file cannot be parsed.
        """
        return cls(open_tokenizer(directory)) if has_file(directory, TOKENIZER) else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize a text, by default with the special tokens that its post-processor adds."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def width(self, text: str) -> int:
        """Number of tokens of a text, without added special tokens.

        Raises:
            Exception: the text cannot be tokenized; the binding has no narrower type.
        """
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Detokenize."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
