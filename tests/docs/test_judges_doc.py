"""docs/train/judges.md: its tables pass the rules, its functions do what the page says."""

import tomllib
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from actors.reward.graders.calling import grade_sample, resolve_grader
from actors.reward.grades import GraderSpec
from actors.reward.judging.gateway import KEY_VARIABLE, URL_VARIABLE
from actors.reward.samples import GradedSample
from runtime.settings.load import load_topology
from tests.docs.snippets import snippets
from tests.runtime.settings.shipped import LAPTOP
from tests.support.judging import ScriptedJudge, serving

PAGE = Path(__file__).parents[2] / "docs/train/judges.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for block in snippets(PAGE, "python"):
        (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    return tmp_path


def flat(table: dict[str, Any], prefix: str = "") -> list[str]:
    """The settings of a table of reward or engines as overrides."""
    return [
        setting
        for key, value in table.items()
        for setting in (
            flat(value, f"{prefix}{key}.")
            if isinstance(value, dict) and key != "extra_body"
            else [f"{prefix}{key}={_toml(value)}"]
        )
    ]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + "}"
    return '"' + value.replace("\n", "\\n") + '"' if isinstance(value, str) else str(value)


def test_the_judges_of_the_page_can_be_loaded() -> None:
    blocks = [tomllib.loads(block) for block in snippets(PAGE, "toml")]
    assert len(blocks) == 5
    for block in blocks:
        block.pop("data", None)
        block.setdefault("engines", {"judge": {"kind": "tiny", "hf_checkpoint": "m"}})["judge"].pop("gpus", None)
        if "url" in block["reward"]["judges"]["quality"]:
            block.pop("engines")
        assert load_topology(LAPTOP, flat(block)).topology.reward.judges["quality"].max_tries == 3


def score(folder: Path, name: str, sample: GradedSample, *, parses: bool = False) -> float | str | None:
    grader = resolve_grader(GraderSpec(name=name, parses=parses), [folder])
    graded = grade_sample(grader, sample, reward_key=None, wait=lambda _: None)
    return graded.error or graded.reward


def test_the_parser_of_the_page_works(folder: Path) -> None:
    answers = {"Well argued.\nYes.": 1.0, "no": 0.0}
    for answer, expected in answers.items():
        assert score(folder, "my_parser.py:verdict", GradedSample(judge_answer=answer), parses=True) == expected
    assert "KeyError" in str(score(folder, "my_parser.py:verdict", GradedSample(judge_answer="maybe"), parses=True))


@pytest.mark.anyio
async def test_the_grader_of_the_page_calls_a_judge(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    async with serving(ScriptedJudge("B", "A")) as judge:
        monkeypatch.setenv(URL_VARIABLE, f"{judge.url}/v1")
        monkeypatch.setenv(KEY_VARIABLE, "k")
        name, sample = "my_judged.py:better_than_the_label", GradedSample(label="x", response="y")
        for expected in (1.0, 0.0):
            assert await anyio.to_thread.run_sync(score, folder, name, sample) == expected
    assert judge.bodies[0]["model"] == "quality"
    assert judge.keys == ["Bearer k"] * 2
