"""Properties of the served model: valid token ids, encodable stop strings, and end-of-answer tokens.

Requests are checked against them first. SGLang does not validate token ids: one outside of the vocabulary crashes the
whole server.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from messages import SamplingParams
from runtime.data.tokens import id_problem
from runtime.models.directory import (
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    has_file,
    open_tokenizer,
    read_json,
)

if TYPE_CHECKING:
    import tokenizers

ALSO_ENDS: Final = ("<|eom_id|>",)  # SGLang ends answers at these too, if they are among the tokenizer's added tokens
MAX_STOPS: Final = 32  # stop strings per request; SGLang refuses more
Ids = int | tuple[int, ...] | None


class _Config(msgspec.Struct, frozen=True):
    vocab_size: int | None = None
    eos_token_id: Ids = None
    text_config: "_Config | None" = None  # of a multimodal model


class _GenerationConfig(msgspec.Struct, frozen=True):
    eos_token_id: Ids = None


class _EndToken(msgspec.Struct, frozen=True):
    content: str


class _TokenizerConfig(msgspec.Struct, frozen=True):
    eos_token: str | _EndToken | None = None


class ServedModel:
    """The model that the engines of a run serve, as described by its directory."""

    def __init__(self, directory: Path, vocab_size: int, end_ids: frozenset[int]) -> None:
        self.vocab_size = vocab_size
        self._directory = directory
        self._config_end_ids = end_ids
        self._loaded: tokenizers.Tokenizer | None = None
        self._all_end_ids: frozenset[int] | None = None

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read config.json, and generation_config.json if it exists.

        Raises:
            OSError, ValueError: the config is missing or has no vocabulary size.
        """
        config = read_json(directory, CONFIG, _Config)
        vocab_size = config.vocab_size or (config.text_config and config.text_config.vocab_size)
        if not vocab_size:
            raise ValueError(f"{directory / CONFIG}: vocab_size is missing")
        has_generation = has_file(directory, GENERATION_CONFIG)
        also = read_json(directory, GENERATION_CONFIG, _GenerationConfig).eos_token_id if has_generation else None
        return cls(directory, vocab_size, _ids(config.eos_token_id) | _ids(also))

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer, from both configs and the tokenizer."""
        if self._all_end_ids is None:
            self._all_end_ids = self._config_end_ids | self._tokenizer_end_ids()
        return self._all_end_ids

    @property
    def directory(self) -> Path:
        """Where its files are."""
        return self._directory

    def encode(self, text: str) -> list[int]:
        """Encode a text without adding special tokens.

        Raises:
            ValueError: the text cannot be encoded.
        """
        tokenizer = self._tokenizer()
        try:
            return tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:
            raise ValueError(f"the model's tokenizer cannot encode {text[:80]!r}: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Decode tokens, special tokens included.

        Raises:
            ValueError: there is no tokenizer.
        """
        return self._tokenizer().decode(list(ids), skip_special_tokens=False)

    def check_ids(self, ids: Sequence[int] | NDArray[np.int32]) -> None:
        """Check that all token ids are in the vocabulary.

        Raises:
            ValueError: one is not.
        """
        if len(ids) and id_problem(ids, self.vocab_size) is not None:
            bad = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise ValueError(f"{bad} is not a token of the model, whose vocabulary has {self.vocab_size}")

    def check_tokenizer(self) -> None:
        """Check that all tokens of the tokenizer are in the model's vocabulary.

        Raises:
            ValueError: one is not.
        """
        highest = max(self._tokenizer().get_vocab(with_added_tokens=True).values(), default=0)
        if highest >= self.vocab_size:
            file = self._directory / TOKENIZER
            raise ValueError(f"{file}: it has token {highest}, but the vocabulary of the model has {self.vocab_size}")

    def tokens(self) -> dict[str, int]:
        """Return the ids of all tokens by their text; empty without a tokenizer.

        Raises:
            ValueError: the tokenizer cannot be read.
        """
        if not has_file(self._directory, TOKENIZER):
            return {}
        return self._tokenizer().get_vocab(with_added_tokens=True)

    def has_tokens_of(self, other: "ServedModel") -> bool:
        """Whether ids mean the same in both models. Without tokenizers, those of equally large vocabularies do.

        Raises:
            ValueError: a tokenizer cannot be read.
        """
        own = self.tokens()
        return own == other.tokens() and (bool(own) or self.vocab_size == other.vocab_size)

    def check_stop(self, texts: Sequence[Any]) -> None:
        """Check that an engine can search for these stop strings.

        Raises:
            ValueError: one is no text, is empty or cannot be encoded, or there are too many.
        """
        if len(texts) > MAX_STOPS:
            raise ValueError(f"{len(texts)} stop texts; SGLang takes at most {MAX_STOPS}")
        for text in texts:
            if not isinstance(text, str) or not text:
                why = "an empty one ends each response at its first token" if text == "" else "it is no text"
                raise ValueError(f"stop text {text!r:.100}: {why}; leave it out, or write a text")
            self.encode(text)

    def end_in(self, ids: NDArray[np.int32], params: SamplingParams) -> int | str | None:
        """Return the stop token or stop text at the end of an aborted answer; None if it had not reached its end.

        If an abort and the end fall into the same step, SGLang reports the abort. So the last token decides.

        Args:
            ids: [T], all tokens of the answer.
            params: sampling parameters of the request.
        """
        if not len(ids):
            return None
        if params.stop:
            window = max(len(self.encode(text)) for text in params.stop) + 1  # the same window as in SGLang
            tail = self._tokenizer().decode(ids[-window:].tolist(), skip_special_tokens=False)
            found = next((text for text in params.stop if text in tail), None)
            if found is not None:
                return found
        last = int(ids[-1])
        return last if last in params.stop_token_ids or last in self.end_ids else None

    def _tokenizer(self) -> "tokenizers.Tokenizer":
        if self._loaded is None:
            if not has_file(self._directory, TOKENIZER):
                raise ValueError(f"{self._directory / TOKENIZER}: no such file, and texts need a tokenizer")
            self._loaded = open_tokenizer(self._directory)
        return self._loaded

    def _tokenizer_end_ids(self) -> frozenset[int]:
        if not has_file(self._directory, TOKENIZER):
            return frozenset()
        has_config = has_file(self._directory, TOKENIZER_CONFIG)
        named = read_json(self._directory, TOKENIZER_CONFIG, _TokenizerConfig).eos_token if has_config else None
        texts = {*ALSO_ENDS, named.content if isinstance(named, _EndToken) else named}
        ids = (self._tokenizer().token_to_id(text) for text in texts if text)
        return frozenset(token for token in ids if token is not None)


def _ids(value: Ids) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset((value,) if isinstance(value, int) else value)
