"""Rules that if-verifiable checks wrongly, checked by the words of their instruction. Each says what was wrong."""

import csv
import datetime
import importlib
import io
import itertools
import re
import string
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from actors.reward.graders.instructions.ifeval_rules import EDGES, IFEVAL, Arguments, words_in
from actors.reward.graders.instructions.package import RuleError, checker_of, sentences_in

_CAPITALS: Final = (
    "Reykjavik Helsinki Oslo Tallinn Stockholm Riga Moscow Copenhagen Vilnius Minsk Dublin Berlin Amsterdam Warsaw "
    "London Brussels Kyiv Prague Luxembourg Paris Vienna Bratislava Budapest Vaduz Chisinau Bern Ljubljana Zagreb"
).split()  # by latitude
_CONJUNCTIONS: Final = frozenset({"and", "but", "for", "nor", "or", "so", "yet"})
_MINOR_WORDS: Final = frozenset(
    "a an the and but or nor for so yet as at by in of off on out per to up via with from into onto over if".split()
)
_LISTS: Final = frozenset({"keywords", "forbidden_words"})  # arguments by their type, which is the same in all rules
_TEXTS: Final = frozenset(
    "keyword keyword1 keyword2 keyword3 keyword4 keyword5 word first_word end_phrase prompt_to_repeat section_spliter "
    "postscript_marker sep options reference_text language relation capital_relation".split()
)
_WHOLE: Final = frozenset(
    "frequency let_frequency capital_frequency num_sentences num_paragraphs num_words nth_paragraph num_placeholders "
    "num_bullets num_highlights num_sections N n m small_n min_words max_words n_start n_end".split()
)
_WORD_RULES: Final = (
    "words:prime_lengths", "words:odd_even_syllables", "sentence:increment", "words:no_consecutive", "words:repeats",
    "sentence:alliteration_increment", "words:palindrome", "words:alphabet",
)  # fmt: skip
_ASCII_SIGNS: Final = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "–": " - ", "—": " - ", "…": " ... ", "\u00a0": " "}
)
_AFRICA: Final = (
    "Zimbabwe Zambia Uganda Tunisia Togo Tanzania Sudan Somalia Leone Seychelles Senegal Tome Rwanda Nigeria Niger "
    "Namibia Mozambique Morocco Mauritius Mauritania Mali Malawi Madagascar Libya Liberia Lesotho Kenya Guinea Ghana "
    "Gambia Gabon Ethiopia Eritrea Egypt Djibouti Congo Comoros Chad Cameroon Burundi Burkina Botswana Benin Angola "
    "Algeria"
).split()  # a word of each country's name, without those that have two names
_REVERSED: Final = frozenset("the is it its animal national symbol of united states america bird answer eagle".split())
_NAMES: Final = re.compile(r"from this list of person names: (.*?)\s*\.$")


def _unique_words(arguments: Arguments, text: str) -> bool:
    """Package: a lone dash counts as a word."""
    return len({word.lower() for word in words_in(text)}) >= arguments["N"]


def _sentence_types(_: Arguments, text: str) -> bool:
    """Package: a response without any question passes if it has no statement either."""
    ends = [sentence[-1] for sentence in sentences_in(text)]
    return 0 < ends.count("?") * 2 == ends.count(".")


def _sentence_balance(_: Arguments, text: str) -> bool:
    """Package: a response without sentences passes."""
    ends = [sentence[-1] for sentence in sentences_in(text)]
    return 0 < ends.count(".") == ends.count("?") == ends.count("!")


def _conjunctions(arguments: Arguments, text: str) -> bool:
    """Package: "and", "And" and "and," count as three, and "and/or" as none."""
    return (
        len(_CONJUNCTIONS.intersection(word.lower() for word in words_in(text.replace("/", " "))))
        >= arguments["small_n"]
    )


def _person_names(arguments: Arguments, text: str) -> bool:
    """Package: Leo is found in Leonardo."""
    checker = checker_of("count:person_names", arguments)
    listed = _NAMES.search(checker.build_description(**arguments))
    names = listed[1].split(", ") if listed is not None else []
    return sum(bool(re.search(rf"\b{name}\b", text)) for name in names) >= arguments["N"]


