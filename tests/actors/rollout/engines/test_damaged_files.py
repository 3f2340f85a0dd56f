"""Files of weights are compared with their announcement before and after an engine reads them."""

from pathlib import Path

import anyio
import pytest

from messages import (
    EvalIssued,
    EvalSetSize,
    FileSum,
    KillAnswered,
    KillRequested,
    Message,
    WeightsAnnounced,
    WeightsApplied,
    WeightsLost,
    WeightsRefused,
)
from runtime.bus.bus import Bus
from runtime.models.file_sums import sum_of
from runtime.util.retrying import Backoff
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.published import flip
from tests.support.rollout import announcement, next_event, rollout_actor, until_applied
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio

FILE = "model.safetensors"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.rollout.engines.failures.REFUSED_PATIENCE_S", 0.4)
    monkeypatch.setattr("actors.rollout.engines.failures.RESTART_AFTER_S", 0.2)
    monkeypatch.setattr("actors.rollout.engines.fleet.RETRY", Backoff(first_s=0.02))
    monkeypatch.setattr("actors.rollout.engines.weights.updater.CLEAR_S", 0.1)


def version(root: Path, number: int, *, again_of: int = 0) -> WeightsAnnounced:
    """A version whose files lie there."""
    directory = root / f"v{again_of or number}{'b' if again_of else ''}"
    directory.mkdir()
    (directory / FILE).write_bytes(bytes(1000))
    files: dict[str, FileSum] = {FILE: sum_of(directory / FILE)}
    checksum = f"files {again_of or number}"
    return announcement(number, path=str(directory), files=files, again_of=again_of, checksum=checksum)


def damage(announced: WeightsAnnounced) -> None:
    flip(Path(announced.path) / FILE, 500)


async def refusal(bus: Bus) -> WeightsRefused:
    event, _ = await next_event(bus, WeightsRefused)
    assert isinstance(event, WeightsRefused)
    return event


async def test_an_engine_that_read_a_damaged_file_is_refused_and_takes_the_same_weights_again(
    bus: Bus, router_url: str, tmp_path: Path
) -> None:
    """Its label, its checksum and the probe are right."""
    gate = anyio.Event()
    first, again = version(tmp_path, 1), version(tmp_path, 2, again_of=1)
    async with (
        serving(ScriptedEngine(update_at=gate)) as engine,
        rollout_actor(bus, router_url, [engine], topology_with()),
    ):
        await bus.publish(first)
        await eventually(lambda: "update" in engine.calls)
        damage(first)
        gate.set()
        refused = await refusal(bus)
        await bus.publish(again)
        await until_applied(bus, 2)
        async with bus.read(WeightsApplied) as events:
            applied = await events.next(40)
    assert (refused.version, refused.unusable) == (1, True)
    assert refused.reason.startswith(
        f"its files differ from the announced ones: {first.path}/{FILE}: damaged: its CRC-32"
    )
    assert applied is not None
    assert applied.message.version == 2


async def test_damaged_files_are_not_read_and_no_engine_is_started_again_for_them(
    bus: Bus, router_url: str, tmp_path: Path
) -> None:
    asked: list[Message] = []

    async def kill(request: KillRequested) -> KillAnswered:
        asked.append(request)
        return KillAnswered(killed=True)

    first, again = version(tmp_path, 1), version(tmp_path, 2, again_of=1)
    damage(first)
    async with (
        bus.serve({KillRequested: kill}),
        serving(ScriptedEngine()) as engine,
        rollout_actor(bus, router_url, [engine], topology_with(), daemon=bus.name),
    ):
        await bus.publish(first)
        assert (await refusal(bus)).unusable
        await anyio.sleep(1.0)  # several times as long as an engine may refuse
        await bus.publish(again)
        await until_applied(bus, 2)
        assert engine.updates == [again.path]
    assert asked == []


async def test_what_a_damaged_file_became_is_not_what_other_engines_are_compared_with(
    bus: Bus, router_url: str, tmp_path: Path
) -> None:
    """Announced again they have the same checksum, and become other tensors than the damaged ones."""
    gate = anyio.Event()
    first, again = version(tmp_path, 1), version(tmp_path, 2, again_of=1)
    engine = ScriptedEngine(update_at=gate, loads=lambda path: "right" if path == again.path else "damaged")
    async with serving(engine), rollout_actor(bus, router_url, [engine], topology_with()):
        await bus.publish(first)
        await eventually(lambda: "update" in engine.calls)
        damage(first)
        gate.set()
        await refusal(bus)
        await bus.publish(again)
        await until_applied(bus, 2)


async def test_an_engine_that_cannot_read_a_damaged_file_names_the_damage(
    bus: Bus, router_url: str, tmp_path: Path
) -> None:
    gate = anyio.Event()
    first = version(tmp_path, 1)
    async with (
        serving(ScriptedEngine(update_at=gate, refuses_weights=True)) as engine,
        rollout_actor(bus, router_url, [engine], topology_with()),
    ):
        await bus.publish(first)
        await eventually(lambda: "update" in engine.calls)
        (Path(first.path) / FILE).unlink()
        gate.set()
        refused = await refusal(bus)
    assert refused.unusable
    assert f"{FILE}: cannot be read: No such file or directory" in refused.reason


async def test_an_evaluation_of_weights_that_no_engine_can_read_goes_on_with_newer_ones(
    bus: Bus, router_url: str, tmp_path: Path
) -> None:
    """Its trainer has newer ones and never the old ones again."""
    first, newer = version(tmp_path, 1), version(tmp_path, 2)
    damage(first)
    sets = (EvalSetSize(set="s", num_items=1),)
    async with serving(ScriptedEngine()) as engine, rollout_actor(bus, router_url, [engine], topology_with()):
        for event in (first, EvalIssued(incarnation=1, step=0, version=1, sets=sets), newer):
            await bus.publish(event)
        lost, _ = await next_event(bus, WeightsLost)
        await until_applied(bus, 2)
    assert lost == WeightsLost(version=1, newer=2, instance="rollout")


async def test_nothing_is_compared_where_engines_are_to_prove_nothing(
    bus: Bus, router_url: str, tmp_path: Path
) -> None:
    topology = topology_with(engines={"policy": {"kind": "tiny", "concurrency": 8, "verify": "never"}})
    first = version(tmp_path, 1)
    damage(first)
    async with serving(ScriptedEngine()) as engine, rollout_actor(bus, router_url, [engine], topology):
        await bus.publish(first)
        await until_applied(bus, 1)
