"""A served model that accepts any tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path

from actors.rollout.sglang.served_model import ServedModel


class AnyTokens(ServedModel):
    """Accepts any token and any text; no token ends an answer."""

    def __init__(self, encode: Callable[[str], list[int]] = lambda _: []) -> None:
        super().__init__(Path(), 1 << 31, frozenset())
        self._encode = encode

    def encode(self, text: str) -> list[int]:
        return self._encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def check_stop(self, texts: Sequence[str]) -> None:
        return None
