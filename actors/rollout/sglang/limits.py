"""Tokens that SGLang reserves in a context; the tiny engine does the same."""

from typing import Final

KEPT_OF_INPUT: Final = 6  # tokens that must remain free after a prompt, otherwise it is refused
KEPT_OF_RESPONSE: Final = 2  # tokens that the longest response leaves unused
