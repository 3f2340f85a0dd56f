"""laptop.toml with versions that are deltas: trainer, engine and daemon die at their moments; the books close."""

import json
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from messages import Message, TrainerStarted, WeightsAnnounced, WeightsApplied, WeightsRefused
from runtime.models.checksums import checksums_of
from runtime.models.delta import Version, held_in
from runtime.models.versions import versions_in
from tests.chaos.audit import audit, read_all
from tests.chaos.harness import EVENT_S, ROOT, Run
from tests.chaos.rank_moments import PROCESS, planned
from tests.chaos.weight_moments import at
from tests.fixtures.nats import eventually
from tests.support.published import flip

pytestmark = [pytest.mark.chaos, pytest.mark.anyio]

MOMENTS = (
    at("before", "commit", process="trainer", version=3),  # changes, of which nobody is told
    at("during", "bucket", 0, process="daemon", version=6),  # the third of a chain, half written
)


async def test_trainer_engine_and_agent_die_while_versions_are_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (marks := tmp_path / "marks").mkdir()
    for name, value in planned(MOMENTS, marks).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(PROCESS, "daemon")  # the command is one
    overrides = ("trainer.full_export_interval=4", "engines.policy.num_engines=2")
    run = Run(tmp_path, num_steps=8, eval_interval=4, overrides=overrides)
    async with run.started() as command:
        await command.log.until(lambda event: isinstance(event, WeightsAnnounced) and event.base_version == 3)
        command.log.kill("engine.policy.1")
        family = command.family()
        assert await command.end() == -signal.SIGKILL
    await run.gone(family)
    copies = run.directory / "copies" / "local"
    assert (copies / ".v000006").is_dir()
    async with run.started() as command:
        assert await command.end() == 0
    await run.gone()
    assert {mark.name for mark in marks.iterdir()} == {moment.name for moment in MOMENTS}
    await audit(run, killed=["trainer", "engine.policy.1"])
    async with run.reopened() as bus:
        log = [event for _, event in await read_all(bus, run)]
    check_versions(log)
    announced = [event for event in log if isinstance(event, WeightsAnnounced)]
    kept = versions_in(copies)
    assert len(kept) == 2
    assert held_in(kept[-1][1]) == Version(announced[-1].version, announced[-1].checksum)
    assert checksums_of(kept[-1][1]).total == announced[-1].checksum
    assert not list(copies.glob(".*"))


async def test_changes_that_are_damaged_are_refused_by_name_and_a_whole_version_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At max_staleness 0: without another version nothing would be generated any more. Two pipeline stages write."""
    moment = at("before", "commit", process="trainer.0", version=3, signal="SIGSTOP")
    shutil.copytree(ROOT / "topologies/demo/models/reverse-digits", model := tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 2}
    (model / "config.json").write_text(json.dumps(config))
    layout = ("trainer.num_processes=2", "trainer.megatron.pipeline_model_parallel_size=2")
    overrides = (*layout, f"model.hf_checkpoint={model}", "trainer.full_export_interval=10")
    (marks := tmp_path / "marks").mkdir()
    for name, value in planned([moment], marks).items():
        monkeypatch.setenv(name, value)
    run = Run(tmp_path, num_steps=5, eval_interval=1000, overrides=overrides)
    async with run.started() as command:
        await eventually((marks / moment.name).exists, timeout_s=EVENT_S)
        await command.log.until(lambda event: isinstance(event, WeightsApplied) and event.version == 2)
        trainer = psutil.Process(command.log.pids["trainer.0"])
        await eventually(lambda: trainer.status() == psutil.STATUS_STOPPED, timeout_s=EVENT_S)
        flip(run.directory / "weights" / "v000003" / "delta-00002-of-00002.bin", 0)
        trainer.send_signal(signal.SIGCONT)
        assert await command.end() == 0
    await run.gone()
    await audit(run)
    async with run.reopened() as bus:
        log = [event for _, event in await read_all(bus, run)]
    refused = [event for event in log if isinstance(event, WeightsRefused)]
    assert {event.version for event in refused} == {3}
    assert "v000003/delta-00002-of-00002.bin: damaged: " in refused[0].reason
    announced = [event for event in log if isinstance(event, WeightsAnnounced)]
    assert [event.kind for event in announced] == ["full", "delta", "delta", "full", "delta", "delta", "delta"]
    assert announced[3].checksum == announced[2].checksum
    assert [event.version for event in log if isinstance(event, WeightsApplied)] == [1, 2, 4, 5, 6, 7]


def check_versions(log: list[Message]) -> None:
    """A trainer's first version is whole, and each fourth after it; engines refused none, and hold the newest."""
    kinds: list[list[str]] = []
    newest = applied = 0
    for event in log:
        match event:
            case TrainerStarted():
                kinds.append([])
            case WeightsAnnounced():
                kinds[-1].append(event.kind)
                newest = event.version
                assert event.base_version == (event.version - 1 if event.kind == "delta" else 0)
                assert (event.delta_bytes > 0) == (event.kind == "delta")
            case WeightsApplied():
                applied = event.version
            case _:
                assert not isinstance(event, WeightsRefused)
    wanted = ["full", "delta", "delta", "delta"] * 3
    assert len(kinds) == 3
    assert all(told == wanted[: len(told)] for told in kinds)
    assert kinds[0] == ["full", "delta"]
    assert applied == newest
