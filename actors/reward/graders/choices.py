r"""Reads which choice a text makes: the letter, or the text of a choice, that it states as its answer."""

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from actors.reward.graders.boxed import last_boxed

DEFAULT_LETTERS: Final = string.ascii_uppercase[:10]
LOOK_BACK: Final = 40  # characters before a letter that may deny it
MAX_SAID: Final = 5  # statements of one line, each within the one before

_TAG: Final = re.compile(r"(?i)<(/?)answer>")
_MARKUP: Final = re.compile(
    r"\\(?:text|math|bold|rm|bf|boxed|fbox)[a-z]*(?![a-z])\s*|\\[()\[\],;! ]|\*+|[`$\"“”„«»「」{}]|(?<!\w)_+|_+(?!\w)"
)
_QUOTED: Final = re.compile(r"['‘]([A-Za-z])['’]")
# A letter, not a word: "A, " and "I" before a word in lower case are the article and the pronoun
_OPEN: Final = r"[(\[<（【\s]*"
_END: Final = r"(?![A-Za-z0-9'’]|-[A-Za-z]|[,]?[ ]*=)"
_CAPITAL: Final = r"(?P<letter>[A-Z])" + _END
_NO_WORD: Final = (
    r"(?:(?<![AI])|(?!\s+[a-z])|(?=\s+(?:because|since|as|for|due|and|or|not|rather|but|with|from|by|is|based)\b))"
)
_SMALL: Final = r"(?P<small>[a-z])(?=[)\]>）】]|[.:,;](?!\w)|\s*(?:\n|\Z))"
_NAMED: Final = (
    r"(?:list|set|above|below|following|given|listed|available|provided|possible|three|four|five|options?|choices?|answers?"
    r"|statements?|ones|alternatives)\b"
)
_FILLER: Final = (
    rf"(?i:\b(?:among|amongst|of|from|in|out of)\s+(?:(?:all\s+)?(?:these|those|them)\b(?:\s+{_NAMED})*+"
    rf"|(?:the|this|all)\b(?:\s+{_NAMED})++)|"
    r"[\s:：=,–—→-]{1,20}+|是|为|為|应该|选项?|\b(?:is|was|would|could|should|might|must|may|will|be|to|that|this|the|here|now|"
    r"question|problem|for|given|among|of|options?|choices?|answers?|letter|statement|therefore|thus|then|hence|so|"
    r"clearly|simply|indeed|definitely|certainly|likely|probably|most|correct|right|best|final|it'?s|"
    r"i (?:would )?(?:think|believe|get|got|found|choose|chose|pick)|not\s+\(?[A-Z]\)?,?\s+but|es|ist|est|la|le|die|"
    r"opción|option)\b)"
)
_KEY: Final = (
    r"(?:(?i:\b(?:answers?|ans|solution|conclusion|response|result|verdict|correct\s+(?:option|choice|letter|statement|"
    r"order|one)|(?:my|best|right|final|good)\s+(?:option|choice|guess)|closest(?:\s+\w+)?|respuesta|antwort|réponse|resposta)\b\.?)|答案|答え)"
    r"(?i:\s+(?:correcta|correcte|correta))?"
)
_STATED: Final = (
    re.compile(rf"{_KEY}{_FILLER}{{0,16}}{_OPEN}(?:{_CAPITAL}{_NO_WORD}|{_SMALL})"),
    re.compile(
        r"(?i:\b(?:choose|chose|chosen|pick|picked|select|selected|go with|going with|opt for|opted for|guess|say)\b)"
        rf"{_FILLER}{{0,8}}{_OPEN}{_CAPITAL}{_NO_WORD}"
    ),
    re.compile(
        rf"(?<![A-Za-z0-9'’+/-])(?<!\d ){_CAPITAL}[)\]>）】]*,?\s+(?i:is|was|must be|should be"
        r"|would be(?![^.\n]{0,60}\bif\b)|seems|appears)\s+"
        r"(?i:(?:the|our|my|most|only|clearly|indeed|therefore|thus|likely|probably|final|single|best|correct|right)\s+)*"
        r"(?i:correct(?!\s+(?:in|that|about|for|only|when|if|to)\b)|right|best\s*(?=[.!\n]|\Z)|answer|choice|option"
        r"|(?<=most )(?:plausible|likely|appropriate|accurate|reasonable|suitable)\s*(?=[.!\n]|\Z)"
        r"|only one|one that)(?![\w-])"
    ),
)
_CONCLUDED: Final = re.compile(
    r"(?:(?i:\b(?:so|thus|hence|therefore|it'?s|that'?s|left with|leav(?:es?|ing)|correspond(?:s|ing)? to|"
    r"match(?:es|ing)|conclude|believe|must be|(?:it|this|that) is|i\.e|namely|only)\b)|→|⇒|=>|∴)"
    rf"\.?{_FILLER}{{0,8}}{_OPEN}{_CAPITAL}"
    r"(?=[)\]>）】]*(?:\s*[.!;]?\s*(?:\n|\Z)|[.!;]\s|\s+(?:because|since|remains|fits|satisfies|works)\b))"
)
_TAKEN_BACK: Final = re.compile(  # behind a statement; only a conclusion after it corrects the statement
    r"(?i)(?<=[.!;,—–\n-])\s*(?:actually|wait|hmm|no|oops|sorry|correction|scratch that|"
    r"on second thoughts?|i was wrong|that(?:'s| is) (?:wrong|incorrect|not right))\b(?=[,.!:;—–-]|\s)"
)
_INSTEAD: Final = re.compile(rf"\s*[:,;—–-]?\s*{_OPEN}{_CAPITAL}(?=[)\]>）】]*\s*(?:[.!]|\n|\Z))")  # behind "no"
_MENTIONED: Final = re.compile(rf"(?i:\b(?:option|choice))\s*[:=]?\s*{_OPEN}{_CAPITAL}")
_ALONE: Final = re.compile(r"(?i:\W*(?:option|choice|letter)\b)?\W*(?P<letter>[A-Za-z])\W*")
_LABELLED: Final = re.compile(
    r"\W*(?P<letter>[A-Z](?=[)\]）】]|[.:：]\s|\s+[–—-]\s|,?\s+(?:because|since)\b)|[a-z](?=\)))"
)
_LAST_IN_BRACKETS: Final = re.compile(r".*\((?P<letter>[A-Z])\)\W*")
_NEGATED: Final = re.compile(
    r"(?i)(?:\b(?:not|never|neither|nor|cannot be|rather than)|n['’]t)\s*(?:\w+\s+)?(?:the\s+)?[(\[]?$"
    r"|\bis\s+(?:the|my)\s+$|\b(?:wrong|incorrect|no(?: (?:correct|right))?|least|least likely|opposite of(?: the)?) $"
)
_DENIED: Final = re.compile(
    r"[)\]>）】]*(?:\s*\?|[^\w.]{0,6}\s(?i:isn['’]t|is not|is incorrect|is wrong|is false|is too|cannot|can['’]t|"
    r"fails?|violates|contradicts|does not|doesn['’]t|would not|wouldn['’]t)\b)"
)
_WOULD: Final = re.compile(r"(?i)\b(?:would|could|might)\b")
_IF: Final = re.compile(r"(?i)[^.\n]{0,60}\bif\b")
_ANOTHER: Final = (
    re.compile(  # A or B, A/B, A, B and C: several; "A, and I am sure" and "A. Is not B too long?" are not
        r"\W{0,6}(?:\b(?:or|and)\b|[/&])\W{0,6}(?!I(?:['’]|\s+[a-z]))[A-Z](?![A-Za-z])"
        r"|[)\]]?\s*,\s*\(?[A-Z]\)?\s*(?:[.,;]|\n|\Z|(?:and|or)\b)"
    )
)
_SAID: Final = re.compile(rf"(?i)(?:{_KEY}(?:\s+(?:is|was|be)\b)?[是为為]?\s*[:：=]?)\s*(?P<rest>[^\n]+)")
_ARTICLE: Final = re.compile(r"^\s*(?:the|an?)\s+(?=\w{2})")
_SENTENCE: Final = re.compile(r"(?<=[.!?])\s+")
_IS: Final = re.compile(  # a sentence that says what it is: "Thus, it must be beta decay."
    r"(?i)(?:(?:so|thus|hence|therefore|then|clearly),?\s+)?(?:it|this|that|they|these|(?:the|this|that)\s+\w+)"
    r"(?:['’]s|\s+(?:is|are|was|were|must be|should be|has to be))\s+(?P<text>[^?]+)"
)
_REASON: Final = re.compile(r"(?i)[.,;]\s|\s\(|\b(?:because|since|which)\b")


