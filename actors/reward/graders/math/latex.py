r"""Brings the LaTeX of an answer into one form: one way to write a fraction, a product, a space, a bracket."""

import re
from typing import Final

_REMOVED: Final = re.compile(
    r"\\(?:left|right|middle|big|Big|bigg|Bigg|bigl|bigr|Bigl|Bigr|displaystyle|textstyle|limits|nolimits|mathstrut"
    r"|large|Large|LARGE|huge|Huge|bf|rm|it)"
    r"(?![A-Za-z])|\\color\{[^{}]*\}|(?<!\\)\\[()\[\]!]|(?<!\\)\$"
)
_SPACES: Final = re.compile(
    r"(?<!\\)\\[,;:> ]|\\(?:quad|qquad|thinspace|enspace)(?![A-Za-z])|\\hspace\*?\{[^{}]*\}|~|\s"
)
_ROW_SPACE: Final = re.compile(r"\\\\\s*\[[^\[\]]*(?:pt|em|ex|mm|cm)\]")  # the space after a row of a matrix
_STYLES: Final = re.compile(r"\\(?:mathbf|boldsymbol|bm|mathit|mathsf|mathtt|textcolor\{[^{}]*\})\s*\{([^{}]*)\}")
_TEXTS: Final = re.compile(r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mbox|hbox|operatorname\*?)\s*\{([^{}]*)\}")
_NUMBER_WORDS: Final = re.compile(
    r"\\(?:text|mathrm|mbox)\s*\{\s*(hundred|thousand|million|billion|trillion|dozen)s?\s*\}"
)
_GROUPED: Final = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,|\{,\}|\\,|\\ | )\d{3})+(?![\d,]|\{,\})")
_CHARACTERS: Final = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "×": r"\cdot ", "·": r"\cdot ", "∙": r"\cdot ", "÷": "/", "⁄": "/",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "π": r"\pi ", "√": r"\sqrt ", "∞": r"\infty ", "∪": r"\cup ",
        "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "±": r"\pm ", "°": r"^\circ ", "²": "^2", "³": "^3",
        "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "（": "(", "）": ")", "，": ",", "。": ".",
        "\u00a0": " ", "\u2009": " ", "\u202f": " ", "’": "'",
    }
)  # fmt: skip
_COMMANDS: Final = (
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:times|ast)(?![A-Za-z])"), r"\\cdot "),
    (re.compile(r"\\div(?![A-Za-z])"), "/"),
    (re.compile(r"\\(?:leq|leqslant)(?![A-Za-z])"), r"\\le "),
    (re.compile(r"\\(?:geq|geqslant)(?![A-Za-z])"), r"\\ge "),
    (re.compile(r"\\neq(?![A-Za-z])"), r"\\ne "),
    (re.compile(r"\\(?:varnothing)(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\\{ *\\\}"), r"\\emptyset "),
    (re.compile(r"\\mathbb ?([A-Z])(?![A-Za-z])"), r"\\mathbb{\1}"),
    (re.compile(r"\\lbrack(?![A-Za-z])"), "["),
    (re.compile(r"\\rbrack(?![A-Za-z])"), "]"),
    (re.compile(r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![A-Za-z])"), r"^\\circ "),
    (re.compile(r"\\[dtb]?binom"), r"\\binom"),
)
_BOLD: Final = re.compile(r"^[ *_`]*\*\*|\*\*[ *_`.]*$")
_END: Final = " \t\n.,;:!?。"
_SPACE: Final = re.compile(r" +")


def normal(text: str) -> str:
    r"""Return an answer's LaTeX without what changes only its look.

    Dollar signs of mathematics, sizes, bold face, `**` around the answer and a final full stop go. 2**3 becomes 2^3,
    \dfrac becomes \frac, \times becomes \cdot, digit groups are joined (1,234 is 1234), and every kind of space becomes
    one space. \text{...} stays.
    """
    text = _ROW_SPACE.sub(r"\\\\", text.translate(_CHARACTERS)).replace(r"\!", "")
    text = _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = _BOLD.sub("", text.replace("{,}", ",")).replace("**", "^")
    text = _SPACES.sub(" ", _REMOVED.sub("", text))
    for pattern, replacement in _COMMANDS:
        text = pattern.sub(replacement, text)
    text = _NUMBER_WORDS.sub(r" \1", _STYLES.sub(r"\1", text))
    text = _SPACE.sub(" ", text).strip()
    text = re.sub(r"\\{1,2}$", "", text)  # of a space or a line at the end
    stripped = text.rstrip(_END)
    # "5!" is a factorial, "5." is not
    while text[len(stripped) :].startswith("!"):
        stripped += "!"
    return stripped.strip()


def words(text: str) -> str:
    r"""Return a text in lower case without LaTeX's text commands, brackets around it, and punctuation at its ends."""
    text = _TEXTS.sub(r" \1 ", text)
    text = re.sub(r"[{}]", "", text)
    return _SPACE.sub(" ", text).strip(" .,;:!?\"'()").lower()


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