def _parentheses(_: Arguments, text: str) -> bool:
    """Package: one bracket closed of five passes."""
    partners, open_, deepest = {")": "(", "]": "[", "}": "{"}, list[str](), 0
    for char in text:
        if char in "([{":
            open_.append(char)
            deepest = max(deepest, len(open_))
        elif char in partners:
            if not open_ or open_.pop() != partners[char]:
                open_, deepest = [], 0
            elif deepest - len(open_) >= 5:
                return True
            elif not open_:
                deepest = 0
    return False


def _options(arguments: Arguments, text: str) -> bool:
    """Package: the "or" within a word parts options ("more, less")."""
    given, text = str(arguments["options"]).replace("’", "'"), text.replace("’", "'")
    parted = given.split("/") if "/" in given else re.split(r"\bor\b" if re.search(r"\bor\b", given) else ",", given)
    options = [option.strip() for option in parted if option.strip()]
    if re.match(r"\W*[aA]\W*[bB]\W*[cC]\W*", given):
        return text in options
    return text.strip(EDGES).lower() in [option.strip(EDGES).lower() for option in options]


def _different_words(arguments: Arguments, text: str) -> bool:
    """Package: whether the words differ is not checked."""
    if not checker_of("ratio:sentence_words", arguments).check_following(text):
        return False
    used = [{word.lower() for word in words_in(sentence)} for sentence in sentences_in(text)]
    return not (used[0] & used[1] or used[0] & used[2] or used[1] & used[2])


def _paragraph_ends(_: Arguments, text: str) -> bool:
    """Package: a sign after the first word makes it another word, and no word at all passes."""
    paragraphs = [words for line in text.split("\n") if (words := words_in(line.lower()))]
    return bool(paragraphs) and all(words[0] == words[-1] for words in paragraphs)


def _stairs(_: Arguments, text: str) -> bool:
    """Package: two empty lines in a row count as one without indent, tabs as none, and one line is stairs."""
    lines = [line.expandtabs() for line in text.split("\n") if line.strip()]
    depths = [len(line) - len(line.lstrip(" ")) for line in lines]
    return len(depths) > 1 and all(lower < deeper for lower, deeper in itertools.pairwise(depths))


def _thesis(_: Arguments, text: str) -> bool:
    """Package: with <em> an empty thesis passes, and one that nothing follows; so do later sections without one."""
    parts = re.split(r"(?m)^#{1,6} .*$", text)
    sections = [part for part in parts[1:] if part.strip()] or parts[:1]
    found = [re.match(r"([^\n]*?)<(i|em)>(.*?)</\2>(.*)", section.strip(), re.S) for section in sections]
    return all(
        each is not None and not re.search(r"\w\w[.!?]\W*$", each[1]) and each[3].strip() and each[4].strip()
        for each in found
    )


def _sub_bullets(_: Arguments, text: str) -> bool:
    """Package: a response without bullet points passes, and any dash or asterisk counts."""
    marks = [line.strip()[0] for line in text.split("\n") if re.match(r"\s*[*-]\s", line)]
    parts = "".join(marks).split("*")
    return len(parts) > 1 and not parts[0] and all(parts[1:])


def _bullets_after_sentences(_: Arguments, text: str) -> bool:
    """Package: an empty line ends the sentences, or fails the response after the first bullet; any sentence counts."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    first = next((index for index, line in enumerate(lines) if re.match(r"\*(?!\*)", line)), len(lines))
    before, bullets = " ".join(lines[:first]), lines[first:]
    statements = [sentence for sentence in sentences_in(before) if sentence.endswith(".")] if before else []
    return len(statements) >= 2 and len(bullets) >= 2 and all(re.match(r"\*(?!\*)", line) for line in bullets)


def _capitals(_: Arguments, text: str) -> bool:
    """Package: Kyiv (50.5 degrees) is not on its list. Both lists pass."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    given = ["Kyiv" if name.strip() == "Kiev" else name.strip() for name in plain.split(",") if name.strip()]
    return given in (_CAPITALS, [name for name in _CAPITALS if name != "Kyiv"])


