"""Text to tokens and back, where the model directory has a tokenizer.json."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from runtime.hf_config import ModelError


class Text:
    """A fast tokenizer. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, directory: Path) -> "Text | None":
        """Load tokenizer.json if the directory has one.

        Raises:
            ModelError: the file cannot be understood.
        """
        file = directory / "tokenizer.json"
        if not file.is_file():
            return None
        try:
            return cls(Tokenizer.from_file(str(file)))
        except Exception as error:  # the binding raises bare Exception for whatever is wrong with the file
            raise ModelError(f"{file}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, with the special tokens its post-processor adds."""
        return list(self._tokenizer.encode(text).ids)

    def width(self, text: str) -> int:
        """Number of tokens of a text, without special ones around it.

        Raises:
            Exception: no tokens can be made of it; the binding knows no narrower one.
        """
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
