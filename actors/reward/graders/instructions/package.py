"""The rules of the package if-verifiable, imported without its downloads and without the data sets it can load."""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final, cast

NAME: Final = "if_verifiable"
BENCHMARKS: Final = ("ifeval", "ifbench")
DATA: Final = {
    "punkt_tab": "tokenizers/punkt_tab/english",
    "averaged_perceptron_tagger_eng": "taggers/averaged_perceptron_tagger_eng",
    "stopwords": "corpora/stopwords/english",
}  # NLTK's name of data, and its place
NEEDS_DATA: Final[Mapping[str, tuple[str, ...]]] = {
    "length_constraints:number_sentences": ("punkt_tab",),
    "change_case:capital_word_frequency": ("punkt_tab",),
    "ratio:stop_words": ("stopwords",),
    "words:start_verb": ("punkt_tab", "averaged_perceptron_tagger_eng"),
}


class RuleError(ValueError):
    """A row names a rule that cannot be checked."""


class _NoDraw:
    """In place of `random`: the package draws an argument that is missing or outside of its range."""

    def __getattr__(self, name: str) -> Any:
        raise RuleError("an argument is missing or out of range")


@functools.cache
def rules() -> Mapping[str, type[Any]]:
    """Import the rules of all benchmarks, which have no name in common: the class that checks each, by its name."""
    found: dict[str, type[Any]] = {}
    with _without_its_top_level():
        for benchmark in BENCHMARKS:
            registry = importlib.import_module(f"{NAME}.{benchmark}.instructions_registry")
            for module in ("instructions", "instructions_util"):
                part: Any = importlib.import_module(f"{NAME}.{benchmark}.{module}")
                part.random = _NoDraw()
            found |= cast("Mapping[str, type[Any]]", registry.INSTRUCTION_DICT)
    detector = importlib.import_module("langdetect").DetectorFactory
    detector.seed = 0  # otherwise the same text may be found to be in another language the next time
    return found


def _no_download(*_: object, **__: object) -> bool:
    return False


@contextmanager
def _without_its_top_level() -> Generator[None]:
    """Import submodules alone: the top level needs `datasets`, and `ifbench` downloads from NLTK at its import."""
    nltk: Any = importlib.import_module("nltk")
    spec = importlib.util.find_spec(NAME)
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(NAME)
    whole, download = sys.modules.get(NAME), nltk.download
    if whole is None:
        bare = ModuleType(NAME)
        bare.__path__ = list(spec.submodule_search_locations)
        sys.modules[NAME] = bare
    nltk.download = _no_download
    try:
        yield
    finally:
        nltk.download = download
        if whole is None:
            del sys.modules[NAME]  # a function of the user gets the whole package


def checker_of(rule: str, arguments: Mapping[str, Any]) -> Any:
    """Build the package's checker of a rule.

    Raises:
        RuleError: the arguments do not fit the rule.
    """
    checker = rules()[rule](rule)
    try:
        checker.build_description(**arguments)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise RuleError(f"the rule {rule!r} cannot be checked with {dict(arguments)!r}: {error}") from error
    return checker


def sentences_in(text: str) -> list[str]:
    """Split a text into sentences, as the rules of IFBench do."""
    rules()
    utilities = sys.modules[f"{NAME}.ifbench.instructions_util"]
    return [sentence for sentence in utilities.split_into_sentences(text) if sentence]


def language_of(text: str) -> str | None:
    """The language of a text by its ISO 639-1 code; None if the text has no words."""
    rules()
    langdetect = sys.modules["langdetect"]
    try:
        return langdetect.detect(text)
    except langdetect.LangDetectException:
        return None


def add_data(folder: str) -> None:
    """Look for NLTK's data in a folder first."""
    data = importlib.import_module("nltk.data")
    if folder not in data.path:
        data.path.insert(0, folder)


def missing_data(rule: str) -> tuple[str, ...]:
    """Names of the NLTK data that a rule needs and that no folder has."""
    data = importlib.import_module("nltk.data")

    def is_there(name: str) -> bool:
        try:
            data.find(DATA[name])
        except LookupError:
            return False
        return True

    return tuple(name for name in NEEDS_DATA.get(rule, ()) if not is_there(name))
