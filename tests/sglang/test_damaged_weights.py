"""SGLang's own server reads a file of weights that is damaged by then: nothing is served from it."""

from pathlib import Path

import psutil
import pytest

from messages import WeightsAnnounced, WeightsApplied, WeightsRefused
from tests.chaos.audit import audit, read_all
from tests.chaos.harness import EVENT_S, SMALL, Run
from tests.chaos.rank_moments import planned
from tests.chaos.test_damaged_weights import K_PROJ, checked, flip_top_mantissa_bit
from tests.chaos.test_kill import finish
from tests.chaos.weight_moments import at
from tests.fixtures.nats import eventually
from tests.sglang.recipe import RECIPE, overrides
from tests.sglang.test_kills import LIMIT_S, RESTART_S

pytestmark = [pytest.mark.nightly, pytest.mark.anyio, pytest.mark.timeout(LIMIT_S)]


async def test_a_bit_that_is_flipped_before_sglang_reads_it_is_refused_and_the_weights_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment = at("before", "commit", process="trainer", signal="SIGSTOP")
    (marks := tmp_path / "marks").mkdir()
    for name, value in planned([moment], marks).items():
        monkeypatch.setenv(name, value)
    settings = (*SMALL, "reward.timeout_s=600")
    run = Run(tmp_path, num_steps=2, eval_interval=1000, topology=RECIPE, settings=settings, overrides=overrides())
    async with run.started() as command:
        command.log.event_s = command.end_s = RESTART_S
        await eventually((marks / moment.name).exists, timeout_s=RESTART_S)
        await command.log.until(lambda event: isinstance(event, WeightsApplied) and event.version == 1)
        server = psutil.Process(command.log.pids["engine.policy.0"])
        family = [server, *server.children(recursive=True)]  # its scheduler reads
        for process in family:
            process.suspend()
        psutil.Process(command.log.pids["trainer"]).resume()
        await eventually(lambda: checked(run.directory / "logs" / "rollout.jsonl", 2), timeout_s=EVENT_S)
        flip_top_mantissa_bit(run.directory / "weights" / "v000002" / "model.safetensors", K_PROJ)
        for process in family:
            process.resume()
        await finish(run, command)
    await audit(run)
    async with run.reopened() as bus:
        events = [event for _, event in await read_all(bus, run)]
    (refused,) = [event for event in events if isinstance(event, WeightsRefused)]
    assert (refused.version, refused.unusable) == (2, True)
    assert "weights/v000002/model.safetensors: damaged: its CRC-32 is " in refused.reason
    announced = [(event.version, event.again_of) for event in events if isinstance(event, WeightsAnnounced)]
    assert announced == [(1, 0), (2, 0), (3, 2), (4, 0)]
    assert [event.version for event in events if isinstance(event, WeightsApplied)] == [1, 3, 4]