def _dates(_: Arguments, text: str) -> bool:
    """Package: month 0, day 0 and 29 February of every year pass."""
    for written in text.split(","):
        if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", written.strip(), re.A):
            return False
        try:
            date = datetime.date.fromisoformat(written.strip())
        except ValueError:
            return False
        if not 1769 <= date.year <= 1821:  # Napoleon's life
            return False
    return True


def _keyword_position(arguments: Arguments, text: str) -> bool:
    """Package: a comma counts as a word."""
    sentences, n, m = sentences_in(text), int(arguments["n"]), int(arguments["m"])
    words = words_in(sentences[n - 1]) if len(sentences) >= n else []
    return len(words) >= m and words[m - 1] == str(arguments["keyword"]).strip()


def _word_positions(arguments: Arguments, text: str) -> bool:
    """Package: the full stop counts as the last word."""
    words, keyword = words_in(text), str(arguments["keyword"]).strip()
    return len(words) >= 2 and words[1] == words[-2] == keyword


def _repeat_change(arguments: Arguments, text: str) -> bool:
    """Package: the unchanged request passes with another space in it, or with the first word in lower case."""
    wanted, given = str(arguments["prompt_to_repeat"]).split(), text.split()
    return bool(given) and given[1:] == wanted[1:] and given[0].strip(EDGES).lower() != wanted[0].strip(EDGES).lower()


def _repeat_span(arguments: Arguments, text: str) -> bool:
    """Package: instruction and check disagree (characters or words, with or without the last), and index 0 is drawn.

    Each of the readings passes.
    """
    prompt, start, end = str(arguments["prompt_to_repeat"]).strip(), arguments["n_start"], arguments["n_end"]
    words, given = prompt.lower().split(), text.lower().split()
    readings = (words[start:end], words[start : end + 1], prompt.lower()[start : end + 1].split())
    return bool(given) and given in readings


def _title_case(_: Arguments, text: str) -> bool:
    """Package: "of" and "the" must have capitals, and "Don't" is wrong."""
    words = [word for word in words_in(text.translate(_ASCII_SIGNS)) if any(char.isalpha() for char in word)]
    if not words or text.isupper():
        return False
    capital = [not word[0].isalpha() or word[0].isupper() for word in words]
    return capital[0] and all(ok or word in _MINOR_WORDS for ok, word in zip(capital, words, strict=True))


def _template(_: Arguments, text: str) -> bool:
    """Package: the parts may stand in any order, be empty, and follow other text."""
    found = re.fullmatch(r"\W*My Answer:(.*?)My Conclusion:(.*?)Future Outlook:(.*)", text, re.S)
    return found is not None and all(re.search(r"\w", part) for part in found.groups())


def _japanese(arguments: Arguments, text: str) -> bool:
    """Package: fewer than N words pass, and so do digits alone; a lone dash is a word."""
    nth = words_in(text)[arguments["N"] - 1 :: arguments["N"]]
    japanese = [re.search("[\u3040-\u30ff\u4e00-\u9fff]", word) is not None for word in nth]
    return any(japanese) and all(is_so or word.isdigit() for is_so, word in zip(japanese, nth, strict=True))


