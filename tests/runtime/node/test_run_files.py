"""A node gets the models, functions and data files that it lacks from home, by digest, and names what did not come."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from runtime.bus.bus import Bus
from runtime.functions.load import file_of
from runtime.node.run_files import (
    Brought,
    FilesAtHome,
    RunFile,
    bring,
    given_by_home,
    lacking,
    needed_on,
    path_of,
    problems_of,
    with_files,
)
from runtime.node.sharing import Sharing
from runtime.settings.load import LoadedTopology, load_topology
from tests.support.published import flip

pytestmark = pytest.mark.anyio

TOPOLOGY = """
include = "laptop.toml"
run = {{ name = "r", dir = "{runs}" }}
model.hf_checkpoint = "{model}"
bus.node = "home"
nodes.home = {{ address = "127.0.0.1" }}
nodes.n1 = {{ address = "127.0.0.1" }}
nodes.n2 = {{ address = "127.0.0.1" }}
engines.policy.nodes = ["n1"]
reward = {{ nodes = ["n2"] }}
rollout.dynamic_filter = "{function}:keep"
{more}
"""
MODEL = "model.hf_checkpoint"
FILTER = "rollout.dynamic_filter"


def loaded(directory: Path, model: Path, function: Path, more: str = "") -> LoadedTopology:
    file = directory / "t.toml"
    file.write_text(TOPOLOGY.format(runs=directory / "runs", model=model, function=function, more=more))
    return load_topology(file)


def model_in(directory: Path) -> Path:
    """A model directory as the hub's cache has it, with files that do not travel."""
    (blobs := directory / "blobs").mkdir(parents=True)
    (model := directory / "snapshots" / "1").mkdir(parents=True)
    (blobs / "b").write_bytes(bytes(range(256)) * 100_000)
    (model / "model.safetensors").symlink_to("../../blobs/b")
    (model / "config.json").write_text("{}")
    (model / "templates").mkdir()
    (model / "templates" / "a b.jinja").write_text("x")
    (model / ".cache").mkdir()
    for name in ("pytorch_model.bin", ".cache/x.json", "manifest.json"):
        (model / name).write_text("not this")
    return model


@asynccontextmanager
async def at_home(bus: Bus, directory: Path, *files: RunFile, refuses: bool = False) -> AsyncGenerator[Sharing]:
    sharing = Sharing(directory, "home", None, is_home=True, show=print)
    home = FilesAtHome(files, directory / "offered", lambda: sharing, refuses=refuses)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(home.run, bus)
        tasks.start_soon(sharing.run, bus)
        yield sharing
        tasks.cancel_scope.cancel()


async def brought(bus: Bus, directory: Path, *keys: str, wait_s: float = 20.0) -> tuple[Brought, list[str]]:
    shown = list[str]()
    sharing = Sharing(directory, "n1", None, is_home=False, show=shown.append)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sharing.run, bus)
        found = await bring(bus, sharing, "n1", keys, wait_s=wait_s, show=shown.append)
        tasks.cancel_scope.cancel()
    return found, shown


