"""A user's function chooses the sampling parameters of a training prompt, in a process of its own."""

from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from actors.rollout.samples.conversation import Conversation, FunctionFailed
from actors.rollout.samples.sample import OpenSample
from actors.rollout.samples.sampling_function import KEY, SamplingFunction
from messages import Int32Array, Prompt, SampleKey, SampleStatus, SamplingParams
from runtime.functions.table import SAMPLING
from tests.build.topology import topology_with
from tests.docs.snippets import snippets
from tests.support.any_tokens import AnyTokens
from tests.support.checks import function_problems

PAGE = Path(__file__).parents[4] / "docs" / "train" / "multi-turn.md"
WRONG = """
def raises(prompt): return 1 / 0
def number(prompt): return 0.7
def unknown(prompt): return {"seed": 1}
def impossible(prompt): return {"top_p": 2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The page's file, and one with mistakes."""
    (block,) = (block for block in snippets(PAGE, "python") if block.startswith("# my_sampling.py"))
    (tmp_path / "my_sampling.py").write_text(block)
    (tmp_path / "wrong.py").write_text(WRONG)
    return tmp_path


async def sampled(name: str, metadata: dict[str, Any], *, evaluation: bool = False) -> tuple[SamplingParams, int]:
    """Run the function for a sample; return what its turn was asked with, and its longest length."""
    asked: list[tuple[SamplingParams, int]] = []
    prompt = Prompt(data="d", row=0, text="3+4=", prompt_ids=Int32Array([1]), metadata=metadata)

    async def ask(sample: OpenSample, params: SamplingParams, limit: int) -> bool:
        asked.append((params, limit))
        sample.buffer.append(np.array([2]), np.array([-1.0]), "7", "1@engine")
        sample.take(SampleKey(group_id=0, attempt=0, index=0), prompt.prompt_ids)
        sample.turn_status = SampleStatus.COMPLETED
        return False

    conversation = Conversation(
        prompt,
        OpenSample(index=0, prompt_len=1),
        params=SamplingParams(max_new_tokens=100, top_p=0.9),
        ask=ask,
        model=AnyTokens(lambda text: [len(text)]),
        evaluation=evaluation,
        key=KEY,
    )
    sampling = SamplingFunction(topology_with(rollout={"custom_sampling": name}))
    with anyio.fail_after(200):
        async with anyio.create_task_group() as group:
            await group.start(sampling.run)
            assert sampling.keyed is not None
            assert await conversation.run(sampling.keyed.function) is SampleStatus.COMPLETED
            group.cancel_scope.cancel()
    (found,) = asked
    return found


@pytest.mark.anyio
async def test_the_metadata_of_a_prompt_decide_how_it_is_sampled(folder: Path) -> None:
    name = f"{folder}/my_sampling.py:by_difficulty"
    hard, limit = await sampled(name, {"level": 5})
    assert (hard.temperature, hard.top_p, limit) == (1.2, 0.9, 100)
    easy, limit = await sampled(name, {"level": 1})
    assert (easy.temperature, easy.top_p, limit) == (1.0, 0.9, 64)


@pytest.mark.anyio
async def test_an_evaluation_keeps_its_own_sampling(folder: Path) -> None:
    params, limit = await sampled(f"{folder}/my_sampling.py:by_difficulty", {"level": 5}, evaluation=True)
    assert (params.temperature, limit) == (1.0, 100)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("raises", "division by zero"),
        ("number", "returned 0.7; expected a dictionary"),
        ("unknown", "seed.*; allowed: temperature, top_p, top_k, stop, max_new_tokens"),
        ("impossible", "top_p = 2"),
    ],
)
async def test_a_wrong_answer_costs_its_sample(folder: Path, function: str, said: str) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(FunctionFailed, match=rf"^rollout.custom_sampling: .*{said}")):
        await sampled(f"{folder}/wrong.py:{function}", {})


@pytest.mark.anyio
async def test_only_the_call_that_hangs_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hangs.py").write_text(
        "import time\ndef hangs(prompt): time.sleep(prompt.metadata.get('s', 0)); return {'temperature': 0.5}"
    )
    limited = msgspec.structs.replace(SAMPLING, timeout_s=0.5)
    monkeypatch.setattr("actors.rollout.samples.sampling_function.SAMPLING", limited)
    sampling = SamplingFunction(topology_with(rollout={"custom_sampling": f"{tmp_path}/hangs.py:hangs"}))
    ended: list[str] = []

    async def choose(metadata: dict[str, Any]) -> None:
        try:
            ended.append(str(await sampling.chosen("3+4=", None, metadata)))
        except FunctionFailed as error:
            ended.append(str(error))

    with anyio.fail_after(200):
        async with anyio.create_task_group() as group:
            await group.start(sampling.run)
            async with anyio.create_task_group() as calls:
                for seconds in (1000, 1000, 0, 0):
                    calls.start_soon(choose, {"s": seconds})
            group.cancel_scope.cancel()
    late = "rollout.custom_sampling: no answer within 0.5 s"
    assert ended == [late, late, "{'temperature': 0.5}", "{'temperature': 0.5}"]


def test_a_start_finds_the_function_and_what_contradicts_it(folder: Path) -> None:
    name = f"{folder}/my_sampling.py:by_difficulty"
    assert function_problems(topology_with(rollout={"custom_sampling": name})) == []
    (missing,) = function_problems(topology_with(rollout={"custom_sampling": f"{folder}/my_sampling.py:by_level"}))
    assert (missing.key, "there is no 'by_level' in it" in missing.message) == ("rollout.custom_sampling", True)
    (folder / "talk.py").write_text("async def talk(conversation): await conversation.generate()")
    both = {"custom_sampling": name, "custom_generate": f"{folder}/talk.py:talk"}
    (problem,) = function_problems(topology_with(rollout=both))
    assert problem.message.startswith("custom_generate and custom_rollout choose the sampling of a turn themselves")
