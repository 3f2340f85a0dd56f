"""An isolated program reaches its model and its copy, and nothing of the run, of others or of the network."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from messages import GroupFailed
from runtime.bus.bus import Bus
from runtime.functions import isolation
from runtime.sessions.keys import KeyPair
from tests.actors.rollout.sessions.test_command import MODEL, agent_topology, content_of, ended, row
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually

pytestmark = pytest.mark.anyio

NOSY = Path(__file__).with_name("nosy.py")
REFUSAL = isolation.refusal()
OWN = ["asks", "copy", "home", "temporary", "daemon"]  # what an isolated program may do
ALL = ["asks", "password", "label", "key", "copy", "original", "home", "temporary", "port", "socket", "daemon"]


def runs(word: str) -> bool:
    """Whether a process has this word in its command line."""
    return any(word.encode() in content_of(place).split(b"\0") for place in Path("/proc").glob("[0-9]*/cmdline"))


@pytest.fixture
def another_key() -> Iterator[None]:
    """A process of this user that has the key of another session."""
    key = KeyPair.new("s2").model.reveal()
    with subprocess.Popen(["sleep", "3600"], env={**os.environ, "OPENAI_API_KEY": key}) as process:
        yield
        process.kill()


@pytest.mark.usefixtures("another_key")
@pytest.mark.parametrize(("sandbox", "done"), [("isolated", OWN), ("process", ALL)])
async def test_what_a_program_reaches(
    sandbox: str, done: list[str], bus: Bus, router_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is not isolated all goes well, so each attempt is a real one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    place = tmp_path / "tools"
    place.mkdir()
    for file in (place / "notes.txt", tmp_path / "train.jsonl"):
        file.write_text("secret")
    topology = agent_topology(tmp_path, command=[sys.executable, str(NOSY)], directory=str(place), attempts=1)
    agent = msgspec.structs.replace(topology.rollout.agent, sandbox=sandbox)
    topology = msgspec.structs.replace(
        topology,
        rollout=msgspec.structs.replace(topology.rollout, agent=agent),
        data=(msgspec.structs.replace(topology.data[0], path=str(tmp_path / "train.jsonl")),),
    )
    daemon = f"daemon-{os.urandom(6).hex()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as path_socket,
    ):
        path_socket.bind(str(tmp_path / "agent.sock"))
        path_socket.listen()
        tried: dict[str, Any] = {
            "password": str(tmp_path / "t" / "bus.url"),
            "label": str(tmp_path / "train.jsonl"),
            "directory": str(place),
            "port": server.getsockname()[1],
            "socket": str(tmp_path / "agent.sock"),
            "daemon": daemon,
        }
        given = row(tmp_path)
        given = msgspec.structs.replace(given, prompt=msgspec.structs.replace(given.prompt, metadata=tried))
        (tmp_path / "t").mkdir()
        (tmp_path / "t" / "bus.url").write_text("nats://phy:password@127.0.0.1")
        failed, engine = await ended(bus, router_url, tmp_path, topology, given)
    assert isinstance(failed, GroupFailed)
    ending = failed.reason.rpartition(": ")[2]
    if sandbox == "isolated" and REFUSAL is not None:
        assert f"this machine cannot isolate a program: {REFUSAL}" in failed.reason
        assert engine.requests == []
        return
    assert ending.split() == done
    assert len(engine.requests) == 1
    assert ((place / "notes.txt").read_text() == "secret") == (sandbox == "isolated")
    await eventually(lambda: not runs(daemon))


async def test_a_program_that_writes_more_than_its_place_holds_or_forks_a_bomb_is_stopped(
    bus: Bus, router_url: str, tmp_path: Path
) -> None:
    if REFUSAL is not None:
        return
    script = "import os\nwhile True:\n    os.fork()"
    topology = topology_with(
        run={"name": "t", "dir": str(tmp_path)},
        model={"hf_checkpoint": str(MODEL)},
        rollout={"agent": {"command": [sys.executable, "-c", script], "attempts": 1}, "max_response_len": 32},
        reward={"max_processes": 20},
    )
    failed, _ = await ended(bus, router_url, tmp_path, topology)
    assert isinstance(failed, GroupFailed)
    assert "started more than 20 processes (reward.max_processes)" in failed.reason
