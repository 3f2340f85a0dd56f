r"""Brings the LaTeX of an answer into one form: one way to write a fraction, a product, a space, a bracket."""

import re
import unicodedata
from typing import Final

MAX_BRACES: Final = 4  # around an answer

_REMOVED: Final = re.compile(
    r"\\(?:left|right|middle|big|Big|bigg|Bigg|bigl|bigr|Bigl|Bigr|displaystyle|textstyle|limits|nolimits|mathstrut"
    r"|large|Large|LARGE|huge|Huge|bf|rm|it|checkmark|blacksquare|qed)"
    r"(?![A-Za-z])|\\tag\{[^{}]*\}|\\color\{[^{}]*\}|(?<!\\)\\[()\[\]!]|(?<!\\)\$"
)
_SPACES: Final = re.compile(
    r"(?<!\\)\\[,;:> ]|\\(?:quad|qquad|thinspace|enspace)(?![A-Za-z])|\\hspace\*?\{[^{}]*\}|~|\s"
)
_ROW_SPACE: Final = re.compile(r"\\\\\s*\[[^\[\]]*(?:pt|em|ex|mm|cm)\]")  # the space after a row of a matrix
_STYLES: Final = re.compile(
    r"\\(?:mathbf|underline|ensuremath|boldsymbol|bm|mathit|mathsf|mathtt|textcolor\{[^{}]*\})\s*\{([^{}]*)\}"
)
_TEXTS: Final = re.compile(r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mbox|hbox|operatorname\*?)\s*\{([^{}]*)\}")
_NUMBER_WORDS: Final = re.compile(
    r"\\(?:text|mathrm|mbox)\s*\{\s*(hundred|thousand|million|billion|trillion|dozen)s?\s*\}"
)
_GROUPED: Final = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:(?:,|\{,\}|\\[,;: ]|~| )\d{3})+(?![\d,]|\{,\})")
_JOINED: Final = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")  # may be a list too
_CHARACTERS: Final = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "×": r"\cdot ", "·": r"\cdot ", "∙": r"\cdot ", "÷": "/", "⁄": "/",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "π": r"\pi ", "√": r"\sqrt ", "∞": r"\infty ", "∪": r"\cup ",
        "∛": r"\sqrt[3]", "≈": r"\approx ", "…": "...", "′": "'", "″": "''", "∨": r"\lor ", "：": ":", "；": ";",
        "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "±": r"\pm ", "°": r"^\circ ",
        "（": "(", "）": ")", "，": ",", "。": ".",
        "\u00a0": " ", "\u2009": " ", "\u202f": " ", "’": "'",
    }
)  # fmt: skip
_FUNCTIONS: Final = r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|log|lg"
_UNIT_TEXT: Final = r"\\(?:text|mathrm)\{[^{}]*\}"
_SUPERSCRIPTS: Final = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUPERSCRIPT: Final = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_VULGAR: Final = re.compile("[¼-¾⅐-⅞]")
_ROOT_SIGN: Final = re.compile(r"([√∛]) ?(\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z]))")
_CASES: Final = re.compile(r"\\begin\{(cases|aligned)\}((?:[^&]|& ?(?==))*)\\end\{\1\}")
_MODULUS: Final = re.compile(
    r"\(? ?(?:\\[bp]?mod(?![a-z])|\\(?:text|mathrm|operatorname)\{ ?mod ?\}|(?<![a-z\\])mod(?![a-z])) ?\{?(\w+)\}? ?\)?"
)
_LEAD: Final = (
    r"(?:(?:the )?(?:(?:final|correct|right) )?answer(?: is)?\b|(?:option|choice)\b|答案是?为?|答(?=:)|it(?: i|')s\b"
    r"|(?:about|approximately|approx\.?|roughly|around)(?= |\}|\\)) ?:? ?"
)
_LEADS: Final = (
    (re.compile(rf"^\\(?:text|textbf|mathrm|mbox) ?\{{ *{_LEAD}\}} *(?=\S)", re.IGNORECASE), ""),
    (
        re.compile(
            rf"^(\\(?:text|textbf|mathrm|mbox) ?\{{)? *{_LEAD}(?=[^ }}A-Za-z]|[A-Za-z](?![A-Za-z]))", re.IGNORECASE
        ),
        r"\1",
    ),
)
_REPEATS: Final = (
    (re.compile(r"(?<![\d.])\.\\(?=overline|bar|dot)"), r"0.\\"),
    (re.compile(r"(?<=[.\d])\\(?:overline|bar|dot) ?(?:\{(\d+)\}|(\d))"), r"\\overline{\1\2}"),
    (re.compile(r"(?<![\d.])(\d+\.)\((\d+)\)"), r"\1\\overline{\2}"),
    (re.compile(r"(\d{0,20}\.\d{0,20}?)(?:(\d)\2{2,}|(\d{2,12}?)\3+)\\ldots"), r"\1\\overline{\2\3}"),
)
_NAMED: Final = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?")


