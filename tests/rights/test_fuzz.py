"""A reward worker that sends 10,000 malformed and forged messages costs a run time, and nothing else."""

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from functools import reduce
from pathlib import Path

import anyio
import anyio.abc
import nats
import psutil
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from actors.reward.graders.builtin import exact_match
from messages import ActorStarted, GroupFailed, ScoreRequested, decode
from runtime.bus.credential import Credential, read_credential
from runtime.bus.nats.certificate import client_context
from runtime.node.join import read_join
from runtime.node.supervisor.ports import free_port
from tests.chaos.pace import Pace
from tests.fixtures.nats import eventually
from tests.rights.fuzz import Known, of_viewer, of_worker
from tests.rights.tries import Try

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
NUM_MESSAGES = 10_000
NUM_STEPS = 20  # the last ones wait for the end of the messages
START_S, END_S = 120.0, 180.0
DATA = ROOT / "topologies" / "demo" / "data" / "reverse-digits" / "train.jsonl"
TOPOLOGY = f"""
include = "{ROOT}/topologies/laptop.toml"
run.name = "fuzzed"
run.dump_details = "dump"
nodes.local = {{ address = "ADDRESS", gpus = 0 }}
bus.port = PORT
rollout.rollout_batch_size = 16
rollout.n_samples_per_prompt = 4
train.num_steps = {NUM_STEPS}
eval = []

[[data]]
name = "open"
path = "{DATA}"
label_key = "label"
apply_chat_template = true
rm_type = "positional_match"

[[data]]
name = "closed"
path = "{DATA}"
label_key = "label"
apply_chat_template = true
rm_type = "closed"

[reward.graders]
closed = "GRADERS:exact"
"""
GRADERS = """
import time

def exact(sample):
    time.sleep(0.02)  # so that forged answers come before the right one
    return float(sample.response.strip() == sample.label.strip())
"""


def own_address() -> str:
    """An address of this machine that is not loopback: its server has accounts."""
    found = [one.address for card in psutil.net_if_addrs().values() for one in card if one.family == socket.AF_INET]
    outside = [address for address in found if not address.startswith("127.")]
    assert outside, "this test needs a network card: a server on loopback has no external clients"
    return outside[0]


@asynccontextmanager
async def running(directory: Path, pace: Pace) -> AsyncGenerator[anyio.abc.Process, None]:
    """Start the run, and stop it at the end of the block."""
    address = own_address()
    file = directory / "fuzzed.toml"
    (directory / "graders.py").write_text(GRADERS)
    filled = {"ADDRESS": address, "PORT": str(free_port(address)), "GRADERS": str(directory / "graders.py")}
    file.write_text(reduce(lambda text, item: text.replace(*item), filled.items(), TOPOLOGY))
    command = [sys.executable, "-P", str(ROOT / "bin" / "physarum.py"), "start-topology", str(file), "--json"]
    with (directory / "out").open("wb") as out, (directory / "err").open("wb") as err:
        environment = os.environ | pace.environment()
        process = await anyio.open_process(
            command, cwd=directory, stdout=out, stderr=err, start_new_session=True, env=environment
        )
    try:
        yield process
    finally:
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.terminate()
                await process.wait()


async def credential_of(run_dir: Path, *arguments: str) -> Credential:
    """Return a new credential, once the run gives one."""
    file = run_dir / "credential.toml"
    command = [sys.executable, "-P", str(ROOT / "bin" / "physarum.py"), "credentials", str(run_dir), *arguments]
    await eventually(lambda: (run_dir / "bus" / "clients.json").exists(), timeout_s=START_S)

    async def is_given() -> bool:
        with file.open("w") as out:
            done = await anyio.run_process(command, stdout=out, stderr=subprocess.PIPE, check=False)
        return done.returncode == 0

    await eventually(is_given, timeout_s=START_S)
    return read_credential(file)


async def connect(url: str, user: str, password: str, pem: str, inbox: str) -> Client:
    return await nats.connect(
        url,
        user=user,
        password=password,
        inbox_prefix=inbox.encode(),
        tls=client_context(pem),
        tls_hostname="bus.physarum",
        allow_reconnect=False,
        skip_subject_validation=True,
        error_cb=_ignore,
        pending_size=64 << 20,
    )


