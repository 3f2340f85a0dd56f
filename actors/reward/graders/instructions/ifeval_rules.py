"""Rules of IFEval that if-verifiable checks wrongly, checked by the words of their instruction."""

import json
import re
import string
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any, Final

from actors.reward.graders.instructions.package import language_of

MIN_WORDS: Final = 8  # that the detector of languages needs


Arguments = Mapping[str, Any]
EDGES: Final = string.punctuation + "“”‘’…–— "
_COMMAS: Final = ",،、，"
_OPTIONS: Final = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def words_in(text: str) -> list[str]:
    """The words between spaces, without punctuation around them."""
    return [word for part in text.split() if (word := part.strip(EDGES))]


def _plain(text: str) -> str:
    """In lower case, with accents as parts of their letters and quotation marks as on a keyboard."""
    signs = text.translate({ord(sign): "'" for sign in "‘’"} | {ord(sign): '"' for sign in "“”"})
    return unicodedata.normalize("NFC", signs).lower()


def _compared(number: int, relation: str, wanted: int) -> bool:
    return number < wanted if relation == "less than" else number >= wanted


def _language(arguments: Arguments, text: str) -> bool:
    """Package: text without words passes."""
    return language_of(text) == arguments["language"]


def _english_capital(_: Arguments, text: str) -> bool:
    """Package: its detector takes "THE DOG RUNS FAST" for German, since it learned from texts in lower case."""
    found = language_of(text.lower())
    few = len(text.split()) < MIN_WORDS  # too few for the detector
    return text.isupper() and (found == "en" or (few and language_of(text) == "en"))


def _keywords(arguments: Arguments, text: str) -> bool:
    """Package: keywords are patterns, so "C++" raises."""
    return all(_plain(word) in _plain(text) for word in arguments["keywords"])


def _keyword_frequency(arguments: Arguments, text: str) -> bool:
    """Package: the keyword is a pattern."""
    number = _plain(text).count(_plain(arguments["keyword"].strip()))
    return _compared(number, arguments["relation"], arguments["frequency"])


def _forbidden_words(arguments: Arguments, text: str) -> bool:
    """Package: the words are patterns, and a word that ends in a sign is never found."""
    return not any(
        re.search(rf"(?<!\w){re.escape(_plain(word))}(?!\w)", _plain(text)) for word in arguments["forbidden_words"]
    )


def _letter_frequency(arguments: Arguments, text: str) -> bool:
    """Package: in place of a sign such as "!" it draws a letter."""
    number = unicodedata.normalize("NFC", text).lower().count(str(arguments["letter"]).lower())
    return _compared(number, arguments["let_relation"], arguments["let_frequency"])


def _paragraph_first_word(arguments: Arguments, text: str) -> bool:
    """Package: further empty lines between paragraphs shift the count; "**However**" and "However:" are other words."""
    paragraphs = [part for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(paragraphs) != arguments["num_paragraphs"]:
        return False
    words, wanted = (
        words_in(_plain(paragraphs[arguments["nth_paragraph"] - 1])),
        _plain(arguments["first_word"].strip()),
    )
    return bool(words) and wanted in (words[0], re.split("[.,?!']", words[0])[0])


def _placeholders(arguments: Arguments, text: str) -> bool:
    """Package: brackets without anything in them count."""
    return sum(bool(each.strip()) for each in re.findall(r"\[(.*?)\]", text)) >= arguments["num_placeholders"]


def _bullets(arguments: Arguments, text: str) -> bool:
    """Package: a line across the page, a negative number and emphasis at the start of a line are bullets."""
    lines = [line.strip() for line in text.split("\n")]
    bullets = [
        line
        for line in lines
        if re.match(r"\*(?!\*|\S[^*]*\*)|-(?![-\d])", line) and not re.fullmatch(r"(?:[-*]\s*){3,}", line)
    ]
    return len(bullets) == arguments["num_bullets"]


def _one_option(_: Arguments, text: str) -> bool:
    """Package: "My answer is yes. My answer is no." passes."""
    return sum(option in text for option in _OPTIONS) == 1


def _highlights(arguments: Arguments, text: str) -> bool:
    """Package: "***a***" counts twice, and "2 * 3 * 4" has one."""
    return len(re.findall(r"\*{1,3}(?=\S)[^\n*]+(?<=\S)\*{1,3}", text)) >= arguments["num_highlights"]


def _json(_: Arguments, text: str) -> bool:
    """Package: NaN and Infinity pass, which Python alone reads."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        json.loads(re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.I), parse_constant=refuse)
    except ValueError:
        return False
    return True


def _no_comma(_: Arguments, text: str) -> bool:
    """Package: the commas of Arabic, Chinese and Japanese are none."""
    return not any(comma in text for comma in _COMMAS)


def _postscript(arguments: Arguments, text: str) -> bool:
    """Package: "p.s." is found within a word, and a marker other than P.S. and P.P.S is a pattern."""
    marker = str(arguments["postscript_marker"]).strip()
    written = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}.get(marker)
    if written is not None:
        return re.search(rf"(?<!\w){written}", text.lower()) is not None
    return marker.lower() in text.lower()


def _title(_: Arguments, text: str) -> bool:
    """Package: a full stop is a title."""
    return any(re.search(r"\w", title) for title in re.findall(r"<<([^\n]+)>>", text))


def _repeated(arguments: Arguments, text: str) -> bool:
    """Package: with another kind of apostrophe it is another request."""
    return _plain(text).startswith(_plain(str(arguments["prompt_to_repeat"]).strip()))


def _sections(arguments: Arguments, text: str) -> bool:
    """Package: the marker is a pattern, and the same section counts again."""
    marker = str(arguments["section_spliter"]).strip()
    return len(set(re.findall(re.escape(marker) + r"\s?(\d+)", text))) >= arguments["num_sections"]


def _end(arguments: Arguments, text: str) -> bool:
    """Package: quotation marks are taken from the end of the response, but not of the phrase; curly ones stay."""
    phrase = str(arguments["end_phrase"]).strip()
    return _plain(text).strip(' "').endswith(_plain(phrase).strip('"'))


IFEVAL: Final[Mapping[str, Callable[[Arguments, str], bool]]] = {
    "language:response_language": _language,
    "change_case:english_capital": _english_capital,
    "keywords:existence": _keywords,
    "keywords:frequency": _keyword_frequency,
    "keywords:forbidden_words": _forbidden_words,
    "keywords:letter_frequency": _letter_frequency,
    "length_constraints:nth_paragraph_first_word": _paragraph_first_word,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": _one_option,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:json_format": _json,
    "punctuation:no_comma": _no_comma,
    "detectable_format:multiple_sections": _sections,
    "startend:end_checker": _end,
    "detectable_format:title": _title,
    "combination:repeat_prompt": _repeated,
}
