r"""Further readings of two answers: 100,200 as a list, a whole number under another name, one value said twice."""

import re
from collections.abc import Iterator
from typing import Final

from actors.reward.graders.math.algebra import numerical_value
from actors.reward.graders.math.latex import normal, split_top
from actors.reward.graders.math.units import quantity

MAX_SAID: Final = 20  # values behind "or"

LIST: Final = re.compile(
    r"[,;、或和]| ?\\(?:text|mathrm|mbox)\s*\{\s*(?:[,;]|,? ?(?:and|or))\s*\}| (?:and|or) |\\l(?:or|and)(?![A-Za-z])"
)
EQUALS: Final = re.compile(r"(?<![<>!\\:])=(?!=)")

_DOMAIN: Final = re.compile(
    r",? ?(?:\\text ?\{[ ,]*(?:for|where|with)?[ ,]*\} ?)?[(\[]? ?"
    r"(?:(?P<letter>[A-Za-z]) ?\\in ?(?P<set>\\mathbb\{[NZ]\}|[NZ])"
    r"|(?P<name>[a-z]) ?\\text ?\{[ ]?is an integer ?\}) ?[)\]]?$"
)
_PARAMETERS: Final = re.compile(r"(?<![A-Za-z\\])[kmnl](?![A-Za-z])")
_EITHER: Final = re.compile(r" ?\\(?:text|mathrm|mbox)\s*\{\s*,? ?or\s*\}| or |\\lor(?![A-Za-z])")
_APPROX: Final = re.compile(r"\\approx(?![A-Za-z])|≈")
_DECIMAL: Final = re.compile(r"-?\d{1,9}(?:\.(\d{1,9}))?")
_LEADING_ZERO: Final = re.compile(r",0\d")

_FOREIGN: Final = re.compile(  # 1.234,5 and 0,25; 1.234.567; 1'234'567; 12,34,567
    r"(?P<sign>-?)(?:(?P<points>\d{1,3}(?:\.\d{3})+),(?P<behind>\d{1,9})|(?P<whole>\d{1,9}),(?P<part>\d{1,9})"
    r"|(?P<grouped>\d{1,3}(?:\.\d{3}){2,}|\d{1,3}(?:'\d{3})+|\d{1,2}(?:,\d{2})+,\d{3}))"
)
_SENTENCE: Final = re.compile(  # "The value of n is" and "Total:" before the answer
    r"\\(?:text|textbf|mathrm|mbox) ?\{(?P<first>[A-Za-z,' -]+:?) ?\}"
    r"(?: ?(?:[A-Za-z]|[A-Z]{2,4})(?: ?\\text ?\{ ?(?P<then>[A-Za-z' -]+) ?\}| ?=(?=[^=])))?"
)
_LEADS_ON: Final = re.compile(r"(?:\b(?:is|are|equals|so|thus|hence|therefore)|:) ?,?$", re.IGNORECASE)
_LEADING: Final = frozenset(  # a sentence of other words may speak of another value: "its reciprocal is", "it is not"
    "a an and answer answers are area biggest by correct count desired distance equals exact expected expression final"
    " for found greatest have height hence in integer integers is largest length maximum mean median minimum"
    " number numbers of our perimeter possible price probability product radius required result root roots side"
    " simplified slope smallest so solution solutions speed sum that the therefore thus time total value values volume"
    " we width".split()
)
_CONSTANT: Final = re.compile(r"\+ ?([cC])$")

Pair = tuple[str, str]


def other_readings(response: str, label: str, ours: str, theirs: str) -> Iterator[list[Pair]]:
    """Yield what else two answers may mean: each reading is pairs of texts that must all be equal.

    Args:
        response: An answer.
        label: The right one.
        ours: The answer in the form of `latex.normal`.
        theirs: The right one in that form.
    """
    yield from _lists(response, label, ours, theirs)
    yield from _families(ours, theirs)
    yield from _said_twice(ours, theirs)
    yield from _rounded(response, theirs)
    yield from _foreign(ours, theirs)
    yield from _constants(ours, theirs)
    yield from _led(ours, theirs)


def _lists(response: str, label: str, ours: str, theirs: str) -> Iterator[list[Pair]]:
    """100,200 is the list 100, 200 of the other side. 1,000 is not a list of 1 and 0."""
    apart = normal(response, joined=False), normal(label, joined=False)
    if (apart[0] == ours) != (apart[1] == theirs) and not any(map(_LEADING_ZERO.search, apart)):
        yield [apart]


