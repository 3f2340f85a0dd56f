"""A server with external clients and a run whose whole state can be compared, for tests of rights.

External clients are plain nats-py. What they may do is written out by hand, as docs/run/external-clients.md has it.
"""

import asyncio
import datetime
import json
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio
from nats.aio.client import Client
from nats.aio.msg import Msg

from runtime.bus.bus import Bus
from runtime.bus.nats.accounts import Accounts, ClientKind, ExternalClient, render_accounts
from runtime.bus.nats.server import ACCOUNTS_FILE, ServerSettings, ports_file, server_command, wait_ready, write_config
from runtime.util.secrets import Login, Secret, with_login
from tests.fixtures.nats import TEST_STREAMS, eventually
from tests.support.flushed import flushed

RUN: Final = "r"
EVENT, WORK, DATA, DEAD, KV = STREAMS = ("phy-r-event", "phy-r-work", "phy-r-data", "phy-r-dead", "KV_phy-r")
NODE: Final = Login(user="node", password=Secret("of-nodes"))
PROMPT: Final = "phy.r.data.prompt.d16e57.0"
STORED: Final = {  # what the run has stored, by subject
    "phy.r.event.ledger.group_issued": 3,
    "phy.r.event.run.started": 1,
    "phy.r.work.rollout.1.1": 1,
    **{f"phy.r.work.score.math.m{number}": 1 for number in range(600)},
    **{f"phy.r.work.score.code.c{number}": 1 for number in range(5)},
    "phy.r.work.score._own.o1": 1,
    PROMPT: 1,
    "phy.r.data.segments.1.1": 2,
    "phy.r.dead.event": 1,
    "$KV.phy-r.claim.n0": 1,
    "$KV.phy-r.engine_key": 1,
    "$KV.phy-r.room.n0": 1,
}
DURABLES: Final = {
    "score-math": "phy.r.work.score.math.*",
    "score-code": "phy.r.work.score.code.*",
    "score-_own": "phy.r.work.score._own.*",
    "rollout": "phy.r.work.rollout.>",
}
OWN_WORK: Final = "phy.r.work.score.math."  # subjects of alice's tasks
OWN_DURABLE: Final = f"{WORK}/score-math"
OWN_SCORES: Final = "phy.r.scores.math."
PASSIVE: Final = 300 * 10**9  # ns: no delivery of this test is repeated by time
TIMEOUT_S: Final = 30.0
API_WORKERS: Final = 16  # at most this many work on one of the server's queues of requests

PULL: Final = f"$JS.API.CONSUMER.MSG.NEXT.{WORK}.score-math"
PULL_OF_JETSTREAM_CLIENTS: Final = f"$JS.{RUN}.API.CONSUMER.MSG.NEXT.{WORK}.score-math"
INFO: Final = f"$JS.{RUN}.API.CONSUMER.INFO.{WORK}.score-math"
ACK: Final = f"$JS.ACK.{WORK}.score-math.1.70.70.1700000000000000000.9"
SCORE: Final = "phy.r.scores.math.x8s0"
PROMPTS: Final = f"$JS.API.DIRECT.GET.{DATA}.{PROMPT}"
HISTORY: Final = f"$JS.API.DIRECT.GET.{EVENT}"
AUDIT: Final = f"$JS.API.DIRECT.GET.{DATA}"
MAY_PUBLISH: Final = {
    "alice": (PULL, PULL_OF_JETSTREAM_CLIENTS, INFO, ACK, SCORE, PROMPTS),
    "bob": (HISTORY,),
    "dave": (AUDIT,),
}  # one of each kind
MAY_READ: Final = {"alice": (OWN_WORK, "phy.r.data.prompt."), "bob": ("phy.r.event.",), "dave": ("phy.r.data.",)}
LATER: Final = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)
CLIENTS: Final = {  # kind and grader, by name
    "alice": (ClientKind.GRADER, "math"),
    "amy": (ClientKind.GRADER, "math"),
    "carol": (ClientKind.GRADER, "code"),
    "bob": (ClientKind.VIEWER, ""),
    "dave": (ClientKind.AUDITOR, ""),
}

ACCOUNTS: Final = Accounts(
    run=RUN,
    graders=("math", "code"),
    clients=tuple(
        ExternalClient(name=name, kind=kind, grader=grader, password=f"of-{name}", expires=LATER)
        for name, (kind, grader) in CLIENTS.items()
    ),
)

Changed = dict[str, tuple[Any, Any]]


class Heard(NamedTuple):
    """A message that a client received."""

    subject: str
    reply: str
    data: bytes
    status: str


