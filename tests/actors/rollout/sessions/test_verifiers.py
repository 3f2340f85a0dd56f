"""Environments of verifiers, its package from PyPI: rewards by their weights; an episode that failed has none."""

import subprocess
from pathlib import Path

import pytest

from runtime.sessions.turns import TurnAnswer, TurnRefused, TurnRequest
from tests.actors.rollout.sessions.test_command import ROOT
from tests.build.turns import answer
from tests.support.played import played

pytestmark = [pytest.mark.anyio, pytest.mark.nightly]

TASKS = "number_tasks"  # the module beside this one


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> str:
    """An interpreter that has the package, and the task set on its path."""
    subprocess.run([ROOT / "bin" / "setup", "--with", "verifiers", "--if-needed"], check=True, timeout=300)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return str(ROOT / ".venv-verifiers" / "bin" / "python")


@pytest.mark.parametrize(("text", "reward"), [("47", 0.5), ("48", 0.0)])
async def test_a_task_is_played_by_its_harness_and_rewarded_by_its_weights(
    text: str, reward: float, python: str, tmp_path: Path
) -> None:
    sessions, _ = await played("verifiers", python, tmp_path, lambda _: answer(text), TASKS, task=0)
    assert [[message.text for message in request.messages] for _, request in sessions.turns] == [
        ["47"],
        ["47", text, "1"],
    ]
    assert [call[1:] for call in sessions.calls] == [
        ("reward", {"reward": reward, "rewards": {"right": reward}, "answer": None, "turns": []}),
        ("end", {"truncated": False}),
    ]


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (1, "TaskError: task NumberTask scoring: RuntimeError: no grader is in"),
        (2, "RuntimeError: the sandbox is gone"),
        (3, "metadata.task = 3: the task set number_tasks has fewer tasks"),
        (None, "metadata.task = None of the row: the number of a task is needed"),
    ],
)
async def test_what_fails_is_a_failed_attempt_and_never_a_reward(
    task: int | None, reason: str, python: str, tmp_path: Path
) -> None:
    sessions, printed = await played("verifiers", python, tmp_path, lambda _: answer("47"), TASKS, ends=1, task=task)
    assert reason in printed.splitlines()[-1]
    assert sessions.calls == []


async def test_an_answer_that_the_model_refuses_is_no_reward(python: str, tmp_path: Path) -> None:
    def one_turn(request: TurnRequest) -> TurnAnswer | TurnRefused:
        return answer("47") if len(request.messages) == 1 else TurnRefused("failed", "The engine is gone.")

    sessions, printed = await played("verifiers", python, tmp_path, one_turn, TASKS, ends=1, task=0)
    assert "the episode failed" in printed.splitlines()[-1]
    assert sessions.calls == []
