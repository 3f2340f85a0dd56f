"""An engine whose process is broken answers and refuses all weights: it is started again, also the only one."""

from pathlib import Path

import psutil
import pytest

from messages import ActorExited, WeightsRefused
from tests.chaos.audit import audit, read_all
from tests.chaos.harness import Run
from tests.chaos.test_kill import finish
from tests.chaos.test_lost_weights import COLOCATED

pytestmark = [pytest.mark.chaos, pytest.mark.anyio]


async def test_the_only_engine_loses_the_child_that_opens_shared_memory_for_it(tmp_path: Path) -> None:
    run = Run(tmp_path, num_steps=4, topology=COLOCATED, eval_interval=1000)
    async with run.started() as command:
        await command.log.until_trained(1)
        engine = psutil.Process(command.log.pids["engine.policy.0"])
        (helper,) = [child for child in engine.children(recursive=True) if "torch_shm" in child.name()]
        helper.kill()
        await finish(run, command)
    await audit(run, killed=["engine.policy.0"])
    async with run.reopened() as bus:
        events = [event for _, event in await read_all(bus, run)]
    refused = [event.reason for event in events if isinstance(event, WeightsRefused)]
    assert "unreadable tensors: " in refused[0]  # "Broken pipe", or "Connection reset by peer"
    ended = [event for event in events if isinstance(event, ActorExited) and event.restart_in_s is not None]
    assert [event.actor for event in ended] == ["engine.policy.0"]
    assert "it kept refusing weights" in ended[0].reason
