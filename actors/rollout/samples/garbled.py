"""Signs of garbled output in the text of a response: repetition, another script than the prompt's, broken characters.

They are cheap: a response costs a compression of its end, and one pass over its characters if they are not all ASCII.
Short responses have no signs, since a few characters say little. Pure.
"""

import bisect
import zlib
from collections import Counter
from typing import Final

REPETITION, SCRIPT, BYTES = "repetition", "script", "bytes"  # names of the signs, in events
TAIL_CHARS: Final = 2_000  # of the end of a response, which is compressed
MIN_TAIL_CHARS: Final = 1_000
REPEATS: Final = 8  # times that a repetitive text shrinks; prose shrinks to about a half, tables to a quarter
MIN_CHARS: Final = 3  # in another script
OTHER_SHARE: Final = 0.05  # of all characters that are not spaces
BROKEN: Final = "\ufffd"  # what decoders write for bytes that are not text
BROKEN_SHARE: Final = 0.02

# First and last code point of the scripts that people mix up least. Latin and Greek are in all texts about science,
# and what is in no range is in no script. Japanese and Chinese texts share Han characters.
_RANGES: Final = (
    (0x0400, 0x052F, "Cyrillic"),
    (0x0530, 0x058F, "Armenian"),
    (0x0590, 0x05FF, "Hebrew"),
    (0x0600, 0x077F, "Arabic"),
    (0x0900, 0x0DFF, "Indic"),
    (0x0E00, 0x0EFF, "Thai or Lao"),
    (0x0F00, 0x0FFF, "Tibetan"),
    (0x1000, 0x109F, "Burmese"),
    (0x10A0, 0x10FF, "Georgian"),
    (0x1100, 0x11FF, "Korean"),
    (0x1200, 0x139F, "Ethiopic"),
    (0x1780, 0x17FF, "Khmer"),
    (0x3040, 0x30FF, "Chinese or Japanese"),
    (0x3130, 0x318F, "Korean"),
    (0x3400, 0x9FFF, "Chinese or Japanese"),
    (0xAC00, 0xD7AF, "Korean"),
    (0xF900, 0xFAFF, "Chinese or Japanese"),
    (0x20000, 0x323AF, "Chinese or Japanese"),
)
_STARTS: Final = [first for first, _, _ in _RANGES]


def signs_of(text: str, prompt: str) -> tuple[str, ...]:
    """Return the signs of garbled output in a response.

    Args:
        text: of the response.
        prompt: text of its prompt, whose scripts a response may use.
    """
    signs = [REPETITION] if _repeats(text) else []
    if not text.isascii():
        counts = Counter(text)
        num_chars = sum(count for char, count in counts.items() if not char.isspace())
        known = {_script_of(char) for char in set(prompt)} | {""}
        other = sum(count for char, count in counts.items() if _script_of(char) not in known)
        signs += [SCRIPT] if other >= max(MIN_CHARS, OTHER_SHARE * num_chars) else []
        broken = counts[BROKEN]
        signs += [BYTES] if broken >= max(MIN_CHARS, BROKEN_SHARE * num_chars) else []
    return tuple(signs)


def _repeats(text: str) -> bool:
    if len(text) < MIN_TAIL_CHARS:
        return False
    tail = text[-TAIL_CHARS:].encode(errors="replace")
    return REPEATS * len(zlib.compress(tail, 1)) < len(tail)


def _script_of(char: str) -> str:
    """Return the script of a character; empty: none that counts."""
    index = bisect.bisect_right(_STARTS, ord(char)) - 1
    if index < 0 or ord(char) > _RANGES[index][1]:
        return ""
    return _RANGES[index][2]