def _families(ours: str, theirs: str) -> Iterator[list[Pair]]:
    r"""x = \pi/4 + k\pi, k \in \mathbb{Z} is \pi/4 + n\pi of the other side: a whole number has any letter."""
    if not any(sign in text for text in (ours, theirs) for sign in (r"\in", "integer")):
        return
    domains = _DOMAIN.search(ours), _DOMAIN.search(theirs)
    if domains == (None, None) or len({"N" in (match["set"] or "") for match in domains if match}) > 1:
        return
    texts = [text[: match.start()] if match else text for text, match in zip((ours, theirs), domains, strict=True)]
    letters = [
        {match["letter"] or match["name"]} if match else {*_PARAMETERS.findall(text)}
        for text, match in zip(texts, domains, strict=True)
    ]
    if not all(texts) or [len(each) for each in letters] != [1, 1]:
        return
    name, other = letters[0].pop(), letters[1].pop()
    if name != other:
        if re.search(rf"(?<![A-Za-z\\]){name}(?![A-Za-z])", texts[1]):
            return
        texts[1] = re.sub(rf"(?<![A-Za-z\\]){other}(?![A-Za-z])", name, texts[1])
    yield [(texts[0], texts[1])]


def _said_twice(ours: str, theirs: str) -> Iterator[list[Pair]]:
    r"""2/5 or 40\% says one value twice, and the other side is that value."""
    for text, value in ((ours, theirs), (theirs, ours)):
        parts = split_top(text, _EITHER) if "or" in text else []
        if 1 < len(parts) <= MAX_SAID and all(parts) and len(split_top(value, LIST)) == 1:
            yield [(part, value) for part in parts]


def _rounded(response: str, theirs: str) -> Iterator[list[Pair]]:
    r"""\sqrt{10} \approx 3.16 answers 3.16, since the exact value rounds to it."""
    if "approx" not in response and "≈" not in response:
        return
    parts = [normal(part) for part in _APPROX.split(response)]
    if len(parts) != 2 or not all(parts):
        return
    exact, rounded = (quantity(split_top(part, EQUALS)[-1]).number for part in parts)
    decimal = _DECIMAL.fullmatch(rounded)
    if decimal is None or (value := numerical_value(exact)) is None:
        return
    if abs(value - float(rounded)) <= 0.5000001 * 10 ** -len(decimal[1] or ""):
        yield [(parts[1], theirs)]


def _foreign(ours: str, theirs: str) -> Iterator[list[Pair]]:
    """0,5 and 1.234,5 have a decimal comma, 1'234'567 and 12,34,567 groups, if the label is a number with a point."""
    label = quantity(theirs)
    answer = quantity(ours)
    found = _FOREIGN.fullmatch(answer.number)
    if found is None or (answer.unit and label.unit and answer.unit != label.unit) or "," in label.number:
        return
    if found["grouped"]:
        plain = re.sub(r"\D", "", found["grouped"])
    elif found["points"]:
        plain = f"{found['points'].replace('.', '')}.{found['behind']}"
    elif "." in label.number:
        plain = f"{found['whole']}.{found['part']}"
    else:
        return
    yield [(found["sign"] + plain, label.number)]


def _constants(ours: str, theirs: str) -> Iterator[list[Pair]]:
    """The constant of an integral is C or c."""
    left, right = _CONSTANT.search(ours), _CONSTANT.search(theirs)
    if left and right and left[1] != right[1]:
        texts = ours[: left.start()].strip(), theirs[: right.start()].strip()
        if all(texts) and not any(re.search(r"(?<![A-Za-z\\])[cC](?![A-Za-z])", text) for text in texts):
            yield [texts]


def _led(ours: str, theirs: str) -> Iterator[list[Pair]]:
    """The answer behind a sentence that ends in "is" or ":", and has only words that name the value."""
    if (found := _SENTENCE.match(ours)) is None:
        return
    words = re.findall(r"[A-Za-z'-]+", f"{found['first']} {found['then'] or ''}")
    if not _LEADING.issuperset(word.lower() for word in words):
        return
    said = found["then"] or found["first"]
    answer = ours[found.end() :].strip()
    if answer and (_LEADS_ON.search(said.strip()) or found[0].endswith("=")):
        yield [(answer, theirs)]
