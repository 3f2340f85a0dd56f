"""bin/start-topology --fresh on a NATS server that is not the run's own: the streams go with the directory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from messages import BatchTrained
from runtime.bus.bus import Bus
from tests.bin.test_start_topology import arguments_of, environment, started
from tests.fixtures.nats import TEST_LIMITS, NatsServer

ROOT = Path(__file__).parents[2]
DRIVER = ROOT / "tests" / "bin" / "driver.py"
MOMENTS = {
    "between two streams": "runtime.bus.nats.streams:delete_stream:2",  # the bucket is
    "between streams and directory": "runtime.node.claims.discarding:_empty:1",
    "in the directory": "shutil:rmtree:1",
}
USUAL = "between streams and directory"
NUM_STEPS = 3
SMALL = ("rollout.rollout_batch_size=8", "rollout.n_samples_per_prompt=4", f"train.num_steps={NUM_STEPS}")


async def steps_in_log(url: str, run: str) -> list[int]:
    """The train steps of which the log says that they were trained."""
    async with Bus.connect(url, run, name="test", limits=TEST_LIMITS) as bus, bus.read() as events:
        found: list[int] = []
        while events.pending:
            received = await events.next(5)
            assert received is not None
            if isinstance(received.message, BatchTrained):
                found.append(received.message.step)
        return found


def trained(url: str, run: str) -> list[int]:
    return anyio.run(steps_in_log, url, run)


def killed_at(moment: str, run_dir: Path, *more: str) -> int:
    command = [sys.executable, str(DRIVER), *arguments_of(run_dir, *more)]
    env = {**environment(["1"]), "KILL_AT": moment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=200, check=False).returncode


@pytest.mark.slow
def test_fresh_counts_from_the_first_step_again(nats_server: NatsServer, tmp_path: Path) -> None:
    run_dir, on_bus = tmp_path / "fresh", ("--set", f"bus.url={nats_server.url}")
    with started(run_dir, ["3"], more=on_bus) as command:
        assert command.end() == 0
    with started(run_dir, ["2"], more=(*on_bus, "--fresh", "fresh")) as command:
        assert command.end() == 0
    assert any(line.startswith("steps     2 of") and "of them" not in line for line in command.lines), command.lines
    assert trained(nats_server.url, "fresh") == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [pytest.param(at, id=name, marks=[] if name == USUAL else pytest.mark.nightly) for name, at in MOMENTS.items()],
)
def test_killed_while_it_discards_it_goes_on_when_given_again_and_no_other_start_does(
    nats_server: NatsServer, tmp_path: Path, moment: str
) -> None:
    run = f"killed-{list(MOMENTS.values()).index(moment)}"
    run_dir, on_bus = tmp_path / run, ("--set", f"bus.url={nats_server.url}")
    with started(run_dir, ["3", "--then", "crash"], more=on_bus) as command:
        assert command.end() == 1
    (run_dir / "checkpoints").mkdir()
    assert killed_at(moment, run_dir, *on_bus, "--fresh", run) == -9
    with started(run_dir, ["1"], more=on_bus) as command:
        assert command.end() == 2
    assert f"{run_dir} holds a run whose streams are not on this bus" in command.lines[-1]
    with started(run_dir, ["2"], more=(*on_bus, "--fresh", run)) as command:
        assert command.end() == 0
    assert trained(nats_server.url, run) == [0, 1]
    assert not (run_dir / "checkpoints").exists()


@pytest.mark.slow
def test_streams_without_their_directory_are_refused_until_they_are_discarded_by_name(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    on_bus = ("--set", f"bus.url={nats_server.url}")
    with started(tmp_path / "one" / "taken", ["3"], more=on_bus) as command:
        assert command.end() == 0
    other = tmp_path / "two" / "taken"
    for more in (on_bus, (*on_bus, "--fresh")):
        with started(other, ["1"], more=more) as command:
            assert command.end() == 2
        assert f"belong to {tmp_path / 'one' / 'taken'} on {os.uname().nodename}, not to {other}" in command.lines[-1]
        assert not (other / "topology.json").exists()
    assert trained(nats_server.url, "taken") == [0, 1, 2]
    with started(other, ["1"], more=(*on_bus, "--fresh", "taken")) as command:
        assert command.end() == 0
    assert trained(nats_server.url, "taken") == [0]


def test_a_refused_start_leaves_what_the_run_was_started_with(nats_server: NatsServer, tmp_path: Path) -> None:
    run_dir = tmp_path / "own"
    with started(run_dir, ["3"]) as command:
        assert command.end() == 0
    before = (run_dir / "topology.json").read_bytes()
    elsewhere = ("--set", f"bus.url={nats_server.url}", "--set", "train.num_steps=999")
    with started(run_dir, ["1"], more=elsewhere) as command:
        assert command.end() == 2
    assert "holds a run whose streams are not on this bus" in command.lines[-1]
    assert (run_dir / "topology.json").read_bytes() == before


@pytest.mark.slow
def test_fresh_is_refused_while_an_agent_of_the_run_is_alive_elsewhere(nats_server: NatsServer, tmp_path: Path) -> None:
    on_bus = ("--set", f"bus.url={nats_server.url}")
    with started(tmp_path / "one" / "alive", ["1", "--then", "sleep"], more=on_bus) as first:
        first.until("step   1/")
        with started(tmp_path / "two" / "alive", ["1"], more=(*on_bus, "--fresh", "alive")) as second:
            assert second.end() == 2
        assert f"is run by another node daemon: process {first.process.pid} on " in second.lines[-1]
        assert second.lines[-1].endswith("; nothing was discarded")
        assert first.process.poll() is None
    assert trained(nats_server.url, "alive") == [0]


def whole_run(url: str, runs: Path, name: str, *more: str) -> subprocess.CompletedProcess[str]:
    sets = [*SMALL, f"bus.url={url}", f"run.dir={runs}", f"run.name={name}"]
    words = [word for item in sets for word in ("--set", item)]
    command = [sys.executable, "bin/physarum.py", "start-topology", "topologies/laptop.toml", *words, "--json", *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)


@pytest.mark.nightly  # CI does it without a trainer above, and test_cluster.py tells the streams of similar names apart
def test_fresh_trains_every_step_again_and_leaves_another_run_of_the_server_alone(
    own_nats_server: NatsServer, tmp_path: Path
) -> None:
    url = own_nats_server.url
    for name in ("one", "one-event"):
        first = whole_run(url, tmp_path, name)
        assert first.returncode == 0, first.stderr
    again = whole_run(url, tmp_path, "one", "--fresh", "one")
    assert again.returncode == 0, again.stderr
    steps = [line for line in again.stderr.splitlines() if line.startswith("step ")]
    assert len(steps) == NUM_STEPS, again.stderr
    assert json.loads(again.stdout)["groups"]["trained"] == 8 * NUM_STEPS
    assert trained(url, "one") == trained(url, "one-event") == list(range(NUM_STEPS))