_RENAMED: Final = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac", "sfrac", "nicefrac"), r"\frac"),
    **dict.fromkeys(("dbinom", "tbinom"), r"\binom"),
    **dict.fromkeys(("times", "ast"), r"\cdot "),
    **dict.fromkeys(("leq", "leqslant"), r"\le "),
    **dict.fromkeys(("geq", "geqslant"), r"\ge "),
    **dict.fromkeys(("ldots", "dots", "cdots", "dotsc", "dotsb"), r"\ldots "),
    "neq": r"\ne ", "lt": "<", "gt": ">", "div": "/", "colon": ":", "varnothing": r"\emptyset ",
    "backslash": r"\setminus ",
    "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]", "lparen": "(", "rparen": ")", "degree": r"^\circ ",
    "varphi": r"\phi ", "varepsilon": r"\epsilon ", "vartheta": r"\theta ", "lg": r"\log_{10} ",
    "tg": r"\tan ", "ctg": r"\cot ", "arctg": r"\arctan ", "arcctg": r"\arccot ",
}  # fmt: skip
_COMMAND: Final = re.compile(r"\\([A-Za-z]+)")
# A text that each pattern needs, which is quicker to look for, the pattern, and what takes its place
_FORMS: Final = (
    ("frac", re.compile(r"\\frac ?(\d) ?(?=[\d{\\])"), r"\\frac{\1}"),
    (
        "frac",
        re.compile(r"\\frac ?(\\(?:pi|alpha|beta|theta)|(?<= )[A-Za-z]) ?(?=[\d{\\]|[A-Za-z](?![A-Za-z]))"),
        r"\\frac{\1}",
    ),
    ("frac", re.compile(r"(\\frac\{[^{}]*\}) ?(\d|[A-Za-z]|\\pi(?![A-Za-z]))"), r"\1{\2}"),
    ("^{", re.compile(r"(\\(?:text|mathrm)\{[^{}]*\^)\{(-?\d)\}"), r"\1\2"),
    ("frac", re.compile(rf"\\frac\{{({_UNIT_TEXT})\}}\{{({_UNIT_TEXT})\}}"), r"\1/\2"),
    ("/", re.compile(rf"({_UNIT_TEXT}) ?/ ?(?={_UNIT_TEXT})"), r"\1/"),
    ("sqrt", re.compile(r"(?<![A-Za-z\\])sqrt ?(?=[({\d])|\\sqrt +(?=[({])"), r"\\sqrt"),
    ("sqrt", re.compile(r"\\sqrt\(([^()]*)\)"), r"\\sqrt{\1}"),
    ("sqrt[", re.compile(r"(\\sqrt\[[^\[\]]*\]) ?([A-Za-z\d])"), r"\1{\2}"),
    ("", re.compile(rf"(?<![A-Za-z\\])({_FUNCTIONS})(?=[_({{^\\\d]| (?:[\d(\\]|[a-z](?![a-z])))"), r"\\\1"),
    ("{", re.compile(rf"\\(?:operatorname\*?|mathrm|text) ?\{{({_FUNCTIONS}|(?:arc)?c?tg|gcd|lcm)\}}"), r"\\\1 "),
    ("{", re.compile(r"\\(?:mathrm|text|mathit) ?\{([ei])\}"), r"\1"),
    ("_", re.compile(r"\\log_\{?e\}?(?![A-Za-z])"), r"\\ln "),
    ("pi", re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])"), r"\\pi "),
    ("...", re.compile(r"\.{3,}"), r"\\ldots "),
    ("<=", re.compile("<="), r"\\le "),
    (">=", re.compile(">="), r"\\ge "),
    ("bb{R}", re.compile(r"(?<=\\mathbb\{R\}) ?- ?(?=\\\{)"), r"\\setminus "),
    (r"\{", re.compile(r"\\\{ *\\\}"), r"\\emptyset "),
    ("mathbb", re.compile(r"\\mathbb ?([A-Z])(?![A-Za-z])"), r"\\mathbb{\1}"),
    ("circ", re.compile(r"\^\s*\{?\s*\\circ\s*\}?"), r"^\\circ "),
    ("circ", re.compile(r"\^\\circ +(?:([CF])(?![A-Za-z])|\\(?:text|mathrm)\{ ?([CF]) ?\})"), r"^\\circ \\text{\1\2}"),
    (
        "^",
        re.compile(
            r"\^ ?(?:\{ ?(?:\\top|\\intercal|T|\\(?:text|mathrm)\{T\}) ?\}"
            r"|\\(?:top|intercal)(?![A-Za-z])|\\(?:text|mathrm)\{T\})"
        ),
        "^T",
    ),
    ("^", re.compile(r"(?<=\d) ?\^ ?(?:\{ ?)?\\(?:text|mathrm) ?\{ ?(st|nd|rd|th) ?\}(?: ?\})?"), r"\\text{\1}"),
    ("^", re.compile(r"(?<=\d) ?\^ ?(?:\{ ?(st|nd|rd|th) ?\}|(st|nd|rd|th)(?![A-Za-z]))"), r"\\text{\1\2}"),
    ("overline", re.compile(r"\\overline ?\{ ?([A-Z]{2}) ?\}"), r"\1"),
    ("prime", re.compile(r"\^\{?\\prime\}?"), "'"),
    ('"', re.compile(r"(?<=\d)\""), "''"),
    ("choose", re.compile(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}"), r"\\binom{\1}{\2}"),
    ("over", re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}"), r"\\frac{\1}{\2}"),
    ("C_", re.compile(r"(?:\{\})?[_^](?:\{([^{}]*)\}|(\w)) ?C_(?:\{([^{}]*)\}|(\w))(?!\^)"), r"\\binom{\1\2}{\3\4}"),
    ("C^", re.compile(r"(?<![A-Za-z\\])C\^(?:\{([^{}]*)\}|(\w))_(?:\{([^{}]*)\}|(\w))"), r"\\binom{\3\4}{\1\2}"),
    ("C_", re.compile(r"(?<![A-Za-z\\])C_(?:\{([^{}]*)\}|(\w))\^(?:\{([^{}]*)\}|(\w))"), r"\\binom{\1\2}{\3\4}"),
)
_INTEGER: Final = re.compile("[0-9]+")
_BOLD: Final = re.compile(r"^[ *_`]*\*\*|\*\*[ *_`.]*$")
_END: Final = " \t\n.,;:!?。"
_SPACE: Final = re.compile(r" +")
_ARTICLE: Final = re.compile(r"^(?:an?|the) (?=[a-z]{2})")