def _african_countries(arguments: Arguments, text: str) -> bool:
    """Package: any 52 lines in falling order pass if the first names Zimbabwe."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    named = sum(re.search(rf"\b{word}\b", plain) is not None for word in _AFRICA)
    checker = checker_of("custom:reverse_newline", arguments)
    return named >= len(_AFRICA) - 2 and bool(checker.check_following(text))


def _words_reversed(arguments: Arguments, text: str) -> bool:
    """Package: "It is the eagle bald" passes, and a second sentence."""
    is_right = checker_of("custom:word_reverse", arguments).check_following(text)
    return bool(is_right) and not re.search(r"(?i)\bthe\W+eagle\W+bald|[a-z]{2}[.!?]\s+\w", text)


def _letters_reversed(_: Arguments, text: str) -> bool:
    """Package: "It is the elgae dlab" passes."""
    return "elgae dlab" in text.lower() and not _REVERSED.intersection(word.lower() for word in words_in(text))


def _by_ascii(rule: str) -> Callable[[Arguments, str], bool]:
    """Package: a dash between words is a word, and the quotation mark or apostrophe of a word is one of its letters."""

    def check(arguments: Arguments, text: str) -> bool:
        return bool(checker_of(rule, arguments).check_following(text.translate(_ASCII_SIGNS)))

    return check


def _consonants(_: Arguments, text: str) -> bool:
    """Package: a lone dash or asterisk is a word without consonants."""
    words = words_in(text.translate(_ASCII_SIGNS).lower())
    return bool(words) and all(re.search("[bcdfghjklmnpqrstvwxyz]{2}", word) for word in words)


def _pronouns(arguments: Arguments, text: str) -> bool:
    """Package: "I'm" and "they've" have none."""
    return _by_ascii("count:pronouns")(arguments, re.sub(r"['’]", " ", text))


def _quotes(arguments: Arguments, text: str) -> bool:
    """Package: the apostrophe of "isn't" opens or closes a quotation, and curly marks are none."""
    return _by_ascii("format:quotes")(arguments, re.sub(r"(?<=\w)['’](?=\w)", "", text))


def _explained_quotes(arguments: Arguments, text: str) -> bool:
    """Package: a comma between two quotations is an explanation."""
    parts = text.translate(_ASCII_SIGNS).split('"')
    if len(parts) % 2 == 0:  # inches, or a quotation without an end
        return bool(checker_of("format:quote_unquote", arguments).check_following(text))
    return all(any(char.isalpha() for char in part) for part in parts[2::2])


def _word_lines(_: Arguments, text: str) -> bool:
    """Package: an empty line with a space in it makes up for two words in another."""
    return all(len(line.split()) <= 1 for line in text.split("\n"))


def _chain(_: Arguments, text: str) -> bool:
    """Package: a curly quotation mark at a word makes it another word."""
    words = [words_in(sentence.lower()) for sentence in sentences_in(text)]
    return all(words) and all(before[-1] == after[0] for before, after in itertools.pairwise(words))


def _emoji(_: Arguments, text: str) -> bool:
    """Package: flags and keycaps are none, and a curly quotation mark after an emoji hides it."""
    emoji = importlib.import_module("emoji")
    sentences = [sentence.strip(EDGES) for sentence in sentences_in(text)]
    ends = [bool(found := emoji.emoji_list(each)) and found[-1]["match_end"] == len(each) for each in sentences]
    starts = [bool(found := emoji.emoji_list(each)) and found[0]["match_start"] == 0 for each in sentences]
    return bool(sentences) and all(end or start for end, start in zip(ends, [*starts[1:], False], strict=True))


def _questions(_: Arguments, text: str) -> bool:
    """Package: "Question:" without a number is not a label."""
    questions = re.split(r"(?m)^\W*Question\b(?: \d+)?\W*", text)
    if questions[0].strip() or len(questions) != 5:
        return False
    lengths: list[int] = []
    for question in questions[1:]:
        lines = [line.strip() for line in question.split("\n") if line.strip()]
        is_option = [re.match(r"\(?[A-Ea-e][.):]\s*\S", line) is not None for line in lines]
        if sum(is_option) != 5:
            return False
        lengths.append(len(" ".join(lines[: is_option.index(True)])))
    return 0 < lengths[0] and all(shorter < longer for shorter, longer in itertools.pairwise(lengths))


def _special_csv(arguments: Arguments, text: str) -> bool:
    """Package: the rows after the one with the special character may have any number of fields."""
    rows = list(csv.reader(io.StringIO(text)))
    is_right = checker_of("custom:csv_special_character", arguments).check_following(text)
    return bool(is_right) and all(len(row) == 5 for row in rows)


def _alphabet_sentences(_: Arguments, text: str) -> bool:
    """Package: a sentence that begins with a quotation mark does not begin with its letter."""
    words = [words_in(sentence) for sentence in sentences_in(text)]
    return "".join(each[0][0].lower() if each else "-" for each in words) == string.ascii_lowercase


def _whole(arguments: Arguments, name: str, least: int = 0) -> None:
    value = arguments.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise RuleError(f"{name} must be a whole number of at least {least}, not {value!r}")


def check_types(arguments: Arguments) -> None:
    """Refuse arguments of another type than the rules take; the package accepts some, and then errs on each response.

    Raises:
        RuleError: names the argument, what is allowed and what was given.
    """
    for name, value in arguments.items():
        if name in _LISTS and not (isinstance(value, list) and value and all(map(_is_text, cast("list[Any]", value)))):
            raise RuleError(f"{name} must be a list of texts that are not blank, not {value!r}")
        if name in _TEXTS and not _is_text(value):
            raise RuleError(f"{name} must be a text that is not blank, not {value!r}")
        if name in _WHOLE and (not isinstance(value, int) or isinstance(value, bool)):
            raise RuleError(f"{name} must be a whole number, not {value!r}")
    least, most = arguments.get("min_words"), arguments.get("max_words")
    if least is not None and most is not None and most < least:
        raise RuleError(f"max_words must be at least min_words, which is {least}, not {most!r}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _check_letter(arguments: Arguments) -> None:
    letter, relation = arguments.get("letter"), arguments.get("let_relation")
    if not isinstance(letter, str) or len(letter) != 1 or letter.isspace():
        raise RuleError(f"letter must be one character, not {letter!r}")
    if relation not in ("less than", "at least"):
        raise RuleError(f"let_relation must be 'less than' or 'at least', not {relation!r}")
    _whole(arguments, "let_frequency")


def _check_span(arguments: Arguments) -> None:
    if not isinstance(arguments.get("prompt_to_repeat"), str):
        raise RuleError("prompt_to_repeat is missing")
    _whole(arguments, "n_start")
    _whole(arguments, "n_end", least=max(1, arguments["n_start"]))


CORRECTED: Final[Mapping[str, Callable[[Arguments, str], bool]]] = {
    **IFEVAL,
    "count:unique_word_count": _unique_words,
    "ratio:sentence_type": _sentence_types,
    "ratio:sentence_balance": _sentence_balance,
    "count:conjunctions": _conjunctions,
    "count:person_names": _person_names,
    "format:parentheses": _parentheses,
    "format:options": _options,
    "ratio:sentence_words": _different_words,
    "words:paragraph_last_first": _paragraph_ends,
    "format:line_indent": _stairs,
    "format:thesis": _thesis,
    "format:sub-bullets": _sub_bullets,
    "format:no_bullets_bullets": _bullets_after_sentences,
    "custom:european_capitals_sort": _capitals,
    "custom:date_format_list": _dates,
    "words:keywords_specific_position": _keyword_position,
    "words:words_position": _word_positions,
    "repeat:repeat_change": _repeat_change,
    "repeat:repeat_span": _repeat_span,
    "format:title_case": _title_case,
    "format:output_template": _template,
    "count:words_japanese": _japanese,
    "custom:reverse_newline": _african_countries,
    "custom:word_reverse": _words_reversed,
    "custom:character_reverse": _letters_reversed,
    "words:consonants": _consonants,
    "words:last_first": _chain,
    "count:pronouns": _pronouns,
    "format:quotes": _quotes,
    "format:quote_unquote": _explained_quotes,
    "format:newline": _word_lines,
    "format:emoji": _emoji,
    "custom:mcq_count_length": _questions,
    "custom:csv_special_character": _special_csv,
    "custom:sentence_alphabet": _alphabet_sentences,
    **{rule: _by_ascii(rule) for rule in _WORD_RULES},
}
OWN_ARGUMENTS: Final[Mapping[str, Callable[[Arguments], None]]] = {
    "keywords:letter_frequency": _check_letter,
    "repeat:repeat_span": _check_span,
}  # checked by us, since the package would draw values in place of some that are right
