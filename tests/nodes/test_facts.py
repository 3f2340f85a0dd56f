"""What home finds out about the machines of other nodes, and runs without a common directory."""

import json
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.bus.nats.server import server_binary
from runtime.node.claims.rundir import FORMAT, FORMAT_FILE
from runtime.settings.load import load_topology
from runtime.settings.topology import encode_topology
from tests.chaos.pace import Pace
from tests.nodes.two_machines import REFUSED_S, RUN_S, apart, check_books, copy_join, ends, finishes, pids, start
from tests.support.machines.lan import ROOT, machines

pytestmark = [pytest.mark.nodes]  # above RUN_S and the starts

KEEP = "def keep(group):\n    return True\n"
MODEL = ROOT / "topologies/demo/models/reverse-digits"


@contextmanager
def trained_apart(tmp_path: Path, transport: str, more: str, *, own: Path | None = None) -> Iterator[tuple[Path, Path]]:
    """The run directories of home and of another machine, which share none, after five steps.

    Args:
        tmp_path: for the topology and all directories.
        transport: of weights.
        more: of the topology.
        own: directory that home alone has.
    """
    file, run_dir = apart(tmp_path, transport=transport, more=more), tmp_path / "runs" / "apart"
    with machines(shared=[tmp_path], own=[tmp_path / "runs", *([own] if own else [])]) as lan:
        n0, n1 = lan.add("n0"), lan.add("n1")
        if own is not None:
            shutil.copytree(MODEL, n0.path(own / "tiny"))
            n0.path(own / "keep.py").write_text(KEEP)
        home = start(n0, file, "local")
        other = start(n1, file, "n1", "--join", copy_join(n0, n1, run_dir))
        other.wait_for("node n1 joins run apart", 60)
        finishes(home, other)
        check_books(n0.path(run_dir), 5)
        yield n0.path(run_dir), n1.path(run_dir)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param("", id="one rollout actor", marks=pytest.mark.nightly),
        pytest.param('rollout.nodes = ["local", "n1"]', id="one on each"),
    ],
)
def test_weights_by_collective_need_no_common_directory(tmp_path: Path, more: str) -> None:
    with trained_apart(tmp_path, "collective", more) as (here, there):
        assert not list(there.glob("weights*/**/*.safetensors"))
        assert list(here.glob("checkpoints/*/step-*"))
        log = (there / "logs" / "n1" / "daemon.jsonl").read_text()
        own = there / "logs" / "n1" / "rollout.1.jsonl"
        verified = own.read_text().count("weights_verified") if more else 0
    assert "engine.policy.0" in log
    assert not more or verified >= 2  # the first and a later one, by the rollout actor of that node


@pytest.mark.parametrize(
    "more",
    [
        pytest.param("", id="whole, one rollout actor", marks=pytest.mark.nightly),
        pytest.param('rollout.nodes = ["local", "n1"]\ntrainer.full_export_interval = 3', id="deltas, one on each"),
    ],
)
def test_nodes_without_a_common_directory_fetch_weights_model_and_functions(tmp_path: Path, more: str) -> None:
    (own := tmp_path / "own").mkdir()
    files = f'model.hf_checkpoint = "{own}/tiny"\nrollout.dynamic_filter = "{own}/keep.py:keep"\n'
    with trained_apart(tmp_path, "http", files + more, own=own) as (here, there):
        for name in ("config.json", "tokenizer.json", "keep.py"):
            assert len([*(there / "fetched" / "n1" / "files").glob(f"*/{name}")]) == 1
        assert len(pids(here, "local", "trainer")) == 1
        log = (there / "logs" / "n1" / "daemon.jsonl").read_text()
        assert not (there / "weights").exists()
        assert [*(there / "copies" / "n1").glob("v*/*.safetensors")]
        assert not list(there.glob("**/*.pem"))  # of a room: its key is nowhere on the disk
    fetched = [json.loads(line) for line in log.splitlines() if '"weights_fetched"' in line]
    assert len(fetched) >= 2  # the first and a later one: a busy node passes over versions
    assert all(list(each["bytes_from"]) == ["local"] for each in fetched)


@pytest.mark.nightly
def test_nodes_without_a_common_directory_fetch_adapters_and_their_base(tmp_path: Path) -> None:
    more = 'trainer.lora.rank = 4\nrollout.nodes = ["local", "n1"]'
    with trained_apart(tmp_path, "http", more) as (here, there):
        assert [path.name for path in (here / "weights").iterdir()] == ["adapters"]  # no version in full
        assert not (there / "weights").exists()
        copies = there / "copies" / "n1"
        assert [path.name for path in copies.iterdir()] == ["adapters"]
        assert len([*(copies / "adapters" / "base").glob("v*/model.safetensors")]) == 1
        newest = sorted((here / "weights" / "adapters").glob("v*/adapter_model.safetensors"))[-1]
        assert (copies / newest.relative_to(here / "weights")).read_bytes() == newest.read_bytes()


