"""A user's function that catches its cancellation for ever fails its task and ends its process.

One that ends in time does neither.
"""

import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from actors.rollout.samples import must_end as module
from actors.rollout.samples.conversation import Conversation
from actors.rollout.samples.evaluation_function import SetEvaluation
from actors.rollout.samples.must_end import must_end
from actors.rollout.samples.rollout_function import PromptGroup, RolloutCalls
from actors.rollout.samples.sample import fresh_samples
from actors.rollout.samples.slots import Slots
from actors.rollout.samples.tasks import training_task
from messages import (
    EvalCompleted,
    EvalRequested,
    EvalSetRequested,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupsClosed,
    Int32Array,
    Prompt,
    RoundHalted,
    SampleStatus,
    SamplingParams,
)
from runtime.bus.bus import Bus
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.rollout import announcement, grade, next_event, rollout_actor, task
from tests.support.scripted_engine import ScriptedEngine, serving

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
HERE = "tests.actors.rollout.samples.test_must_end"
CODES: list[int] = []  # of the process, which does not end here
HANGING: list[Any] = []  # calls that caught their cancellation or wait for it


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    CODES.clear()
    HANGING.clear()
    monkeypatch.setattr(module, "LIMIT_S", 0.3)
    monkeypatch.setattr(module.os, "_exit", CODES.append)
    return CODES


async def catches_all(called_with: Any) -> None:
    """Ends only with its process, which is here the fixture's list."""
    HANGING.append(called_with)
    while not CODES:
        try:
            await anyio.sleep(0.01)
        except BaseException:  # noqa: BLE001 - the mistake
            pass


async def hangs_for_one(conversation: Conversation) -> None:
    await conversation.generate(max_new_tokens=4)
    if conversation.label == "hang":
        await catches_all(conversation)


def labelled(group_id: int, label: str) -> Any:
    given = task(group_id)
    return msgspec.structs.replace(given, prompt=msgspec.structs.replace(given.prompt, label=label))


def test_the_process_ends_and_names_the_setting() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
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
async def test_functions_that_ask_for_samples_must_end(run: Any, codes: list[int]) -> None:
    with anyio.fail_after(200):
        await run(catches_all)
    assert codes == [1]


async def test_the_group_of_such_a_function_fails_alone_and_does_not_come_again(
    bus: Bus, router_url: str, codes: list[int]
) -> None:
    of = {"custom_generate": f"{HERE}:hangs_for_one", "custom_generate_timeout_s": 0.2}
    topology = topology_with(rollout=of)
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology, ack_wait_s=1.0):
            await bus.publish(announcement(1))
            await bus.publish(labelled(0, "hang"))
            await bus.publish(task(1))
            failed, _ = await next_event(bus, GroupFailed)
            assert not codes, "the process has ended before the event"
            await eventually(lambda: bool(codes))
        num_hanging = len(HANGING)
        async with rollout_actor(bus, router_url, [engine], topology, ack_wait_s=1.0):  # started again
            await bus.publish(task(2))
            await eventually(lambda: _ended(bus, 3))
        group.cancel_scope.cancel()
    assert isinstance(failed, GroupFailed)
    assert failed.group_id == 0
    assert failed.reason == (
        "rollout.custom_generate: goes on 0.3 s after its cancellation, which it catches (except BaseException)"
    )
    assert (num_hanging, len(HANGING)) == (2, 2)


async def _ended(bus: Bus, number: int) -> bool:
    """Whether there are exactly so many events of ended groups."""
    async with bus.read(GroupCompleted, GroupFailed, GroupAborted) as events:
        found = [await events.next(5) for _ in range(number)]
        return all(found) and await events.next(0.2) is None


async def test_a_group_whose_function_catches_its_end_after_a_halt_is_given_back(
    bus: Bus, router_url: str, codes: list[int]
) -> None:
    topology = topology_with(rollout={"custom_generate": f"{HERE}:hangs_for_one"})
    async with serving(ScriptedEngine()) as engine, rollout_actor(bus, router_url, [engine], topology):
        await bus.publish(announcement(1))
        await bus.publish(labelled(0, "hang"))
        await eventually(lambda: len(HANGING) == 2)
        await bus.publish(RoundHalted(incarnation=1, round=0))
        ended, _ = await next_event(bus, GroupAborted, GroupFailed)
        assert not codes, "it was held"
        await bus.publish(GroupsClosed(incarnation=1, group_ids=(0,), outcome="dropped", reason="halted"))
        await eventually(lambda: bool(codes))
    assert isinstance(ended, GroupAborted)


async def test_evaluations_of_such_functions_end_with_the_reason(bus: Bus, router_url: str, codes: list[int]) -> None:
    """One item of a set without an evaluation function, and a whole set with one."""
    of = {"custom_generate": f"{HERE}:hangs_for_one", "custom_generate_timeout_s": 0.2}
    own = {"name": "own", "path": "p.jsonl", "interval": 1, "custom_evaluation": f"{HERE}:catches_all"}
    plain = {"name": "plain", "path": "p.jsonl", "interval": 1}
    topology = topology_with(rollout=of, eval=[own, plain])
    prompt = labelled(0, "hang").prompt
    requests = [
        EvalRequested(
            step=0,
            set="plain",
            item=0,
            version=1,
            prompt=prompt,
            num_samples=1,
            sampling=SamplingParams(max_new_tokens=8),
        ),
        EvalSetRequested(step=0, set="own", version=1, num_items=1, prompts=(prompt,)),
    ]
    found: dict[str, EvalCompleted] = {}
    async with serving(ScriptedEngine()) as engine:
        for number, request in enumerate(requests):
            codes.clear()
            async with rollout_actor(bus, router_url, [engine], topology):
                if not number:
                    await bus.publish(announcement(1))
                await bus.publish(request)
                await eventually(lambda: bool(codes))
    async with bus.read(EvalCompleted) as events:
        for _ in requests:
            received = await events.next(15)
            assert received is not None
            found[received.message.set] = received.message
    said = "goes on 0.3 s after its cancellation, which it catches (except BaseException)"
    (sample,) = found["plain"].samples
    assert (sample.status, sample.reason) == (SampleStatus.FAILED, f"rollout.custom_generate: {said}")
    assert found["own"].failed == f"eval.0.custom_evaluation: {said}"
