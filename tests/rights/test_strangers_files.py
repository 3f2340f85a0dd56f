"""Dumps and run directories of strangers: nothing that they name is opened, run, written or connected to.

The tries are generated from the settings tables: each key that takes a text gets a bait in the stranger's topology.
"""

import ctypes
import json
import os
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, Final, NamedTuple

import anyio
import msgspec
import pytest

from bin import halt, ledger, replay, report, watch
from runtime.data.dump_files import write_pair
from runtime.node.supervisor.guardian import MARK_VARIABLE, mark_of
from runtime.settings.reading.access import Access, access_of
from runtime.settings.reading.schema import is_config, item_type
from runtime.settings.reading.toml import load_tables
from runtime.settings.topology import Topology
from tests.bin.test_ledger import RUN, make
from tests.build.dumps import dumped_group
from tests.build.topology import RECIPE, SCRIPTED_MODEL
from tests.support.commands import called

libc = ctypes.CDLL(None, use_errno=True)
OPENED: Final = 0x00000020 | 0x00000002 | 0x00000100 | 0x00000200 | 0x000000C0  # IN_OPEN, MODIFY, CREATE, DELETE, MOVE
NOBODY: Final = 65534
MODEL: Final = Path(__file__).parents[2] / "topologies" / "demo" / "models" / "reverse-digits"


class Bait(NamedTuple):
    """What a stranger's file names, and what was done with it."""

    directory: Path
    port: int
    touched: list[str]  # files that were opened or written, and connections

    def values(self, access: Access | None) -> list[Any]:
        """Texts for a setting, the likeliest to be used first."""
        place, url = str(self.directory), f"127.0.0.1:{self.port}"
        addresses = [f"http://{url}", f"nats://{url}", url, f"sqlite:///{place}/db"]
        first = {
            Access.FUNCTION: [f"{place}/evil.py:f"],
            Access.PROGRAM: [f"{place}/python"],
            Access.ADDRESS: addresses,
            Access.READ: [f"{place}/model"],
            Access.CODE: [{"LD_PRELOAD": f"{place}/evil.py"}],
        }
        found = [*first.get(access or Access.HARMLESS, []), f"{place}/data.jsonl", "A_VARIABLE"]
        return [shaped for value in found for shaped in (value, [value], {"n": value})]


@contextmanager
def baited(directory: Path) -> Iterator[Bait]:
    """Watch a directory with bait, and a port, for the duration of a block."""
    (directory / "model").mkdir(parents=True)
    shutil.copytree(SCRIPTED_MODEL, directory / "model", dirs_exist_ok=True)
    (directory / "evil.py").write_text("def f(*args):\n    return True\n")
    (directory / "data.jsonl").write_text('{"input": "47", "label": "74"}\n')
    (directory / "python").write_text("#!/bin/sh\nexit 1\n")
    (directory / "python").chmod(0o755)
    notes, touched = libc.inotify_init1(os.O_NONBLOCK), list[str]()
    for place in (directory, directory / "model"):
        assert libc.inotify_add_watch(notes, os.fsencode(place), OPENED) >= 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepting = threading.Thread(target=_accept, args=(server, touched))
        accepting.start()
        bait = Bait(directory, server.getsockname()[1], touched)
        try:
            yield bait
        finally:
            with socket.create_connection(("127.0.0.1", bait.port)) as last:
                last.sendall(b"end")
            accepting.join(timeout=10)
            touched += _names(notes)
            os.close(notes)


def _accept(server: socket.socket, touched: list[str]) -> None:
    while True:
        connection, _ = server.accept()
        with connection:
            connection.settimeout(5)
            connection.sendall(b"INFO {}\r\n")
            try:
                said = connection.recv(100)
            except OSError:
                said = b""
        if said == b"end":
            return
        touched.append(f"connection: {said!r}")


def _names(notes: int) -> Iterator[str]:
    try:
        data = os.read(notes, 1 << 20)
    except BlockingIOError:
        return
    while data:
        *_, length = struct.unpack("iIII", data[:16])
        yield data[16 : 16 + length].rstrip(b"\0").decode() or "a directory"
        data = data[16 + length :]


