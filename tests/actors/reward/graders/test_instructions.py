"""ifeval and ifbench: each rule on responses judged by hand, its refusals, and where the package if-verifiable errs."""

import importlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.reward.graders.builtin import find_grader
from actors.reward.graders.instructions.corrections import CORRECTED
from actors.reward.graders.instructions.grader import ifbench, ifeval
from actors.reward.graders.instructions.package import BENCHMARKS, add_data, checker_of, rules
from actors.reward.samples import GradedSample
from bin import start_topology
from tests.support.commands import called
from tests.support.extra_packages import ROOT, installed

pytestmark = [pytest.mark.slow]  # installs packages
RULES: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "labelled_instructions.toml").read_text())["rule"]
PACKAGES = (
    "if-verifiable==0.1.2", "emoji==2.16.0", "immutabledict==4.3.1", "langdetect==1.0.9", "nltk==3.10.4",
    "syllapy==0.8.0", "joblib==1.6.0", "cloudpickle==3.1.3", "defusedxml==0.7.1", "six==1.17.0",
)  # fmt: skip  # without datasets, which the rules do not import


def score(rule: str, arguments: dict[str, Any] | None, response: str) -> float:
    return ifbench(response, None, {"instruction_id_list": [rule], "kwargs": [arguments]})


@pytest.fixture(scope="module")
def nltk_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NLTK's data for English, as small as it can be: made by hand in the formats of its files."""
    folder = tmp_path_factory.mktemp("nltk_data")
    punkt = folder / "tokenizers/punkt_tab/english"
    punkt.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "ortho_context.tab"):
        (punkt / name).write_text("")
    (punkt / "abbrev_types.txt").write_text("mr\n")
    words = folder / "corpora/stopwords"
    words.mkdir(parents=True)
    (words / "english").write_text("the\nis\nin\n")
    tagger = folder / "taggers/averaged_perceptron_tagger_eng"
    tagger.mkdir(parents=True)
    named = "averaged_perceptron_tagger_eng"
    for part, content in (
        ("weights", {}),
        ("tagdict", {"Write": "VB", "Paper": "NN", "it": "PRP", "down": "RP", "burns": "VBZ", ".": "."}),
        ("classes", ["NN", "VB"]),
    ):
        (tagger / f"{named}.{part}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module", autouse=True)
def packages(nltk_data: Path) -> Iterator[None]:
    before = list(sys.path)
    sys.path.append(str(installed("instructions", *PACKAGES)))
    add_data(str(nltk_data))
    yield
    sys.path[:] = before


def test_every_rule_judges_responses_as_a_person_does() -> None:
    wrong = [
        (rule["id"], response, expected)
        for rule in RULES
        for expected, key in ((1.0, "right"), (0.0, "wrong"))
        for response in rule[key]
        if score(rule["id"], rule.get("arguments"), response) != expected
    ]
    assert wrong == []


def test_each_rule_has_a_response_that_follows_it_and_one_that_does_not() -> None:
    named = {rule["id"] for rule in RULES if rule["right"] and rule["wrong"]}
    assert named == {*rules()}


def test_no_rule_has_the_name_of_one_in_another_benchmark() -> None:
    assert len(rules()) == 25 + 58  # and imports the registries, without the top level of the package
    registries = [importlib.import_module(f"if_verifiable.{name}.instructions_registry") for name in BENCHMARKS]
    assert [len(each.INSTRUCTION_DICT) for each in registries] == [25, 58]


@pytest.mark.parametrize("name", ["ifeval", "ifbench"])
def test_a_row_may_have_rules_of_both_benchmarks(name: str) -> None:
    row = {
        "instruction_id_list": ["punctuation:no_comma", "count:numbers", "length_constraints:number_words"],
        "kwargs": [{}, {"N": 1}, {"num_words": 4, "relation": "less than"}],
    }
    grade = find_grader(name)
    assert grade(GradedSample(response="I see 7", metadata=row)) == 1.0
    for response in ("I, see 7", "I see seven", "I see 7 of them"):
        assert grade(GradedSample(response=response, metadata=row)) == 0.0


def _package_says(rule: str, arguments: dict[str, Any], response: str) -> bool | None:
    try:
        return bool(checker_of(rule, arguments).check_following(response))
    except Exception:  # noqa: BLE001 - it raises what it likes
        return None


def test_only_rules_that_the_package_judges_wrongly_are_checked_by_us() -> None:
    """So a version that mends one shows that our check is not needed any more."""
    listed, found = [], []
    for rule in RULES:
        arguments = rule.get("arguments", {})
        listed += [(rule["id"], response) for response in rule.get("package", ())]
        found += [
            (rule["id"], response)
            for expected, key in ((True, "right"), (False, "wrong"))
            for response in rule[key]
            if _package_says(rule["id"], arguments, response) is not expected
        ]
    drawn = {"keywords:letter_frequency", "repeat:repeat_span"}  # the package draws an argument: see the refusals
    found = [pair for pair in found if pair[0] not in drawn]
    assert sorted(set(found) - set(listed)) == [], "not listed"
    assert sorted(set(listed) - set(found)) == [], "listed, but the package agrees"
    assert {rule for rule, _ in listed} | drawn >= CORRECTED.keys()


