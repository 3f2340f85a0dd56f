"""What isolated graders do not see of runs, dumps and data."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.reward.sandbox import sandbox_of
from runtime.settings.tables.prompts import DataConfig, EvalConfig
from runtime.settings.tables.run import RunConfig
from runtime.settings.topology import Topology
from tests.actors.reward.test_sandbox import REFUSAL, details_of, graded_by, refused
from tests.build.topology import trainer_topology

pytestmark = pytest.mark.anyio


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory of runs, dumps and data, as a topology names them."""
    for name in ("runs/mine/bus.url", "runs/other/bus.url", "runs/other/topology.json", "runs/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    for name in ("dumped/rollout_0.jsonl", "read/rollout_0.npz", "train.jsonl", "test.jsonl", "login.toml", "free.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    return tmp_path


def isolated_topology(place: Path, runs: str = "runs", **reward: Any) -> Topology:
    topology = trainer_topology(place, place / runs, reward={"sandbox": "isolated", **reward})
    data = DataConfig(name="d", path=f"{place}/train.jsonl@[0:1]", rm_type="exact_match")
    return msgspec.structs.replace(
        topology,
        run=RunConfig(name="mine", dir=str(place / runs), dump_details=f"{place}/dumped", load=f"{place}/read"),
        data=(data,),
        eval=(EvalConfig(name="e", interval=1, path=f"{place}/test.jsonl", rm_type="exact_match"),),
        bus=msgspec.structs.replace(topology.bus, credentials=f"{place}/login.toml"),
    )


def files_in(place: Path) -> list[str]:
    return sorted(map(str, place.rglob("*.*")))


async def seen_of(topology: Topology, place: Path) -> dict[str, Any]:
    folders = [str(place / name) for name in ("runs", "runs/mine", "runs/other", "dumped", "read")]
    (graded,) = await graded_by("reads", sandbox=sandbox_of(topology), files=files_in(place), folders=folders)
    return details_of(graded)


async def test_an_isolated_grader_reads_no_label_no_dump_and_nothing_of_any_run(place: Path) -> None:
    if REFUSAL is not None:
        return await refused()
    seen = await seen_of(isolated_topology(place), place)
    assert (seen["files"], seen["folders"]) == ("free.txt", "")


async def test_where_graders_lie_beside_runs_the_runs_alone_are_hidden(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if REFUSAL is not None:
        return await refused()
    monkeypatch.chdir(place / "runs")
    (place / "runs" / "new").mkdir()
    sandbox = sandbox_of(isolated_topology(place))
    (place / "runs" / "new" / "topology.json").write_text("x")  # it begins later
    assert sandbox.command(())[-1].count(str(place / "runs" / "new")) == 1
    seen = await seen_of(isolated_topology(place), place)
    assert (seen["files"], seen["folders"]) == ("free.txt notes.txt", "runs")


async def test_a_dump_that_is_not_there_yet_is_hidden_too(place: Path) -> None:
    topology = isolated_topology(place)
    later = msgspec.structs.replace(topology, run=msgspec.structs.replace(topology.run, dump_details=f"{place}/later"))
    assert f"{place}/later" in sandbox_of(later).command(())[-1]
    assert (place / "later").stat().st_mode & 0o777 == 0o700