def test_weights_by_files_are_refused_by_key_where_the_directory_is_not_common(tmp_path: Path) -> None:
    file, run_dir = apart(tmp_path, transport="disk"), tmp_path / "runs" / "apart"
    with machines(shared=[tmp_path], own=[tmp_path / "runs"]) as lan:
        n0, n1 = lan.add("n0"), lan.add("n1")
        home = start(n0, file, "local")
        other = start(n1, file, "n1", "--join", copy_join(n0, n1, run_dir))
        ends(home, other, within_s=REFUSED_S, code=2)
        reason = f'node n1: engines.policy.weight_transport = "disk": {run_dir} is not the directory of node local here'
        assert reason in home.output()
        assert reason in other.output()


def test_a_trainer_on_both_machines_is_refused_where_the_directory_is_not_common(tmp_path: Path) -> None:
    more = 'trainer.num_processes = 2\ntrainer.nodes = ["local", "n1"]'
    file, run_dir = apart(tmp_path, transport="collective", more=more), tmp_path / "runs" / "apart"
    with machines(shared=[tmp_path], own=[tmp_path / "runs"]) as lan:
        n0, n1 = lan.add("n0"), lan.add("n1")
        home = start(n0, file, "local")
        other = start(n1, file, "n1", "--join", copy_join(n0, n1, run_dir))
        ends(home, other, within_s=REFUSED_S, code=2)
        for process in (home, other):
            assert 'node n1: trainer.nodes = ["local", "n1"]: ' in process.output()


@pytest.mark.nightly
def test_a_model_that_home_lacks_ends_the_start_on_both(tmp_path: Path) -> None:
    """The other node waited for nodes.<name>.wait_s."""
    model = tmp_path / "models" / "tiny"
    file = apart(tmp_path, transport="disk", nodes=("n1",), more=f'model.hf_checkpoint = "{model}"')
    with machines(shared=[tmp_path], own=[tmp_path / "models"]) as lan:
        nodes = {"n1": lan.add("n1"), "local": lan.add("n0")}
        shutil.copytree(MODEL, nodes["n1"].path(model))
        started = {name: start(machine, file, name) for name, machine in nodes.items()}
        started["local"].wait_for("this node cannot take part", REFUSED_S)
        ends(*started.values(), within_s=REFUSED_S, code=2)
        reason = f'{file}: model.hf_checkpoint = "{model}": no such directory'
        assert f"node local: {reason}" in started["n1"].output()
        assert started["local"].output().count(reason) == 2  # at once, and as its error


def test_a_check_says_what_a_machine_would_fetch(tmp_path: Path) -> None:
    (own := tmp_path / "own").mkdir()
    file = apart(tmp_path, transport="http", nodes=("n1",), more=f'model.hf_checkpoint = "{own}/tiny"')
    with machines(shared=[tmp_path], own=[own]) as lan:
        n0, n1 = lan.add("n0"), lan.add("n1")
        shutil.copytree(MODEL, n0.path(own / "tiny"))
        home, other = start(n0, file, "local", "--check"), start(n1, file, "n1", "--check")
        ends(home, other, within_s=REFUSED_S, code=0)
        [line] = [line for line in other.output().splitlines() if line.startswith("node n1: host n1; ")]
        assert "; fetches model.hf_checkpoint (" in line


def test_a_changed_recipe_that_home_refuses_ends_the_start_on_both(tmp_path: Path) -> None:
    file, run_dir = apart(tmp_path, transport="disk"), tmp_path / "runs" / "apart"
    run_dir.mkdir(mode=0o700)
    before = load_topology(file, ("rollout.n_samples_per_prompt=4",)).topology
    (run_dir / "topology.json").write_bytes(encode_topology(before))
    (run_dir / FORMAT_FILE).write_text(f"{FORMAT}\n")
    with machines(shared=[tmp_path]) as lan:
        other, home = start(lan.add("n1"), file, "n1"), start(lan.add("n0"), file, "local")
        ends(home, other, within_s=REFUSED_S, code=2)
        for process in (home, other):
            assert "holds a run with another recipe:\n  rollout.n_samples_per_prompt: 4 → 8" in process.output()