class Choices(NamedTuple):
    """The letters of the choices, and their texts, if the row has them."""

    letters: str = DEFAULT_LETTERS
    texts: Sequence[str] = ()


def choices_in(metadata: Mapping[str, Any] | None) -> Choices:
    """The choices that a row names: `choices` and `valid_letters`."""
    given = metadata or {}
    value: Any = given.get("choices")
    letters: Any = given.get("valid_letters")
    if isinstance(value, Mapping):
        by_key = cast("Mapping[Any, Any]", value)
        if {"text", "label"} <= by_key.keys():  # as in ARC
            value, letters = by_key["text"], letters or by_key["label"]
        else:
            value, letters = list(by_key.values()), letters or list(by_key)
            letters = letters if all(re.fullmatch("[A-Za-z]", str(each)) for each in letters) else None
    texts = [str(each) for each in cast("Sequence[Any]", value)] if isinstance(value, list | tuple) else []
    if isinstance(letters, list | tuple | str) and letters:
        return Choices("".join(str(letter).upper() for letter in cast("Sequence[Any]", letters)), texts)
    return Choices(string.ascii_uppercase[: len(texts)] if texts else DEFAULT_LETTERS, texts)


def right_letter(label: Any, metadata: Mapping[str, Any] | None = None) -> str | None:
    """Return the letter of the right choice; None if neither label nor metadata says which it is."""
    choices = choices_in(metadata)
    correct = (metadata or {}).get("correct_letter")
    if isinstance(correct, str) and correct.strip().upper() in list(choices.letters):
        return correct.strip().upper()
    if isinstance(label, int | float) and not isinstance(label, bool) and label in range(len(choices.letters)):
        return choices.letters[int(label)]
    text = str(label).strip()
    if (plain := text.strip("().").upper()) in list(choices.letters):
        return plain
    return _letter_of_text([text], choices)


