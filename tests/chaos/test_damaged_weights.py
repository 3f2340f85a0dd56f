"""Files of weights are damaged on the disk: no engine serves them, and the trainer writes the same weights again."""

import json
import signal
import struct
from pathlib import Path
from typing import Final

import psutil
import pytest

from messages import EvalEnded, WeightsAnnounced, WeightsApplied, WeightsRefused
from tests.chaos.audit import audit, read_all
from tests.chaos.harness import EVENT_S, Run
from tests.chaos.rank_moments import planned
from tests.chaos.test_kill import finish
from tests.chaos.weight_moments import at
from tests.fixtures.nats import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.anyio]

K_PROJ: Final = "model.layers.0.self_attn.k_proj.weight"
V_PROJ: Final = "model.layers.0.self_attn.v_proj.weight"


def flip_top_mantissa_bit(file: Path, name: str) -> None:
    """Change one float32 of a tensor by a quarter to a half of its size."""
    begin, _ = extent_of(file, name)
    with file.open("r+b") as opened:
        opened.seek(begin + 2)
        (byte,) = opened.read(1)
        opened.seek(begin + 2)
        opened.write(bytes([byte ^ 0x40]))


def swap(file: Path, one: str, other: str) -> None:
    """Give two tensors of one shape each other's numbers."""
    with file.open("r+b") as opened:
        places = [extent_of(file, name) for name in (one, other)]
        contents: list[bytes] = []
        for begin, end in places:
            opened.seek(begin)
            contents.append(opened.read(end - begin))
        for (begin, _), content in zip(places, reversed(contents), strict=True):
            opened.seek(begin)
            opened.write(content)


def extent_of(file: Path, name: str) -> tuple[int, int]:
    """Where a float32 tensor lies in a safetensors file."""
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    entry = json.loads(content[8 : 8 + size])[name]
    assert entry["dtype"] == "F32"
    begin, end = entry["data_offsets"]
    return 8 + size + begin, 8 + size + end


async def test_damage_while_an_engine_reads_and_damage_before_it_cost_a_version_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number, which no probe shows; then two tensors of the last version, of which an evaluation is to come."""
    moments = [at("before", "commit", process="trainer", version=number, signal="SIGSTOP") for number in (2, 4)]
    (marks := tmp_path / "marks").mkdir()
    for name, value in planned(moments, marks).items():
        monkeypatch.setenv(name, value)
    run = Run(tmp_path, num_steps=2, eval_interval=1000)
    log = run.directory / "logs" / "rollout.jsonl"
    weights = run.directory / "weights"
    async with run.started() as command:
        await eventually((marks / moments[0].name).exists, timeout_s=EVENT_S)
        await command.log.until(lambda event: isinstance(event, WeightsApplied) and event.version == 1)
        trainer = psutil.Process(command.log.pids["trainer"])
        await eventually(lambda: trainer.status() == psutil.STATUS_STOPPED, timeout_s=EVENT_S)
        engine = psutil.Process(command.log.pids["engine.policy.0"])
        engine.suspend()
        trainer.resume()
        await eventually(lambda: checked(log, 2), timeout_s=EVENT_S)
        flip_top_mantissa_bit(weights / "v000002" / "model.safetensors", K_PROJ)
        engine.resume()
        await command.log.until_there((marks / moments[1].name).exists)
        await eventually(lambda: trainer.status() == psutil.STATUS_STOPPED, timeout_s=EVENT_S)
        swap(weights / "v000004" / "model.safetensors", K_PROJ, V_PROJ)
        trainer.send_signal(signal.SIGCONT)
        await finish(run, command)
    await audit(run)
    async with run.reopened() as bus:
        events = [event for _, event in await read_all(bus, run)]
    refused = {event.version: event for event in events if isinstance(event, WeightsRefused)}
    assert set(refused) == {2, 4}
    for version, event in refused.items():
        assert event.unusable
        assert f"weights/v00000{version}/model.safetensors: damaged: its CRC-32 is " in event.reason
    announced = [event for event in events if isinstance(event, WeightsAnnounced)]
    assert [(event.version, event.step, event.again_of) for event in announced] == [
        (1, 0, 0),
        (2, 1, 0),
        (3, 1, 2),
        (4, 2, 0),
        (5, 2, 4),
    ]
    assert announced[1].checksum == announced[2].checksum
    assert [event.version for event in events if isinstance(event, WeightsApplied)] == [1, 3, 5]
    ended = [event for event in events if isinstance(event, EvalEnded)]
    assert [(event.step, event.version, event.newest_version) for event in ended] == [(0, 1, 0), (2, 4, 0)]
    assert "weights v3 are those of v2 once more" in run.output.read_text()


def checked(log: Path, version: int) -> bool:
    """Whether the rollout actor has compared the files of a version."""
    whole, _, _ = log.read_text().rpartition("\n")  # the last line may be half written
    lines = [json.loads(line) for line in whole.splitlines()]
    return any(line["event"] == "weight_files_checked" and line["weight_version"] == version for line in lines)