async def _ignore(_: Exception) -> None:
    """Refusals are expected."""


class Watcher:
    """What the node sees: requests to both graders, of which the attacker is given the ids, and what fails."""

    def __init__(self) -> None:
        self.own: list[str] = []  # ids of requests to the attacker's grader
        self.foreign: list[str] = []
        self.answers: dict[str, None] = {}  # last parts of the subjects of answers
        self.closed_groups: set[int] = set()  # of the other grader
        self.failed_groups: set[int] = set()
        self.restarted: list[str] = []

    async def take_request(self, message: Msg) -> None:
        request = decode(message.data, message.headers)
        assert isinstance(request, ScoreRequested)
        is_closed = request.rm_type == "closed"
        (self.foreign if is_closed else self.own).append(request.request_id)
        self.closed_groups |= {request.group_id} if is_closed else set()
        self.answers[request.reply_to.rpartition(".")[2]] = None

    async def take_event(self, message: Msg) -> None:
        event = decode(message.data, message.headers)
        if isinstance(event, GroupFailed):
            self.failed_groups.add(event.group_id)
        elif isinstance(event, ActorStarted) and event.restarts:
            self.restarted.append(event.actor)


async def test_10000_fuzzed_messages_change_no_score_of_another_grader(tmp_path: Path) -> None:
    run_dir, watcher = tmp_path / "runs" / "fuzzed", Watcher()
    pace = Pace(tmp_path / "pace")
    pace.allow(NUM_STEPS - 3)
    async with running(tmp_path, pace) as process:
        alice = await credential_of(run_dir, "grader", "--name", "alice", "--grader", "positional_match")
        bob = await credential_of(run_dir, "viewer", "--name", "bob")
        node = read_join(run_dir / "join.toml")
        watching = await connect(node.url, node.user, node.password, node.certificate, "_INBOX.fuzzed.test")
        await watching.subscribe("phy.fuzzed.work.score.>", cb=watcher.take_request)
        await watching.subscribe("phy.fuzzed.event.>", cb=watcher.take_event)
        await eventually(lambda: bool(watcher.own and watcher.foreign), timeout_s=START_S)
        known = Known("fuzzed", alice.token, f"{alice.inbox}.try", watcher.answers, watcher.own, watcher.foreign)
        await attack(alice, of_worker(known, random.Random(1), NUM_MESSAGES), process)
        await attack(bob, of_viewer(known, random.Random(2), NUM_MESSAGES // 10), process)
        pace.free()
        with anyio.fail_after(END_S):
            await process.wait()
        await watching.close()
    assert process.returncode == 0, (tmp_path / "err").read_text()[-3000:]
    groups = json.loads((tmp_path / "out").read_text())["groups"]
    assert groups.pop("issued") == sum(groups.values())
    assert groups["trained"] == NUM_STEPS * 16
    assert groups["failed"] == len(watcher.failed_groups)
    assert not watcher.failed_groups & watcher.closed_groups
    assert not watcher.restarted
    check_scores(tmp_path / "dump")


async def attack(credential: Credential, tries: Iterable[Try], process: anyio.abc.Process) -> None:
    """Send all messages while the run goes on."""
    nc = await connect(credential.url, credential.user, credential.password, credential.certificate, credential.inbox)
    await nc.subscribe(f"{credential.inbox}.try", cb=_drop)
    for sent, one in enumerate(tries):
        await nc.publish(one.subject, one.body, one.reply, one.headers)
        if sent % 50 == 49:
            await nc.flush(30)
            assert process.returncode is None, f"the run ended after {sent} messages"
    await nc.close()


async def _drop(_: Msg) -> None:
    """Tasks and answers of the server are not used."""


def check_scores(dump: Path) -> None:
    """Compare each score of the grader for which no credential was given with that grader's own."""
    lines = [json.loads(line) for file in dump.glob("rollout_*.jsonl") for line in file.read_text().splitlines()]
    closed = [line for line in lines if line["data"] == "closed"]
    assert len(closed) > len(lines) / 4
    assert not [line for line in closed if line["reward"] != exact_match(line["response"], line["label"])]
