"""A user's function that catches its cancellation for ever ends its process; one that ends in time does not."""

import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.rollout.samples import must_end as module
from actors.rollout.samples.evaluation_function import SetEvaluation
from actors.rollout.samples.must_end import must_end
from actors.rollout.samples.rollout_function import PromptGroup, RolloutCalls
from actors.rollout.samples.sample import fresh_samples
from actors.rollout.samples.slots import Slots
from actors.rollout.samples.tasks import training_task
from messages import Int32Array, Prompt
from tests.support.rollout import task

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[4]
PROMPT = Prompt(data="d", row=0, text="", prompt_ids=Int32Array([7]))
PROGRAM = """
import anyio
from actors.rollout.samples.must_end import must_end

async def main():
    with anyio.CancelScope() as scope, must_end("rollout.custom_generate", scope, lambda: False, limit_s=0.2):
        scope.cancel()
        while True:
            try:
                await anyio.sleep(1)
            except BaseException:
                pass

anyio.run(main)
"""


def test_the_process_ends_and_names_the_setting() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == 1
    assert "rollout.custom_generate: goes on 0.2 s after its cancellation" in ended.stdout


async def test_a_function_that_ends_in_time_or_waits_for_this_project_is_left_alone() -> None:
    is_waiting = True
    with anyio.CancelScope() as scope, must_end("k", scope, lambda: is_waiting, limit_s=0.05):
        scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0.2)  # in an outage of the bus
    with anyio.CancelScope() as scope, must_end("k", scope, lambda: False, limit_s=0.05):
        await anyio.sleep(0.2)  # not cancelled


async def evaluated(function: Callable[[Any], Awaitable[None]]) -> None:
    async def run_sample(*_: Any) -> None: ...

    evaluation = SetEvaluation("s", [PROMPT], run_sample, step=0, num_samples=1, key="eval.0", limit_s=0.05)
    await evaluation.run(function)


async def rolled_out(function: Callable[[Any], Awaitable[None]]) -> None:
    async def run_sample(*_: Any) -> None: ...

    samples, of = fresh_samples(1, PROMPT.prompt_ids), training_task(task(0), "lease", group_rm=False)
    group = PromptGroup(samples, run_sample, slots=Slots(1).reserve(1), task=of)
    with pytest.raises(ValueError, match=r"rollout\.custom_rollout"):
        await RolloutCalls(limit_s=0.05).run(function, group, None)


@pytest.mark.parametrize("run", [evaluated, rolled_out])
async def test_functions_that_ask_for_samples_must_end(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(module, "LIMIT_S", 0.1)
    monkeypatch.setattr(module.os, "_exit", codes.append)

    async def catches_all(_: Any) -> None:
        while not codes:
            try:
                await anyio.sleep(0.01)
            except BaseException:  # noqa: BLE001 - the mistake
                pass

    with anyio.fail_after(20):
        await run(catches_all)
    assert codes[0] == 1