@pytest.mark.nightly
def test_a_home_that_cannot_start_again_ends_the_node_that_runs_and_both_resume(tmp_path: Path) -> None:
    """The node waited for bus.outage_s."""
    model = tmp_path / "models" / "tiny"
    more = f'model.hf_checkpoint = "{model}"'
    file = apart(tmp_path, transport="disk", steps=1000, nodes=("n1",), more=more)
    with machines(shared=[tmp_path], own=[tmp_path / "models"]) as lan:
        n0, n1 = lan.add("n0"), lan.add("n1")
        for machine in (n0, n1):
            shutil.copytree(MODEL, machine.path(model))
        home, other = start(n0, file, "local"), start(n1, file, "n1")
        home.wait_for("step    2/", 120)
        home.signal(signal.SIGKILL)
        home.wait(60)
        shutil.rmtree(n0.path(model))
        home = start(n0, file, "local")
        ends(home, other, within_s=REFUSED_S, code=2)
        assert f'node local: {file}: model.hf_checkpoint = "{model}": no such directory' in other.output()

        shutil.copytree(MODEL, n0.path(model))
        home, other = start(n0, file, "local"), start(n1, file, "n1")
        home.wait_for("step    5/", 120)
        home.signal(signal.SIGINT)
        ends(home, other, within_s=REFUSED_S, code=130)


def test_a_node_that_does_not_fit_is_refused_alone_once_the_run_has_trained(tmp_path: Path) -> None:
    file = apart(tmp_path, transport="disk", steps=6, nodes=("local", "n1"))
    with machines(shared=[tmp_path]) as lan:
        n0, n1 = lan.add("n0"), lan.add("n1")
        pace = Pace(tmp_path / "pace")
        pace.allow(2)
        home = start(n0, file, "local", env=pace.environment())
        home.wait_for("step 2/", 120)
        assert start(n1, file, "n1", "--check").wait(REFUSED_S) == 0  # compares with the run
        other = start(n1, file, "n1", "--set", "train.num_steps=9")
        ends(other, within_s=REFUSED_S, code=2)
        reason = "node n1: train.num_steps = 9: home has 6; start all nodes with one topology and the same --set"
        assert reason in other.output()
        home.wait_for(f"refused {reason}", 60)
        pace.free()
        ends(home, within_s=RUN_S, code=0)
        check_books(tmp_path / "runs" / "apart", 6)


def test_another_version_is_refused_on_both(tmp_path: Path) -> None:
    file, other_tree = apart(tmp_path, transport="disk"), tmp_path / "other"
    for name in ("actors", "bin", "messages", "runtime", "topologies"):
        shutil.copytree(ROOT / name, other_tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", other_tree)
    changed = other_tree / "runtime" / "node" / "__init__.py"
    changed.write_text(f"{changed.read_text()}# another version\n")
    with machines(shared=[tmp_path]) as lan:
        n0, n1 = lan.add("n0"), lan.add("n1")
        home = start(n0, file, "local")
        command = [
            sys.executable,
            "-P",
            str(other_tree / "bin" / "physarum.py"),
            "start-topology",
            str(file),
            "--node",
            "n1",
        ]
        other = n1.start(command, cwd=tmp_path, env={"PYTHONPATH": str(other_tree)})
        ends(home, other, within_s=REFUSED_S, code=2)
        for process in (home, other):
            assert 'node n1: physarum = "0.2.0.dev0, source ' in process.output()
            assert "install one version on all nodes" in process.output()


def test_nodes_that_meet_on_an_existing_server_are_compared_too(tmp_path: Path) -> None:
    with machines(shared=[tmp_path]) as lan:
        n0, n1 = lan.add("n0"), lan.add("n1")
        store = tmp_path / "store"
        server = [server_binary(), "--jetstream", "--store_dir", store, "--addr", n0.address, "--port", "4333"]
        n0.start(server).wait_for("Server is ready", 60)
        file = apart(tmp_path, transport="disk", more=f'bus.url = "nats://{n0.address}:4333"')
        file.write_text(file.read_text().replace('bus.node = "local"\n', ""))
        other = start(n1, file, "n1")  # in any order
        pace = Pace(tmp_path / "pace")
        pace.allow(0)
        home = start(n0, file, "local", env=pace.environment())
        home.wait_for("node n1 joined: process", 60)
        wrong = start(lan.add("n2"), file, "n1", "--set", "rollout.max_response_len=9")
        ends(wrong, within_s=REFUSED_S, code=2)
        pace.free()
        finishes(home, other)