class Stranger:
    """A connection of plain nats-py, which keeps what it receives and which errors the server sends."""

    def __init__(self) -> None:
        self.nc = Client()
        self.heard: list[Heard] = []
        self.refused: list[str] = []

    async def connect(self, url: str, user: str, password: str) -> None:
        await self.nc.connect(
            url,
            user=user,
            password=password,
            allow_reconnect=False,
            inbox_prefix=f"_INBOX.{RUN}.{user}",
            error_cb=self._on_error,
            skip_subject_validation=True,
            pending_size=64 * 2**20,
        )

    async def listen(self, subject: str, queue: str = "") -> None:
        await self.nc.subscribe(subject, queue=queue, cb=self._on_message)

    async def _on_error(self, error: Exception) -> None:
        self.refused.append(str(error))

    async def _on_message(self, message: Msg) -> None:
        status = (message.headers or {}).get("Status", "")
        self.heard.append(Heard(message.subject, message.reply, message.data, status))


def accounts_text() -> str:
    """The part of the server's configuration that defines the accounts."""
    return render_accounts(ACCOUNTS, NODE)


@asynccontextmanager
async def server(directory: Path, mutate: Callable[[str], str] = str) -> AsyncGenerator[str, None]:
    """Run a server with the accounts of a run, and yield its URL without login.

    Args:
        directory: of its files.
        mutate: changes the text of its accounts.
    """
    settings = ServerSettings(store_dir=directory / "store", login=NODE, accounts=ACCOUNTS)
    config = write_config(directory / "nats.conf", settings)
    accounts = directory / ACCOUNTS_FILE
    accounts.write_text(mutate(accounts_text()))
    with (directory / "nats.log").open("ab") as output:
        process = await anyio.open_process(server_command(config, directory), stdout=output, stderr=output)
    try:
        ports = await wait_ready(directory, process.pid, timeout_s=TIMEOUT_S, login=NODE)
        yield ports.url
    finally:
        if process.returncode is None:
            process.kill()
        with anyio.CancelScope(shield=True):
            await process.wait()
        ports_file(directory, process.pid).unlink(missing_ok=True)


class Scene:
    """A run with stored messages, tasks in the hands of others, and external clients."""

    def __init__(self, url: str, node: Client, strangers: dict[str, Stranger], in_run: Stranger) -> None:
        self.url = url
        self.node = node
        self.strangers = strangers
        self.own_inbox = ""  # prefix of the inboxes for answers to `node`
        self.in_run = in_run  # receives what is published in the run's account

    async def api(self, subject: str, body: Any = b"", **headers: str) -> dict[str, Any]:
        """Send a request as a node; return the answer."""
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await self.node.request(subject, payload, timeout=TIMEOUT_S, headers=headers or None)
        return json.loads(answer.data) if answer.data else {"status": (answer.headers or {}).get("Status", "")}

    async def state(self) -> dict[str, Any]:
        """All that the server keeps of the run, by name: streams, messages by subject, consumers."""
        found: dict[str, Any] = {}
        listed = await self.api("$JS.API.STREAM.NAMES")
        for name in listed["streams"] or []:
            info = await self.api(f"$JS.API.STREAM.INFO.{name}", {"subjects_filter": ">", "deleted_details": True})
            state = info["state"]
            found[f"config {name}"] = info["config"]
            found |= {f"messages {subject}": number for subject, number in state.pop("subjects", {}).items()}
            found[f"stream {name}"] = {key: state.get(key) for key in ("last_seq", "consumer_count")}
            found[f"kept {name}"] = {key: state.get(key) for key in ("messages", "bytes", "first_seq", "deleted")}
            for consumer in (await self.api(f"$JS.API.CONSUMER.LIST.{name}"))["consumers"] or []:
                config = consumer["config"]
                keys = ("delivered", "ack_floor", "num_ack_pending", "num_redelivered", "num_pending", "num_waiting")
                numbers = {key: consumer[key] for key in keys}
                for times in ("delivered", "ack_floor"):
                    numbers[times].pop("last_active", None)
                found[f"consumer {name}/{consumer['name']}"] = numbers
                found[f"config {name}/{consumer['name']}"] = {k: v for k, v in config.items() if k != "metadata"}
        return found

    async def settle(self, who: Stranger) -> None:
        """Wait until the server has processed all that a client sent, with what followed from it."""
        await flushed(who.nc)
        asked = ["$JS.API.STREAM.NAMES", f"$JS.API.STREAM.INFO.{EVENT}"] * API_WORKERS  # the server has two queues
        await asyncio.gather(*map(self.api, asked))
        for durable in DURABLES:  # both queues of a consumer are first in, first out
            bad = await self.api(f"$JS.API.CONSUMER.MSG.NEXT.{WORK}.{durable}", b"{")
            assert bad == {"status": "400"}, bad
            ack = f"$JS.ACK.{WORK}.{durable}.1.999999.999999.1700000000000000000.0"
            await self.node.request(ack, b"+WPI", timeout=TIMEOUT_S)
        await eventually(self._has_delivered)
        for _ in range(2):  # a stream's inbound and outbound queues; the first round may bring something into another
            for subject in ("phy.r.event.barrier", "phy.r.work.barrier", "phy.r.data.barrier", "phy.r.dead.barrier",
                            "$KV.phy-r.barrier"):  # fmt: skip
                refused = await self.api(subject, b"", **{"Nats-Expected-Last-Msg-Id": "never"})
                assert refused["error"]["err_code"] == 10070, refused
        for stranger in (self.in_run, *self.strangers.values()):
            if stranger.nc.is_connected:
                await stranger.nc.flush(TIMEOUT_S)

    async def _has_delivered(self) -> bool:
        return not (await self.api(f"$JS.API.CONSUMER.INFO.{WORK}.score-math"))["num_waiting"]

    async def return_tasks(self) -> None:
        """Queue the tasks of alice's durable again, so that each pull has one to deliver."""
        await self.api(f"$JS.API.CONSUMER.RESET.{WORK}.score-math")

    def take_heard(self) -> dict[str, list[Heard]]:
        """What was received since the last call, by client; in the run's account without the node's own requests."""
        heard = {name: stranger.heard for name, stranger in self.strangers.items()}
        heard["run"] = [
            one
            for one in self.in_run.heard
            if not one.subject.startswith((self.own_inbox, "_R_.")) and not one.subject.endswith(".barrier")
        ]
        for stranger in (self.in_run, *self.strangers.values()):
            stranger.heard = []
        return heard


