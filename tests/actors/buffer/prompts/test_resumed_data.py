"""A run goes on with the data it began with, or not at all."""

import json
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from actors.registry import hosted
from messages import PromptsLoaded
from runtime.bus.bus import Bus
from runtime.process.actor import InputError
from runtime.process.hosting import host
from runtime.settings.topology import Topology
from runtime.util.errors import flatten
from tests.build.topology import topology_with

pytestmark = pytest.mark.anyio

MODEL = Path(__file__).resolve().parents[4] / "topologies/demo/models/reverse-digits"


def write(path: Path, prompts: Sequence[int]) -> None:
    path.write_text("".join(json.dumps({"input": str(prompt), "label": "1"}) + "\n" for prompt in prompts))


@pytest.fixture
def topology(tmp_path: Path) -> Topology:
    """A training source and an evaluation set with one name, in files of their own."""
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    write(train, range(10))
    write(test, range(3))
    data = [{"name": "d", "path": str(train), "rm_type": "exact_match"}]
    evals = [{"name": "d", "path": str(test), "interval": 1}]
    return topology_with(model={"hf_checkpoint": str(MODEL)}, data=data, eval=evals)


async def load(bus: Bus, topology: Topology) -> list[PromptsLoaded]:
    """Start a buffer and stop it once it has told of its data."""
    async with bus.read(PromptsLoaded) as events:
        while events.pending:
            await events.next()
        async with anyio.create_task_group() as group:
            group.start_soon(host, bus, [hosted("buffer", topology, Path())])
            told = [await events.next(40) for _ in range(2)]
            group.cancel_scope.cancel()
    return [received.message for received in told if received is not None]


async def refusal(bus: Bus, topology: Topology) -> str:
    with pytest.raises(ExceptionGroup) as caught, anyio.fail_after(200):
        await host(bus, [hosted("buffer", topology, Path())])
    (error,) = flatten(caught.value)
    assert isinstance(error, InputError)
    return str(error)


async def test_a_run_is_resumed_on_the_same_data(bus: Bus, topology: Topology) -> None:
    first, again = await load(bus, topology), await load(bus, topology)
    assert [loaded.fingerprint for loaded in first] == [loaded.fingerprint for loaded in again]
    assert len({loaded.fingerprint for loaded in first}) == 2


@pytest.mark.parametrize(("name", "prompts"), [("train", [*range(1, 10), 0]), ("train", range(11)), ("test", range(4))])
async def test_a_run_is_not_resumed_on_other_data(
    bus: Bus, topology: Topology, tmp_path: Path, name: str, prompts: Sequence[int]
) -> None:
    before = [loaded.fingerprint for loaded in await load(bus, topology)]
    write(tmp_path / f"{name}.jsonl", prompts)
    said = await refusal(bus, topology)
    assert said.startswith("buffer: data d changed since this run began: its fingerprint is ")
    assert f"it was {' or '.join(before)}. Restore its file" in said
    assert said.endswith("or start over with --fresh t")
    async with bus.read(PromptsLoaded) as events:
        assert events.pending == 2  # a refused start leaves no trace


async def test_data_that_was_told_of_without_a_fingerprint_is_taken_as_it_is(bus: Bus, topology: Topology) -> None:
    await bus.publish(PromptsLoaded(data="d", num_prompts=1, num_too_long=0, took_s=0.0))
    assert len(await load(bus, topology)) == 2
