"""Environments of Gymnasium, its package from PyPI: steps become turns with their rewards; what is absent is not 0."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from messages import ColumnPublished, GroupCompleted, GroupFailed, SampleStatus
from runtime.bus.bus import Bus
from runtime.functions import isolation
from runtime.sessions.turns import TurnAnswer, TurnRefused, TurnRequest
from tests.actors.rollout.sessions.test_command import FIRST, ROOT, agent_topology, ended, row
from tests.build.turns import answer
from tests.support.played import played

pytestmark = pytest.mark.anyio

REFUSAL = isolation.refusal()
COUNTING = Path(__file__).with_name("counting_env.py")


@pytest.fixture(scope="module")
def python() -> str:
    """An interpreter that has the package."""
    subprocess.run([ROOT / "bin" / "setup", "--with", "gymnasium", "--if-needed"], check=True, timeout=300)
    return str(ROOT / ".venv-gymnasium" / "bin" / "python")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ending", "sandbox"), [("terminated", "process"), ("truncated", "process" if REFUSAL else "isolated")]
)
async def test_steps_are_turns_with_their_rewards_and_none_is_made_after_the_end(
    ending: str, sandbox: str, python: str, bus: Bus, router_url: str, tmp_path: Path
) -> None:
    command = [python, f"{COUNTING}:make"]
    topology = agent_topology(tmp_path, adapter="gymnasium", command=command, sandbox=sandbox, attempts=1)
    topology = msgspec.structs.replace(topology, reward=msgspec.structs.replace(topology.reward, per="turn"))
    given = row(tmp_path)
    prompt = msgspec.structs.replace(given.prompt, text="", metadata={"ending": ending})
    given = msgspec.structs.replace(given, prompt=prompt)
    event, engine = await ended(bus, router_url, tmp_path, topology, given)
    assert isinstance(event, GroupCompleted)
    (sample,) = event.samples
    status = SampleStatus.COMPLETED if ending == "terminated" else SampleStatus.TRUNCATED
    assert (sample.status, sample.reward, sample.metadata["num_turns"]) == (status, 0.75, 2)
    assert sample.metadata["turn_rewards"] == [0.5, 0.25]
    rewards = (await bus.fetch(ColumnPublished, sample.columns["token_rewards"])).values.tolist()
    assert (rewards[len(FIRST) - 1], rewards[-1], sum(rewards)) == (0.5, 0.25, 0.75)
    assert engine.requests[1]["input_ids"][4 : 4 + len(FIRST)] == FIRST  # recorded ids


@pytest.mark.nightly
async def test_an_environment_of_the_package_is_played_by_its_id(python: str, tmp_path: Path) -> None:
    """A message without an action is no step: the model is told what an action is, and the turn has no reward."""
    said = ["I think", *(f"Move {move}." for move in (2, 2, 1, 1, 1, 2))]

    def walk(request: TurnRequest) -> TurnAnswer:
        return answer(said[sum(message.role == "assistant" for message in request.messages)])

    make = {"is_slippery": False, "render_mode": "ansi"}
    sessions, _ = await played("gymnasium", python, tmp_path, walk, "FrozenLake-v1", make=make)
    (_, first), *_, (_, last) = sessions.turns
    assert first.messages[0].text.startswith("Walk.\n\n")
    assert "FFFH" in first.messages[0].text
    assert "a whole number from 0 to 3" in last.messages[2].text
    assert [call[1:] for call in sessions.calls] == [
        ("reward", {"reward": 1.0, "rewards": {}, "answer": None, "turns": [None, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]}),
        ("end", {"truncated": False}),
    ]


@pytest.mark.nightly
async def test_an_episode_without_a_step_fails_and_one_that_fills_the_context_is_truncated(
    python: str, tmp_path: Path
) -> None:
    sessions, _ = await played(
        "gymnasium", python, tmp_path, lambda _: answer("no"), "FrozenLake-v1", "--max-turns", "3"
    )
    assert [call[1:] for call in sessions.calls] == [("fail", {"reason": "the environment gave no reward"})]
    assert len(sessions.turns) == 3

    def one_step(request: TurnRequest) -> TurnAnswer | TurnRefused:
        if len(request.messages) > 1:
            return TurnRefused("context_full", "It does not fit.", num_tokens=9, max_tokens=8)
        return answer("0")

    sessions, _ = await played("gymnasium", python, tmp_path, one_step, "FrozenLake-v1")
    assert [call[1] for call in sessions.calls] == ["reward", "end"]
    assert sessions.calls[0][2]["turns"] == [0.0]
    assert sessions.calls[1][2] == {"truncated": True}


async def test_an_interpreter_without_the_package_fails_its_sample_by_name(
    bus: Bus, router_url: str, tmp_path: Path
) -> None:
    topology = agent_topology(tmp_path, adapter="gymnasium", command=[sys.executable, "FrozenLake-v1"], attempts=1)
    failed, _ = await ended(bus, router_url, tmp_path, topology)
    assert isinstance(failed, GroupFailed)
    assert "ModuleNotFoundError: No module named 'gymnasium'" in failed.reason
