r"""Splits an answer into a number and its unit: 5 feet, 5\text{ cm}^2, 45^\circ, \$5, 50\%."""

import re
from fractions import Fraction
from typing import Final, NamedTuple

from actors.reward.graders.math.latex import NUMBERS, without_text_commands

_SYNONYMS: Final = {
    "centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "millimetre": "mm", "kilometer": "km",
    "kilometre": "km", "meter": "m", "metre": "m", "inch": "in", "inche": "in", "foot": "ft", "feet": "ft",
    "yard": "yd", "mile": "mi", "gram": "g", "kilogram": "kg", "milligram": "mg", "pound": "lb", "ounce": "oz",
    "liter": "l", "litre": "l", "milliliter": "ml", "millilitre": "ml", "second": "s", "sec": "s", "minute": "min",
    "hour": "h", "hr": "h", "degree": "degree", "deg": "degree", r"^\circ": "degree", "dollar": "$", "usd": "$",
    r"\$": "$", "cent": "cent", "square": "square", "sq": "square", "cubic": "cubic", "cu": "cubic", "gal": "gallon",
    "ton": "ton", "tonne": "tonne", "volt": "v", "watt": "w", "joule": "j", "newton": "n", "hertz": "hz",
    "day": "day", "week": "week", "month": "month", "year": "year", "yr": "year", "unit": "unit", "radian": "rad",
}  # fmt: skip
# Letters that are a unit only after a space or in \text{...}; without one, 5m is a product
_SHORT: Final = frozenset(
    {"cm", "mm", "km", "m", "in", "ft", "yd", "mi", "g", "kg", "mg", "lb", "oz", "l", "ml", "s", "min", "h", "mph"}
    | {"kph", "rad", "hz", "kw", "kwh", "am", "pm", "sq", "cu"}
)
_NEITHER: Final = frozenset(
    {"and", "or", "to", "if", "for", "is", "mod", "million", "billion", "trillion", "thousand", "hundred", "dozen"}
    | {"not", "squared", "cubed", "plus", "minus", "over", "more", "less", "least", "most", "than", "factorial"}
    | set(NUMBERS)
    | {"half", "halve", "third", "quarter", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"}
    | {"hundredth", "thousandth"}
    | {"pi", "sin", "cos", "tan", "log", "ln", "exp", "sqrt", "max", "infinity", "inf", "base"}
)
_UNIT_WORD: Final = re.compile(r"[A-Za-z]+")
_POWER: Final = re.compile(r"\^\{?([23])\}?")
_TEXT: Final = re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
_TAIL: Final = re.compile(  # a name behind a slash belongs to a unit only with one before the slash: x/m is a quotient
    r"(?P<unit>(?!/?[A-Za-z])(?: ?\\(?:text|textbf|textrm|mathrm|mbox|operatorname)\s*\{[^{}]*\}(?:\^\{?-?\d\}?)?"
    r"| ?\^\\circ(?: $)?| ?\\%| ?%| ?\\\$| ?[€£¥¢]| ?[一-鿿]{1,3}+| ?\([一-鿿]{1,3}\)"
    r"| [A-Za-z]+(?:\^\{?-?\d\}?)?\.?|(?<=[A-Za-z}])/(?=[A-Za-z\\])"
    r"|(?<=/)[A-Za-z]+(?:\^\{?-?\d\}?)?)+)$"
)
_ONE_LETTER: Final = re.compile(r" [A-Za-z](?:\^\{?-?\d\}?)?")  # behind another one, r^2 h, it is a factor
_VARIABLE: Final = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
_CURRENCY: Final = re.compile(r"^(?P<sign>-?) ?(?:US ?(?=\\?\$))?(?P<unit>\\\$|\$|USD|[€£¥])")
_NO_UNIT: Final = re.compile("[以或和不非多余至约上下到]")  # "or", "not", "more than" in Chinese
_PRIMES: Final = re.compile(r"(?P<number>[\d.]+|\\frac\{\d+\}\{\d+\}) ?(?P<primes>'{1,2})")
_MINUTES: Final = re.compile(r"([\d.]+) ?(?P<unit>\^\\circ|') ?([\d.]+)(?:'(?: ?([\d.]+)'')?|'')")
_COMPOUND: Final = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)\.?,? (?:and )?(\d+(?:\.\d+)?) ?([A-Za-z]+)\.?")
_SIZES: Final[dict[str, tuple[str, Fraction]]] = {  # units of one quantity, each in terms of one of them
    unit: (base, Fraction(size))
    for base, units in {
        "m": {"mm": "1/1000", "cm": "1/100", "dm": "1/10", "m": 1, "km": 1000},
        "ft": {"in": "1/12", "ft": 1, "yd": 3, "mi": 5280},
        "g": {"mg": "1/1000", "g": 1, "kg": 1000, "tonne": 10**6},
        "lb": {"oz": "1/16", "lb": 1},
        "s": {"ms": "1/1000", "s": 1, "min": 60, "h": 3600, "day": 86_400, "week": 604_800},
        "month": {"month": 1, "year": 12, "decade": 120, "century": 1200},
        "l": {"ml": "1/1000", "l": 1},
        "gallon": {"pint": "1/8", "quart": "1/4", "gallon": 1},
        "$": {"cent": "1/100", "$": 1},
        "w": {"w": 1, "kw": 1000},
    }.items()
    for unit, size in units.items()
}
_FACTOR: Final = re.compile(r"(?P<slash>/?) ?(?P<name>[a-z]+|[$€£¥]|[一-鿿]+)(?:\^(?P<power>-?\d))?")
MAX_FACTORS: Final = 10  # of a unit that is converted
_TRIGONOMETRY: Final = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")