def chosen_letter(text: str, choices: Choices) -> str | None:
    """Return the letter that a text chooses; None if it chooses none, or several at once."""
    box = last_boxed(text)
    if box is not None:
        found, several = _letter_of(_plain(box), choices)
        if found or several:
            return found
    text = _plain(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    if said := [each for pattern in _STATED for each in _found(pattern, text, choices)]:
        place, letter = max(said, key=lambda each: each[0])
        taken_back = _TAKEN_BACK.search(text, place)
        if taken_back is None:
            return letter
        corrected = list(_found(_CONCLUDED, text[taken_back.end() :], choices))
        instead = _INSTEAD.match(text, taken_back.end())
        if not corrected and instead and instead["letter"] in choices.letters:
            return instead["letter"]
        return corrected[-1][1] if corrected else letter
    if letter := _letter_alone(lines[-1], choices):
        return letter
    if concluded := list(_found(_CONCLUDED, text, choices)):
        return concluded[-1][1]
    if letter := _letter_of_text(_said_texts(text, lines), choices) or _letter_of_sentence(lines[-1], choices):
        return letter
    for part in (text, re.split(r"(?<=[.!?])\s", lines[-1])[-1]):
        mentioned = {letter for _, letter in _found(_MENTIONED, part, choices)}
        if len(mentioned) == 1 and not _MENTIONED.match(part):
            return mentioned.pop()
    return _letter_of_lines(lines, choices)


def _plain(text: str) -> str:
    """The text without markup, and with `<answer>B</answer>` as an answer line."""
    text = _TAG.sub(lambda tag: "\n" if tag[1] else "\nanswer: ", text)
    return _QUOTED.sub(r"\1", _MARKUP.sub("", text))


def _found(pattern: re.Pattern[str], text: str, choices: Choices) -> Iterator[tuple[int, str | None]]:
    """The places at which a text chooses, with the letter; None for several letters at once."""
    for match in pattern.finditer(text):
        group = match.groupdict()
        letter = (group["letter"] or group.get("small") or "").upper()
        end = max(match.end("letter"), match.end("small") if "small" in group else -1)
        before = text[max(0, match.start() - LOOK_BACK) : match.start()]
        denied = _DENIED.match(text, end) or (_WOULD.search(match[0]) and _IF.match(text, end))
        if letter in choices.letters and not _NEGATED.search(before) and not denied:
            yield match.start(), None if _ANOTHER.match(text, end) else letter


def _letter_alone(line: str, choices: Choices) -> str | None:
    alone = _ALONE.fullmatch(line)
    return alone["letter"].upper() if alone and alone["letter"].upper() in choices.letters else None


def _letter_of(text: str, choices: Choices) -> tuple[str | None, bool]:
    """The letter of a box: B, (B), B) 12, Option B, or the text of a choice; and whether it has several."""
    text = text.strip()
    if letter := _letter_alone(text, choices) or _letter_of_text([text], choices):
        return letter, False
    if re.match(rf"\W*[A-Z](?:{_ANOTHER.pattern})", text):
        return None, True
    labelled = _LABELLED.match(text)
    if labelled and labelled["letter"].upper() in choices.letters:
        return labelled["letter"].upper(), False
    for pattern in (*_STATED, _MENTIONED):
        for _, letter in _found(pattern, text, choices):
            return letter, letter is None
    return None, False


def _letter_of_lines(lines: Sequence[str], choices: Choices) -> str | None:
    """The letter of the only line that is a letter, or of a first or last line such as B) 12 or 12 (B).

    Lines that begin with several letters are a list of the choices.
    """
    labelled = [(line, match["letter"].upper()) for line in lines if (match := _LABELLED.match(line))]
    letters = {letter for _, letter in labelled if letter in choices.letters}
    if len(letters) == 1 and {lines[0], lines[-1]}.intersection(line for line, _ in labelled):
        return letters.pop()
    if letters:
        return None
    if (last := _LAST_IN_BRACKETS.fullmatch(lines[-1])) and last["letter"] in choices.letters:
        return last["letter"]
    alone = {letter for line in lines if (letter := _letter_alone(line, choices))}
    return alone.pop() if len(alone) == 1 else None


def _said_texts(text: str, lines: Sequence[str]) -> list[str]:
    """What a text states as its answer, without the reason after it; and its last line."""
    said = [match["rest"] for match in _SAID.finditer(text)][-1:]
    is_list = len({match["letter"] for line in lines if (match := _LABELLED.match(line))}) > 1
    while 0 < len(said) < MAX_SAID and (inner := _SAID.search(said[-1])):  # B is no answer; the answer is C
        said.append(inner["rest"])
    said += [] if is_list and _LABELLED.match(lines[-1]) else [lines[-1]]
    return [part for each in said for part in (each, "" if _TAKEN_BACK.search(each) else _REASON.split(each)[0])]


def _letter_of_sentence(line: str, choices: Choices) -> str | None:
    """The letter of the choice whose text the last sentence of a line says, if the line has no other choice's text."""
    said = _IS.fullmatch(_SENTENCE.split(line)[-1])
    letter = _letter_of_text([said["text"]], choices) if said else None
    if said is None or letter is None:
        return None
    own, whole = _compared(said["text"]), _compared(line)
    others = (_compared(text) for text in choices.texts)
    return None if any(other and other not in own and other in whole for other in others) else letter


def _letter_of_text(said: Sequence[str], choices: Choices) -> str | None:
    """The letter of the one choice that has one of these texts, with or without its letter before it."""
    wanted = {_compared(each) for each in said} - {""}
    same = [
        letter
        for letter, choice in zip(choices.letters, map(_compared, choices.texts), strict=False)
        if choice in wanted or any(re.fullmatch(rf"{letter}\W*{re.escape(choice)}", each, re.I) for each in wanted)
    ]
    return same[0] if len(same) == 1 else None


def _compared(text: str) -> str:
    """A text in lower case, without markup, spaces, and signs at its ends."""
    text = _ARTICLE.sub("", _plain(text).lower())
    plain = re.sub(r"[\s\\]|(?<=[a-z])-(?=[a-z])", "", text)
    return plain.strip(".,;:!?'\"’‘()")