def normal(text: str, *, joined: bool = True) -> str:
    r"""Return an answer's LaTeX without what changes only its look.

    Dollar signs of mathematics, sizes, fonts, `**` around the answer, a lead ("the answer is"), a final full stop and
    an approximation behind an exact value go. 2**3 becomes 2^3, \dfrac becomes \frac, \times becomes \cdot, digit
    groups are joined (1,234 is 1234), 0.333... becomes 0.\overline{3}, and every kind of space becomes one space.
    \text{...} stays.

    Args:
        text: An answer.
        joined: Whether digits with a comma alone between them, such as 100,200, are one number.
    """
    if _INTEGER.fullmatch(text):
        return text
    if not text.isascii():
        text = _in_ascii(text)
    if "\\" in text:
        text = re.sub(r"\\! ?", "", _ROW_SPACE.sub(r"\\\\", text))
    if joined or not _JOINED.search(text):
        text = _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = _without_markup(text).replace("{,}", ",").replace("{:}", ":").replace("**", "^")
    text = _SPACES.sub(" ", _REMOVED.sub("", text))
    text = _COMMAND.sub(_renamed, text)
    for needed, pattern, replacement in _FORMS:
        if needed in text:
            text = pattern.sub(replacement, text)
    text = _COMMAND.sub(_renamed, text)
    text = _NUMBER_WORDS.sub(r" \1", _STYLES.sub(r"\1", text))
    for pattern, replacement in _LEADS:
        text = pattern.sub(replacement, text)
    text = _without_ending(_SPACE.sub(" ", text).strip())
    for _ in range(MAX_BRACES):
        if text.startswith("{") and text.endswith("}") and balanced(text[1:-1]):
            text = text[1:-1].strip()
    if "." in text:
        for pattern, replacement in _REPEATS:
            text = pattern.sub(replacement, text)
    if "approx" in text:
        text = _without_approximation(text)
    if "cases" in text or "aligned" in text:
        text = _CASES.sub(lambda match: ", ".join(match[2].replace("&", "").strip().strip("\\").split(r"\\")), text)
    if "begin" not in text:
        text = text.replace(r"\\", ", ")
    if "equiv" in text or "(mod" in text:
        text = _MODULUS.sub(r" \\pmod{\1}", text)
    return text