TEXTS: Final = ["text", ["text"], {"n": "text"}, "http://h", "127.0.0.1:1", "nats://h"]
NUMBERS: Final = [4096, 3, 0.7, [4096], 60_000.0]  # the first that a setting takes


def places_of(table: Any, values: list[Any], place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield place and type of each setting that takes one of these values."""
    for field in msgspec.structs.fields(table):
        item, key = item_type(field.type), (*place, field.encode_name)
        if item is not None:
            yield from places_of(item, values, (*key, 0 if "tuple" in str(field.type).split("[")[0] else "n"))
        elif is_config(field.type):
            yield from places_of(field.type, values, key)
        elif _fitting(field.type, values) is not None:
            yield key, field.type


def _fitting(kind: Any, values: list[Any]) -> Any:
    for value in values:
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            continue
        return value
    return None


def with_value(tables: dict[str, Any], place: tuple[Any, ...], value: Any) -> None:
    """Set a key, and make the tables that lead to it."""
    held: Any = tables
    for name, following in zip(place, [*place[1:], None], strict=True):
        if following is None:
            held[name] = value
        elif isinstance(name, int):
            held = held[name]
        elif following == 0:
            held = held.setdefault(name, [{"name": "n", "interval": 1}])
        else:
            held = held.setdefault(name, {})


RECIPE_TABLES: Final = ("model", "rollout", "algorithm", "optimizer", "train", "data")  # their numbers are taken
KEYS: Final = list(places_of(Topology, TEXTS))
DANGEROUS: Final = [(place, kind) for place, kind in KEYS if access_of(kind) is not Access.HARMLESS]


def test_the_keys_are_those_of_the_tables() -> None:
    named = {".".join(map(str, place)) for place, _ in KEYS}
    assert {"observe.otlp.python", "bus.url", "rollout.stop", "data.0.files", "reward.judges.n.url"} <= named
    assert len(DANGEROUS) > 60


def of_a_stranger(bait: Bait, keys: list[tuple[tuple[Any, ...], Any]]) -> dict[str, Any]:
    tables: dict[str, Any] = json.loads(json.dumps({**RECIPE, "include": str(bait.directory / "data.jsonl")}))
    for place, kind in keys:
        value = _fitting(kind, bait.values(access_of(kind)))
        if value is not None:
            with_value(tables, place, value)
    for tracker in ("wandb", "tensorboard", "mlflow", "swanlab"):
        with_value(tables, ("observe", tracker, "enabled"), True)
    return tables


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    directory = tmp_path / "dump"
    directory.mkdir()
    for step in range(3):
        groups = [dumped_group(group_id, (0.0, 1.0)) for group_id in (2 * step, 2 * step + 1)]
        write_pair(directory, step, groups, (step + 1, 0))
    return directory


def replayed(dump: Path, tables: dict[str, Any], target: str, *more: str) -> tuple[int, str]:
    (dump / "topology.json").write_text(json.dumps(tables))
    done = called(replay.main, dump, "--to", target, *more, cwd=dump.parent)
    return done.returncode, done.stderr


def test_no_key_of_a_strangers_dump_does_anything_outside_of_it(dump: Path, tmp_path: Path) -> None:
    with baited(tmp_path / "bait") as bait:
        for access in Access:
            keys = [(place, kind) for place, kind in KEYS if access_of(kind) is access]
            code, said = replayed(dump, of_a_stranger(bait, keys), "batch")
            assert code == 0, (access, said)
        everything = of_a_stranger(bait, KEYS)
        for target in ("filter", "batch"):
            code, said = replayed(dump, everything, target)
            assert code == 0, said
            assert said.count("\n") == 1, said
        left_out = {key for key in said.replace(")", ",").replace("(", ",").replace(" ", "").split(",") if "." in key}
        expected = {".".join(map(str, place)) for place, kind in DANGEROUS if access_of(kind) is not Access.FUNCTION}
        assert expected <= left_out
    assert bait.touched == []


def test_training_on_a_strangers_dump_opens_only_what_the_user_names(dump: Path, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"input": "47", "label": "74"}\n')
    own = [f"model.hf_checkpoint={MODEL}", "data.0.path=d.jsonl", "data.0.label_key=label"]
    own += ["trainer.device=cpu", "model.random_init=true", "data.0.rm_type=exact_match"]
    with baited(tmp_path / "bait") as bait:
        tables = of_a_stranger(bait, DANGEROUS)
        code, said = replayed(dump, tables, "trainer", "--check", *(word for item in own for word in ("--set", item)))
        assert "may be a stranger's" in said
        assert bait.directory.name not in said
    assert bait.touched == []
    assert code == 0, said


def test_a_strangers_numbers_ask_for_no_process_and_no_memory(dump: Path, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"input": "47", "label": "74"}\n')
    own = [f"model.hf_checkpoint={MODEL}", "data.0.path=d.jsonl", "trainer.device=cpu", "model.random_init=true"]
    own += ["train.num_steps=3", "algorithm.estimator.type=ppo"]  # with a critic
    words = [word for item in own for word in ("--set", item)]

    def plan(tables: dict[str, Any]) -> CompletedProcess[str]:
        (dump / "topology.json").write_text(json.dumps(tables))
        return called(replay.main, dump, "--to", "trainer", "--plan", *words, cwd=dump.parent)

    modest = plan(RECIPE)
    assert "trainer" in modest.stdout, modest.stderr
    tables: dict[str, Any] = json.loads(json.dumps(RECIPE))
    greedy = [(place, kind) for place, kind in places_of(Topology, NUMBERS) if place[0] not in RECIPE_TABLES]
    for place, kind in greedy:
        with_value(tables, place, _fitting(kind, NUMBERS))
    tables["engines"] |= {f"pool-{number}": {} for number in range(50)}
    tables["nodes"] |= {f"node-{number}": {} for number in range(50)}
    tables["eval"] *= 50
    done = plan(tables)
    assert (done.returncode, done.stdout) == (0, modest.stdout), done.stderr
    named = {".".join(map(str, place)) for place, _ in greedy}
    assert {"trainer.num_processes", "reward.processes", "nodes.n.gpus", "bus.event_bytes"} <= named
    taken = {
        key for key in named if key not in done.stderr and not key.startswith("eval")
    }  # a replay evaluates nothing
    assert taken == {"run.seed"}
    assert "engines.pool-49" in done.stderr


@pytest.mark.parametrize(
    ("target", "place"),
    [("filter", ("rollout", "dynamic_filter")), ("batch", ("rollout", "buffer_filter"))],
)
def test_with_trust_the_bait_is_taken(dump: Path, tmp_path: Path, target: str, place: tuple[str, ...]) -> None:
    """The tests above can fail."""
    with baited(tmp_path / "bait") as bait:
        keys = [key for key in KEYS if key[0] == place]
        tables = {**of_a_stranger(bait, keys), "observe": {}, "trainer": {"device": "cpu"}}
        del tables["include"]
        code, said = replayed(dump, tables, target, "--trust", "--set", "rollout.over_sampling_batch_size=4")
        assert code == 0, said
        assert f"{'.'.join(place)} = " in said
    assert "evil.py" in bait.touched


@pytest.mark.parametrize("key", DANGEROUS, ids=lambda key: ".".join(map(str, key[0])))
def test_a_strangers_value_is_not_in_what_is_taken(key: tuple[tuple[Any, ...], Any], tmp_path: Path) -> None:
    bait = Bait(tmp_path / "bait", 1, [])
    file = tmp_path / "topology.json"
    file.write_text(json.dumps(of_a_stranger(bait, [key])))
    taken = json.dumps(load_tables(file, (), Topology, foreign=True).tables)
    assert "bait" not in taken
    assert "127.0.0.1" not in taken
    assert "VARIABLE" not in taken


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return anyio.run(make, tmp_path_factory.mktemp("strangers") / RUN)


def commands(run: str, folder: Path) -> Iterator[tuple[int, str]]:
    """Call each command that takes a run."""
    for main, arguments in (
        (ledger.main, ()),
        (ledger.main, ("--group", "1")),
        (halt.main, ()),
        (watch.main, ("--time",)),
        (watch.main, ("--plain",)),
        (report.main, ("--out", "out.html", "--trace", "out.json")),
    ):
        done = called(main, run, *arguments, cwd=folder)
        yield done.returncode, done.stderr


@contextmanager
def process_of(user: int | None, environment: dict[str, str]) -> Iterator[None]:
    """Run a process of another user with an environment; None: no process."""
    if user is None:
        yield
        return
    with subprocess.Popen(["/bin/sleep", "600"], env=environment, user=user, group=user) as process:
        try:
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("by_name", [False, True])
def test_a_strangers_run_directory_is_read_and_nothing_that_it_names(
    ended: Path, tmp_path: Path, by_name: bool
) -> None:
    run_dir = tmp_path / ("runs" if by_name else "strangers") / RUN
    shutil.copytree(ended, run_dir)
    with baited(tmp_path / "bait") as bait:
        tables = {**of_a_stranger(bait, DANGEROUS), "run": {"name": RUN, "dump_details": str(bait.directory)}}
        (run_dir / "topology.json").write_text(json.dumps(tables))
        (run_dir / "bus.url").write_text(f"nats://node:secret@127.0.0.1:{bait.port}")
        if by_name:
            os.chown(run_dir, NOBODY, NOBODY)
        with process_of(NOBODY if by_name else None, {MARK_VARIABLE: mark_of("x", "local", run_dir)}):
            for number, (code, said) in enumerate(commands(RUN if by_name else str(run_dir), tmp_path)):
                assert "may be a stranger's" in said, number
                assert code in (0, 1), (number, said)
        assert "bait" not in (tmp_path / "out.html").read_text()
    assert bait.touched == []


def test_with_trust_a_run_directorys_bus_is_asked(ended: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / RUN
    shutil.copytree(ended, run_dir)
    with baited(tmp_path / "bait") as bait:
        (run_dir / "topology.json").write_text(json.dumps({"run": {"name": RUN}, "bus": {"url": "nats://h"}}))
        (run_dir / "bus.url").write_text(f"nats://127.0.0.1:{bait.port}")
        done = called(halt.main, run_dir, "--trust", cwd=tmp_path)
        assert done.returncode == 1
        assert f'the file bus.url = "nats://127.0.0.1:{bait.port}"' in done.stderr
    assert bait.touched != []


@pytest.mark.parametrize("name", ["topology.json", "archive/x", "logs/daemon.jsonl", "nats/jetstream/x"])
@pytest.mark.parametrize("special", [False, True])
def test_a_strangers_run_directory_with_a_link_or_a_pipe_is_refused(
    ended: Path, tmp_path: Path, name: str, special: bool
) -> None:
    run_dir = tmp_path / RUN
    shutil.copytree(ended, run_dir)
    place = run_dir / name
    place.parent.mkdir(exist_ok=True, parents=True)
    place.unlink(missing_ok=True)
    if special:
        os.mkfifo(place)
    else:
        place.symlink_to("/etc/passwd")
    done = called(ledger.main, run_dir, cwd=tmp_path)
    assert done.returncode == 2
    assert f"{place} is {'no regular file' if special else 'a link to /etc/passwd'}" in done.stderr


@pytest.mark.parametrize("name", ["../../outside", "/etc/cron.d/x", "a" * 5000, "a\nb", ""])
def test_a_strangers_run_has_a_name_of_a_run(ended: Path, tmp_path: Path, name: str) -> None:
    run_dir = tmp_path / RUN
    shutil.copytree(ended, run_dir)
    (run_dir / "topology.json").write_text(json.dumps({"run": {"name": name}}))
    done = called(report.main, run_dir, cwd=tmp_path)
    assert done.returncode == 2
    assert "is not a valid run name" in done.stderr
