"""Formatting of values, numbers, durations and curves for people."""

import itertools
import json
import math
import re
import signal
from collections.abc import Sequence
from statistics import fmean
from typing import Final

MAX_SHOWN: Final = 200  # characters of a value; enough for a full path
CURVE_COLUMNS = 40
_BARS = "▁▂▃▄▅▆▇█"
_STEERS = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # C0, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional controls
    "\u2028\u2029\ud800-\udfff]"  # line separators in some programs; surrogates
)


def show(value: object) -> str:
    """Format a value as TOML or JSON, truncated if long."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def printable(text: str) -> str:
    r"""Escape control characters for a terminal line, as \x1b, \n or \u202e."""
    return _STEERS.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def printable_json(text: str) -> str:
    """Escape control characters in one line of JSON, without a change of meaning.

    JSON itself does not require escapes for DEL, C1 and Unicode's marks.
    """
    return _STEERS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def shortened(text: str, length: int) -> str:
    """The beginning of a text, and the number of omitted characters."""
    return text if len(text) <= length else f"{text[:length]} ... ({len(text) - length:,} more characters)"


def signal_name(number: int) -> str:
    """Name of a signal: SIGKILL for 9. Real-time signals have numbers only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def duration(seconds: float) -> str:
    """Format seconds in the two largest units: 8.2s, 1m05s, 2h07m, 3d04h."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    for limit, size, unit, smaller, small_size in ((3600, 60, "m", "s", 1), (86400, 3600, "h", "m", 60)):
        if whole < 60:
            return f"{whole}s"
        if whole < limit:
            return f"{whole // size}{unit}{whole % size // small_size:02d}{smaller}"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def number(value: float) -> str:
    """Format a reward or similar number with three decimals."""
    return f"{value:.3f}"


def count_of(count: int, thing: str) -> str:
    """A count with its noun, in the plural unless it is 1."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def sparkline(values: Sequence[float], columns: int = CURVE_COLUMNS) -> str:
    """Draw a small curve. The scale is 0 to 1 if all values are within, else minimum to maximum.

    A column with a NaN or infinite value shows "?".
    """
    finite = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    columns = min(columns, len(values))
    edges = [len(values) * column // columns for column in range(columns + 1)]
    least, greatest = min(finite, default=0.0), max(finite, default=0.0)
    low, high = (0.0, 1.0) if least >= 0 and greatest <= 1 else (least, greatest)
    span = (high / 2 - low / 2) or 0.5  # halves, since the difference of two floats may be infinite

    def bar(part: Sequence[float]) -> str:
        if not all(map(math.isfinite, part)):
            return "?"
        share = fmean((value / 2 - low / 2) / span for value in part)
        return _BARS[min(len(_BARS) - 1, int(share * len(_BARS)))]

    return "".join(bar(values[start:end]) for start, end in itertools.pairwise(edges))