def _renamed(match: re.Match[str]) -> str:
    return _RENAMED.get(match[1], match[0])


def _in_ascii(text: str) -> str:
    """Write the letters and signs of Unicode as LaTeX: ² is ^{2}, √5 is \\sqrt{5}, ⅓ is \\frac{1}{3}."""
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _VULGAR.sub(
        lambda match: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", match[0]).split("⁄")), text
    )
    text = _ROOT_SIGN.sub(lambda match: r"\sqrt" + "[3]" * (match[1] == "∛") + f"{{{match[2]}}}", text)
    return text.translate(_CHARACTERS)


def _without_markup(text: str) -> str:
    """Remove the marks of Markdown around an answer."""
    text = _BOLD.sub("", text)
    while len(text) > 2 and text[0] == text[-1] and text[0] in "*_`":
        text = text[1:-1]
    return text


def _without_ending(text: str) -> str:
    """Remove a full stop and the like at the end; the sign of a factorial and the dots of more digits stay."""
    text = re.sub(r"\\{1,2}$", "", text)  # of a space or a line at the end
    stripped = text.rstrip(_END)
    # "5!" is a factorial, "5." is not
    while text[len(stripped) :].startswith("!"):
        stripped += "!"
    return stripped.strip()


def _without_approximation(text: str) -> str:
    r"""The exact value of \frac{1}{3} \approx 0.333; x = 3.2 of x \approx 3.2."""
    exact, _, rounded = text.partition(r"\approx")
    exact, rounded = exact.strip(), rounded.strip()
    if not exact:
        return rounded
    return f"{exact}={rounded}" if _NAMED.fullmatch(exact) and exact != r"\pi" else exact


def balanced(text: str) -> bool:
    """Whether every bracket that closes was opened before, and all are closed; kinds do not matter."""
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    return depth == 0


NUMBERS: Final = {
    word: value for value, word in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
        " seventeen eighteen nineteen".split()
    )
} | {
    word: value
    for value, word in zip(
        range(20, 100, 10), "twenty thirty forty fifty sixty seventy eighty ninety".split(), strict=True
    )
}  # fmt: skip
_SCALES: Final = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_CALLED: Final = (
    (
        re.compile(r"(?:there (?:is|are) )?no (?:real |such )?(?:solutions?|roots?)|(?:the )?empty set|none"),
        r"\emptyset",
    ),
    (re.compile(r"(?:(?:the )?set of )?(?:all )?(?:the )?real(?: number)?s|x is any real number"), r"\mathbb{R}"),
    (re.compile(r"(?:(?:the )?set of )?(?:all )?(?:the )?integers"), r"\mathbb{Z}"),
    (re.compile(r"(?:plus )?infinity|infinitely many(?: solutions)?|infinite"), r"\infty"),
    (re.compile(r"(?:it )?does not exist|dne"), r"\text{DNE}"),
)