_GLUED: Final = re.compile(r"(-?\d+(?:\.\d+)?)([A-Za-z]{1,3}(?:\^\{?[23]\}?)?)")


class Quantity(NamedTuple):
    """A number as it was written, and its unit."""

    number: str
    unit: str  # in one spelling; "" for a number alone
    percent: bool = False


def quantity(text: str) -> Quantity:
    """Split a unit off an answer in the form of `latex.normal`.

    The number may be any expression: the caller decides whether it is one. Words that belong to mathematics (or, sin,
    million) are not units. 5' is 5 feet, 22^\\circ 30' is 22.5 degrees, and 7 ft 6 in is 7.5 feet.
    """
    if "'" in text and (parts := _MINUTES.fullmatch(text)):
        feet = parts["unit"] == "'"
        number = f"{parts[1]}+{parts[3]}/{12 if feet else 60}+{parts[4] or 0}/3600"
        return Quantity(number=number, unit="ft" if feet else "degree")
    if "'" in text and (length := _PRIMES.fullmatch(text)):
        return Quantity(number=length["number"], unit="ft" if length["primes"] == "'" else "in")
    if text[:1].isdigit() or text.startswith("\\"):
        compound = _COMPOUND.fullmatch(_spaced(text))
        units = (unit_name(compound[2]), unit_name(compound[4])) if compound else ("", "")
        parts = Fraction(60) if units == ("degree", "min") else conversion(*units)
        if compound and parts is not None and parts > 1:
            return Quantity(number=f"{compound[1]}+{compound[3]}/({parts})", unit=units[0])
    unit = ""
    if currency := _CURRENCY.match(text):
        text, unit = currency["sign"] + text[currency.end() :].strip(), currency["unit"]
    tail = _TAIL.search(text)
    if tail and tail.start() > 0 and text[tail.start() - 1] != "," and _is_unit(tail["unit"], text[: tail.start()]):
        text, unit = text[: tail.start()].strip(), f"{unit} {tail['unit']}"
    if unit.strip() == r"^\circ" and _TRIGONOMETRY.search(text):  # of the argument
        text, unit = text + unit, ""
    percent = "%" in unit or "percent" in unit.lower()
    plain = re.sub(r"\\?%|\bper ?cents?\b|\bpercentage\b", " ", unit, flags=re.IGNORECASE)
    return Quantity(number=text, unit=unit_name(plain), percent=percent)