async def test_a_node_fetches_a_model_and_a_function_once(bus: Bus, tmp_path: Path) -> None:
    model, function = model_in(tmp_path / "hub"), tmp_path / "my filter.py"
    function.write_text("def keep(group): return True\n")
    files = RunFile(MODEL, str(model), ("*.json", "*.jinja", "*.safetensors")), RunFile(FILTER, str(function))
    async with at_home(bus, tmp_path / "home", *files) as home:
        found, shown = await brought(bus, tmp_path / "n1", MODEL, FILTER)
        sent = home._room.sent_bytes
        again, _ = await brought(bus, tmp_path / "n1", MODEL, FILTER)
        assert home._room.sent_bytes == sent
    assert not found.missing
    assert again == found
    place = found.paths[MODEL]
    assert place.is_relative_to(tmp_path / "n1" / "fetched" / "n1")
    names = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
    assert names == ["config.json", "manifest.json", "model.safetensors", "templates/a b.jinja"]
    assert (place / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert path_of(found.paths[FILTER], files[1]) == str(found.paths[FILTER] / function.name)
    assert (found.paths[FILTER] / function.name).read_text() == function.read_text()
    assert shown[0] == f"fetching {MODEL} from the nodes of the run: 3 files, 24 MiB"


async def test_what_home_does_not_give_is_named_with_its_reason(bus: Bus, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "empty").mkdir()
    files = (
        RunFile("a", str(tmp_path / "a.py")),
        RunFile("b", str(tmp_path / "b.py")),
        RunFile("c", str(tmp_path / "empty"), ("*",)),
    )
    async with at_home(bus, tmp_path / "home", *files) as home:
        found, _ = await brought(bus, tmp_path / "n1", "b", "c", "d")
        assert home._room.sent_bytes == 0
    assert not found.paths
    assert str(tmp_path / "b.py") in found.missing["b"]
    assert found.missing["c"] == f"{tmp_path}/empty has none of *"
    assert found.missing["d"] == "home's topology names no such file"
    async with at_home(bus, tmp_path / "home", *files, refuses=True):
        found, _ = await brought(bus, tmp_path / "n1", "a")
    assert found.missing == {"a": "the run does not start"}
    found, _ = await brought(bus, tmp_path / "n1", "a", wait_s=0.1)
    assert found.missing == {"a": "home did not answer within 0.1 s"}
    [problem] = problems_of(files, found.missing)
    assert str(problem).endswith(
        f'a = "{tmp_path}/a.py": is not here, and did not come from home: {found.missing["a"]}'
    )


async def test_a_file_that_changes_after_its_sum_is_refused_and_summed_up_anew(bus: Bus, tmp_path: Path) -> None:
    (file := tmp_path / "a.py").write_text("x = 1\n")
    files = (RunFile("a", str(file)),)
    async with at_home(bus, tmp_path / "home", *files):
        await brought(bus, tmp_path / "n1", "a")
        flip(file, 2)
        found, shown = await brought(bus, tmp_path / "n2", "a")
        assert "a.py of a: its sha256 is " in found.missing["a"]
        assert any("node home (127.0.0.1:" in line and "sent wrong bytes and is left out" in line for line in shown)
        assert not [path for path in (tmp_path / "n2").rglob("a.py") if not any(part[0] == "." for part in path.parts)]
    async with at_home(bus, tmp_path / "home", *files):  # a later start of home
        found, _ = await brought(bus, tmp_path / "n2", "a")
    assert (found.paths["a"] / "a.py").read_bytes() == file.read_bytes()


def test_a_node_needs_what_its_processes_open(tmp_path: Path) -> None:
    (function := tmp_path / "f.py").write_text("def keep(group): return True\n")
    there = loaded(tmp_path, tmp_path / "absent", function)
    assert "data.0.path" not in [each.key for each in needed_on(there.topology, "n1")]
    train = msgspec.structs.replace(there.topology.train, num_epoch=1)  # which the laptop recipe does not allow
    there = msgspec.structs.replace(there, topology=msgspec.structs.replace(there.topology, train=train))
    keys = {node: [each.key for each in needed_on(there.topology, node)] for node in ("n1", "n2")}
    assert keys["n1"] == [MODEL, FILTER, "data.0.path", "eval.0.path"]
    assert keys["n2"] == [FILTER, "data.0.path", "eval.0.path"]
    assert {each.key for each in given_by_home(there.topology)} == {*keys["n1"]}
    assert [each.key for each in lacking(there, "n1")] == [MODEL]
    assert lacking(there, "n2") == ()


def test_paths_are_replaced_and_slices_and_names_stay(tmp_path: Path) -> None:
    there = loaded(
        tmp_path,
        tmp_path / "absent",
        tmp_path / "f.py",
        'data = [{ name = "d", path = "x.jsonl@[0:4]", rm_type = "exact_match" }]',
    )
    changed = with_files(there, {MODEL: "/m", FILTER: "/got/f.py", "data.0.path": "/got/x.jsonl"}).topology
    assert changed.model.hf_checkpoint == "/m"
    assert changed.rollout.dynamic_filter == "/got/f.py:keep"
    assert file_of(changed.rollout.dynamic_filter) == "/got/f.py"
    assert changed.data[0].path == "/got/x.jsonl@[0:4]"