_ALL_BUT: Final = re.compile(
    r"(?:(?:the )?set of )?all real numbers,? (?:except|other than|but)(?: for)? (?:[a-z] ?= ?)?(-?[\d./]+|\\frac\d\d)"
)


def called(text: str) -> str:
    r"""The sign of what an answer names: 3 of three, \emptyset of "no solution"; another text as it is."""
    if not (text.startswith((r"\text", r"\mathrm", r"\mbox")) or text[:1].isalpha()) or len(text) > 60:
        return text
    plain = words(text)
    if (number := _number_in_words(plain)) is not None:
        return str(number)
    if excepted := _ALL_BUT.fullmatch(plain):
        return rf"\mathbb{{R}}\setminus\{{{excepted[1]}\}}"
    return next((sign for pattern, sign in _CALLED if pattern.fullmatch(plain)), text)


def _number_in_words(text: str) -> int | None:
    """Value of forty-two, one hundred and five, negative seven; None for another text, such as one two."""
    sign = -1 if text.startswith(("negative ", "minus ")) else 1
    tokens = re.split("[ -]", text.partition(" ")[2] if sign < 0 else text)
    total, scale = 0, 10**15
    while tokens:
        index = next((place for place, token in enumerate(tokens) if token in _SCALES), len(tokens))
        part = _below_thousand(tokens[:index]) if index else 1  # "thousand" is one thousand
        next_scale = _SCALES[tokens[index]] if index < len(tokens) else 1
        if part is None or next_scale >= scale or (not index and total):
            return None
        total, scale, tokens = total + part * next_scale, next_scale, tokens[index + 1 :]
        if tokens[:1] == ["and"]:
            tokens = tokens[1:] or ["and"]
    return sign * total


def _below_thousand(tokens: list[str]) -> int | None:
    """Value of words such as twelve hundred and five, up to 9,999; None for other words."""
    if "hundred" in tokens:
        index = tokens.index("hundred")
        hundreds = _below_hundred(tokens[:index]) if index else 1
        rest = tokens[index + 2 :] if tokens[index + 1 : index + 2] == ["and"] else tokens[index + 1 :]
        number = _below_hundred(rest) if rest else 0
        if not hundreds or hundreds % 10 == 0 or number is None or (not number and rest) or tokens[-1] == "and":
            return None
        return 100 * hundreds + number
    return _below_hundred(tokens)


def _below_hundred(tokens: list[str]) -> int | None:
    values = [NUMBERS.get(token) for token in tokens]
    if len(values) == 1:
        return values[0]
    if len(values) == 2 and values[0] in range(20, 100, 10) and values[1] in range(1, 10):
        return sum(value for value in values if value)
    return None


def words(text: str) -> str:
    r"""Return a text in lower case without LaTeX's text commands, a leading article, and marks at its ends."""
    text = _TEXTS.sub(r" \1 ", text)
    text = re.sub(r"[{}]", "", text)
    plain = _SPACE.sub(" ", text).strip(" .,;:!?\"'()").lower()
    return _ARTICLE.sub("", plain.removesuffix(" only"))


def is_text(text: str) -> bool:
    r"""Whether the whole answer is \text{...}."""
    return _TEXTS.fullmatch(text) is not None


def without_text_commands(text: str) -> str:
    r"""Replace \text{...} by its content."""
    return _TEXTS.sub(r"\1", text)


def split_top(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split a text where a separator stands outside of all brackets."""
    parts: list[str] = []
    depth = start = position = 0
    while position < len(text):
        character = text[position]
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif depth == 0 and (match := separator.match(text, position)) and match.end() > position:
            parts.append(text[start:position])
            start = position = match.end()
            continue
        position += 1
    parts.append(text[start:])
    return [part.strip() for part in parts]
