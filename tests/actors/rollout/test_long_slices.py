"""With many groups, and with long answers, nothing runs for long on the event loop of a rollout actor."""

import gc
from typing import Any

import anyio
import msgspec
import pytest

from messages import RoundHalted
from runtime.bus.bus import Bus
from tests.build.topology import topology_with
from tests.support.loop_watch import watching_loop
from tests.support.rollout import announcement, completed_groups, grade, rollout_actor, task, until_applied
from tests.support.scripted_engine import ScriptedEngine, serving

NUM_GROUPS, NUM_SAMPLES = 64, 8

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


def pool(concurrency: int) -> dict[str, Any]:
    return {"policy": {"kind": "tiny", "concurrency": concurrency, "router": "direct"}}


async def test_a_rollout_actor_with_many_groups_does_not_hold_up_its_event_loop(bus: Bus) -> None:
    topology = topology_with(
        engines=pool(NUM_GROUPS * NUM_SAMPLES), rollout={"n_samples_per_prompt": NUM_SAMPLES, "rollout_batch_size": 64}
    )
    engine = ScriptedEngine(hold=True)
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, "http://127.0.0.1:1", [engine], topology):
            await bus.publish(announcement(1))
            await until_applied(bus, 1)
            gc.collect()
            with watching_loop() as watch:
                for group_id in range(NUM_GROUPS):
                    await bus.publish(msgspec.structs.replace(task(group_id), num_samples=NUM_SAMPLES))
                await engine.wait_for_requests(NUM_GROUPS * NUM_SAMPLES, 200)
                engine.release()
                await completed_groups(bus, NUM_GROUPS)
                await bus.publish(RoundHalted(incarnation=1, round=0))
        group.cancel_scope.cancel()
    assert watch.num_runs > NUM_GROUPS * NUM_SAMPLES
    assert watch.over() == []