@asynccontextmanager
async def scene(directory: Path, mutate: Callable[[str], str] = str) -> AsyncGenerator[Scene, None]:
    """Run a server with a run on it and all external clients connected."""
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(server(directory, mutate))
        async with Bus.connect(with_login(url, NODE), RUN, name="setup") as bus:
            await bus.ensure_streams(TEST_STREAMS)
        everybody = {name: Stranger() for name in ("node", "in_run", *CLIENTS)}
        for name, stranger in everybody.items():
            user = name if name in CLIENTS else "node"
            await stranger.connect(url, user, f"of-{user}" if name in CLIENTS else NODE.password.reveal())
            stack.push_async_callback(stranger.nc.close)
        node, in_run = everybody.pop("node").nc, everybody.pop("in_run")
        made = Scene(url, node, everybody, in_run)
        await _store(made)
        await _take_work(made)
        for subject in ("phy.r.call.>", "phy.r.scores.>", "phy.r.event.>", "phy.r.data.>", "phy.r.dead.>", "$KV.>",
                        "phy.r.work.rollout.>", "phy.r.work.score.code.>", "_INBOX.>", "$SYS.>"):  # fmt: skip
            await in_run.listen(subject)
        await flushed(in_run.nc)
        made.own_inbox = bytes(node._resp_sub_prefix or b"").decode()
        yield made


async def _store(made: Scene) -> None:
    for subject, number in STORED.items():
        for _ in range(number):
            await made.api(subject, f"secret of {subject}".encode())
    for durable, subject in DURABLES.items():
        config = {"name": durable, "durable_name": durable, "filter_subjects": [subject], "ack_policy": "explicit"}
        bounds = {"ack_wait": PASSIVE, "max_ack_pending": 1000, "max_batch": 8, "max_waiting": 64}
        bounds["max_expires"] = 10 * 10**9
        body = {"stream_name": WORK, "config": config | bounds}
        assert "error" not in await made.api(f"$JS.API.CONSUMER.CREATE.{WORK}.{durable}", body)
    reader = {"ack_policy": "none", "mem_storage": True, "name": "reader", "inactive_threshold": PASSIVE}
    await made.api(f"$JS.API.CONSUMER.CREATE.{EVENT}.reader", {"stream_name": EVENT, "config": reader})


async def _take_work(made: Scene) -> None:
    """Put a task into the hands of each other worker: it is delivered, and not acknowledged."""
    for durable in ("score-math", "score-code", "score-_own", "rollout"):
        pull = f"$JS.API.CONSUMER.MSG.NEXT.{WORK}.{durable}"
        await made.node.request(pull, b'{"batch":1}', timeout=TIMEOUT_S, old_style=True)


def difference(before: dict[str, Any], after: dict[str, Any], may_change: Iterable[str] = ()) -> Changed:
    """Entries that differ, except those whose names begin with one of `may_change`."""
    names = (name for name in before | after if not name.startswith(tuple(may_change)))
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}
