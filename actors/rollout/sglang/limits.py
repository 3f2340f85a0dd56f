"""What SGLang keeps of a context for itself; the embedded engine does the same."""

from typing import Final

KEPT_OF_INPUT: Final = 6  # tokens that must be free behind a prompt, or it is refused
KEPT_OF_RESPONSE: Final = 2  # tokens that the longest response leaves free