def test_all_instructions_must_be_followed_after_the_thought() -> None:
    row = {
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{"num_words": None}, {"num_words": 3.0, "relation": "less than", "keyword": None}],
    }
    assert ifeval("<think>a, b, c, d</think>Two words", None, row) == 1.0
    assert ifeval("Two, words", None, row) == 0.0
    assert ifeval("Three words here", None, row) == 0.0
    assert ifeval("<think>Two words", None, row) == 0.0
    assert ifeval("", None, row) == 0.0
    assert ifeval("Two words", row) == 1.0  # a label that is the row's object


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (None, "must name rules .*missing required field `instruction_id_list`"),
        ({"instruction_id_list": []}, "Expected `array` of length >= 1"),
        ({"instruction_id_list": ["punctuation:no_coma"]}, "no rule 'punctuation:no_coma'; did you mean"),
        ({"instruction_id_list": ["count:numbers"]}, "the rule 'count:numbers'"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "kwargs has 0 objects for 1 rules"),
        ({"instruction_id_list": ["length_constraints:number_words"]}, "missing or out of range"),
        (
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": -1, "relation": "x"}],
            },
            "missing or out of range",
        ),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"n": 1}]}, "unexpected keyword argument"),
        ({"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "tlh"}]}, "tlh"),
        (
            {
                "instruction_id_list": ["keywords:letter_frequency"],
                "kwargs": [{"letter": "ab", "let_frequency": 1, "let_relation": "at least"}],
            },
            "letter must be one character",
        ),
        *(
            ({"instruction_id_list": [rule], "kwargs": [arguments]}, f"the rule '{rule}': {reason}")
            for rule, arguments, reason in (
                ("keywords:existence", {"keywords": "dragons"}, "keywords must be a list of texts .* not 'dragons'"),
                ("keywords:existence", {"keywords": ["sea", " "]}, "keywords must be a list of texts that are not"),
                ("keywords:forbidden_words", {"forbidden_words": [1]}, r"forbidden_words must be a list .* not \[1\]"),
                ("startend:end_checker", {"end_phrase": ""}, "end_phrase must be a text that is not blank, not ''"),
                ("combination:repeat_prompt", {"prompt_to_repeat": 3}, "prompt_to_repeat must be a text"),
                ("length_constraints:number_paragraphs", {"num_paragraphs": 2.5}, "num_paragraphs must be a whole"),
            )
        ),
    ],
)
def test_a_row_that_cannot_be_checked_is_refused_by_name(row: dict[str, Any] | None, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        find_grader("ifeval")(GradedSample(metadata=row or {}))


@pytest.mark.parametrize(
    ("rule", "arguments"), [("sentence:keyword", {"word": ["rain"], "N": 1}), ("format:list", {"sep": 1})]
)
def test_an_argument_that_would_fail_each_response_is_refused(rule: str, arguments: dict[str, Any]) -> None:
    row = {"instruction_id_list": [rule], "kwargs": [arguments]}
    with pytest.raises(ValueError, match=f"the rule '{rule}': (word|sep) must be a text that is not blank"):
        find_grader("ifbench")(GradedSample(metadata=row))


@pytest.mark.parametrize(
    ("rule", "arguments", "reason"),
    [
        ("repeat:repeat_span", {"prompt_to_repeat": "a b", "n_start": 2, "n_end": 1}, "n_end must be .* at least 2"),
        ("count:word_count_range", {"min_words": 5, "max_words": 4}, "max_words must be at least min_words"),
    ],
)
def test_a_range_that_no_response_can_meet_is_refused(rule: str, arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"the rule '{rule}': {reason}"):
        find_grader("ifbench")(GradedSample(metadata={"instruction_id_list": [rule], "kwargs": [arguments]}))


def test_check_refuses_the_row_and_finds_data_in_the_folder_of_the_setting(tmp_path: Path, nltk_data: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    paths = (f"run.dir={tmp_path}", f"data.0.path={rows}", f"reward.nltk_data={nltk_data}")
    settings = (*paths, "data.0.rm_type=ifbench", "eval=[]")
    arguments = [part for setting in settings for part in ("--set", setting)]

    def checked(rule: str, **given: Any) -> str:
        metadata = {"instruction_id_list": [rule], "kwargs": [given]}
        rows.write_text(json.dumps({"input": "1", "label": "", "metadata": metadata}) + "\n")
        done = called(start_topology.main, "topologies/laptop.toml", "--check", *arguments, cwd=ROOT)
        return "" if done.returncode == 0 else done.stderr

    assert checked("ratio:stop_words", percentage=50) == ""
    assert "row 0 of" in (refusal := checked("ratio:stop_word", percentage=50))
    typed = checked("format:list", sep=1)
    assert "row 0 of" in typed
    assert "the rule 'format:list': sep must be a text that is not blank, not 1" in typed
    assert "IFEval and IFBench have no rule 'ratio:stop_word'; did you mean 'ratio:stop_words'?" in refusal


def test_nothing_is_downloaded_and_absent_data_is_named() -> None:
    """In a fresh process, with any socket an error: `datasets` and NLTK's data are not there."""
    program = """
import socket, sys
def refuse(*_): raise SystemExit("a socket was opened")
socket.socket.connect = refuse
from actors.reward.graders.builtin import find_grader
from actors.reward.samples import GradedSample
def row(rule, **arguments):
    return GradedSample(response="One.", metadata={"instruction_id_list": [rule], "kwargs": [arguments]})
print(find_grader("ifbench")(row("format:no_whitespace")), "datasets" in sys.modules, "if_verifiable" in sys.modules)
try:
    find_grader("ifbench")(row("ratio:stop_words", percentage=50))
except ValueError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": str(installed("instructions", *PACKAGES)), "HOME": "/nowhere"}
    environment.pop("NLTK_DATA", None)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == [
        "1.0 False False",
        "the rule 'ratio:stop_words' needs NLTK's data stopwords; set reward.nltk_data to a folder that has it",
    ], done.stderr