def glued(text: str, other: Quantity) -> Quantity:
    """Read 5cm beside a number, and 5m beside 5 m. Beside a number alone, 5m is a product."""
    match = _GLUED.fullmatch(text)
    letters = match[2].rstrip("^{}23").lower() if match else ""
    if match is None or letters not in _SHORT or not (other.unit or len(letters) > 1):
        return Quantity(number=text, unit="")
    return Quantity(number=match[1], unit=unit_name(match[2]))


def conversion(unit: str, other: str) -> Fraction | None:
    """How many of the other unit make one: 60 for h and min, 10000 for m^2 and cm^2; None if they cannot."""
    if unit == other:
        return Fraction(1)
    sizes = _size(unit), _size(other)
    if sizes[0] is None or sizes[1] is None or sizes[0][1] != sizes[1][1]:
        return None
    return sizes[0][0] / sizes[1][0]


def _size(unit: str) -> tuple[Fraction, dict[str, int]] | None:
    """Size of a unit in powers of base units; None for one that is no product or quotient of names."""
    text = unit.replace("mph", "mi/h").replace("kph", "km/h")
    factors = [*_FACTOR.finditer(text)]
    slashes = [index for index, factor in enumerate(factors) if factor["slash"]]
    if not 0 < len(factors) <= MAX_FACTORS or "".join(factor[0] for factor in factors) != text:
        return None
    if slashes not in ([], [len(factors) - 1]):  # j/kg k may have k on either side
        return None
    size, powers = Fraction(1), dict[str, int]()
    for factor in factors:
        base, of_one = _SIZES.get(factor["name"], (factor["name"], Fraction(1)))
        power = int(factor["power"] or 1) * (-1 if factor["slash"] else 1)
        size *= of_one**power
        powers[base] = powers.get(base, 0) + power
    return size, powers


def _spaced(text: str) -> str:
    return " ".join(_TEXT.sub(r" \1 ", text).split())


def unit_name(text: str) -> str:
    """Return a unit in one spelling: singular, abbreviated, powers as exponents."""
    text = (
        without_text_commands(text.replace(r"^\circ", " degree ")).replace(r"\$", " dollar ").replace("$", " dollar ")
    )
    text = re.sub(r"\bper\b", "/", text.lower())
    text = _POWER.sub(r"^\1", text)
    found: list[str] = []
    text = re.sub(r" ?\b([a-z]+)\^\{?-(\d)\}?", r"/\1^\2", text).replace("^1", "").replace("¢", " cent ")
    for token in re.findall(r"[a-z]+|\^-?\d|/|[€£¥]|[一-鿿]+", text):
        word = _singular(token) if token.isalpha() else token
        found.append(_SYNONYMS.get(word, word))
    return _with_exponents(found)


def _with_exponents(found: list[str]) -> str:
    """Write square feet as ft^2, and drop what says no unit."""
    named: list[str] = []
    power = ""
    for word in found:
        if word in ("square", "cubic"):
            power = "^2" if word == "square" else "^3"
            continue
        named.append(word)
        if power and word.isalpha():
            named.append(power)
            power = ""
    joined = "".join(f" {word}" if word.isalpha() and index else word for index, word in enumerate(named))
    return re.sub(r"^(?:of|a|an|the) ", "", joined.replace("mi / h", "mph").replace("mi/ h", "mph").strip())


def _singular(word: str) -> str:
    if word in _SYNONYMS or word in _SHORT or word.endswith("ss"):
        return word
    return word[:-1] if word.endswith("s") and len(word) > 2 else word


def _is_unit(text: str, number: str) -> bool:
    if _NO_UNIT.search(text) or (_ONE_LETTER.fullmatch(text) and _VARIABLE.search(number)):
        return False
    inside = _TEXT.sub(lambda match: f" {match[1]} ", text)
    found = [word.lower() for word in _UNIT_WORD.findall(inside.replace(r"^\circ", ""))]
    if any(word in _NEITHER or _singular(word) in _NEITHER for word in found):
        return False
    in_text = _TEXT.search(text) is not None
    return all(in_text or len(word) > 2 or word in _SHORT for word in found)
