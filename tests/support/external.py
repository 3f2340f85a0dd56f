"""A server with accounts, as a run has it, and programs that hold a credential alone."""

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from signal import SIGHUP

import anyio
import nats
from nats.aio.client import Client

from messages import ScoreItem, ScoreRequested, ScoresGiven, decode, encode
from messages.subjects import grader_token, score_durable, score_filter, scores_subject
from runtime.bus.bus import Bus
from runtime.bus.credential import credential_text
from runtime.bus.nats.accounts import Accounts, ClientKind, ExternalClient, credential_of
from runtime.bus.nats.certificate import NAME, client_context, own_certificate
from runtime.bus.nats.server import ServerSettings, write_accounts
from runtime.util.secrets import Login, Secret
from tests.fixtures.nats import TEST_LIMITS, TEST_STREAMS
from tests.support.running_server import RunningServer, running_server

RUN = "r"
GRADER = "math"
LOGIN = Login(user="physarum", password=Secret("of-nodes"))
LATER = datetime(2099, 1, 1, tzinfo=UTC)
ALICE = ExternalClient(name="alice", kind=ClientKind.GRADER, grader=GRADER, password="of-alice", expires=LATER)
BOB = ExternalClient(name="bob", kind=ClientKind.VIEWER, password="of-bob", expires=LATER)


class RunServer:
    """The server of a run, with its streams and the queue of one grader, and the run's own connection."""

    def __init__(self, server: RunningServer, bus: Bus, client: Client, directory: Path, certificate: str) -> None:
        self.server = server
        self.bus = bus
        self.directory = directory
        self._client = client
        self._certificate = certificate
        self._answers: asyncio.Queue[ScoresGiven] = asyncio.Queue()

    def credential(self, client: ExternalClient) -> Path:
        """Write the credential of a client to a file."""
        path = self.directory / f"{client.name}.toml"
        url = self.server.ports.url
        text = credential_text(credential_of(RUN, client, url=url, certificate=self._certificate))
        path.touch(mode=0o600)
        path.write_text(text)
        return path

    def revoke(self, client: ExternalClient) -> None:
        """Take a client's login from the server."""
        kept = tuple(one for one in (ALICE, BOB) if one is not client)
        accounts = Accounts(run=RUN, graders=(GRADER,), clients=kept)
        write_accounts(self.directory, accounts, LOGIN)
        os.kill(self.server.pid, SIGHUP)

    async def listen(self) -> None:
        """Collect answers."""
        await self._client.subscribe(scores_subject(RUN, "*", "inbox"), cb=self._take)

    async def _take(self, message: nats.aio.msg.Msg) -> None:
        scores = decode(message.data, message.headers)
        assert isinstance(scores, ScoresGiven)
        assert message.subject == scores_subject(RUN, GRADER, "inbox")
        self._answers.put_nowait(scores)

    async def put(self, request: ScoreRequested) -> None:
        """Queue a score request."""
        encoded = encode(request)
        subject = score_filter(RUN, GRADER).replace("*", request.request_id)
        await self._client.jetstream().publish(subject, encoded.payload, headers=encoded.headers)

    async def answer(self) -> ScoresGiven:
        """The next answer."""
        with anyio.fail_after(200):
            return await self._answers.get()

    async def num_queued(self) -> int:
        """Number of score requests that are not acknowledged."""
        return (await self._client.jetstream().stream_info("phy-r-work")).state.messages

    async def is_done(self) -> bool:
        """Whether all score requests are acknowledged."""
        return await self.num_queued() == 0

    async def is_held(self) -> bool:
        """Whether a worker holds a score request."""
        return bool((await self._client.jetstream().consumer_info("phy-r-work", score_durable(GRADER))).num_ack_pending)

    async def consumers(self) -> list[str]:
        """Names of the consumers of score requests."""
        return [info.name for info in await self._client.jetstream().consumers_info("phy-r-work")]


def score_request(name: str, items: Sequence[ScoreItem], keys: tuple[str, ...] = ()) -> ScoreRequested:
    """A score request for the grader of the run."""
    return ScoreRequested(
        request_id=name,
        reply_to=scores_subject(RUN, GRADER, "inbox"),
        group_id=1,
        attempt=1,
        rm_type=GRADER,
        prompt_keys=keys,
        items=tuple(items),
    )


@asynccontextmanager
async def run_server_in(directory: Path) -> AsyncGenerator[RunServer]:
    """Start the server of a run without actors, for the duration of a block."""
    certificate = own_certificate(directory / "bus")
    settings = ServerSettings(
        store_dir=directory / "nats",
        login=LOGIN,
        certificate=certificate,
        accounts=Accounts(run=RUN, graders=(GRADER,), clients=(ALICE, BOB)),
    )
    pem = certificate.pem()
    async with (
        running_server(directory, settings) as server,
        Bus.connect(server.url, RUN, name="test", limits=TEST_LIMITS, certificate=pem) as bus,
    ):
        await bus.ensure_streams(TEST_STREAMS)
        client = await nats.connect(server.url, tls=client_context(pem), tls_hostname=NAME)
        token = grader_token(GRADER)
        config = nats.js.api.ConsumerConfig(ack_wait=5)
        await client.jetstream().pull_subscribe(
            score_filter(RUN, token), durable=score_durable(token), stream="phy-r-work", config=config
        )
        run = RunServer(server, bus, client, directory, pem)
        await run.listen()
        yield run
        await client.close()


@asynccontextmanager
async def program(
    *command: str | Path, cwd: Path, env: dict[str, str] | None = None
) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Run a program for the duration of a block; its stdout is a pipe."""
    environment = {**os.environ, **(env or {}), "PYTHONPATH": ""}
    process = await asyncio.create_subprocess_exec(
        *map(str, command), cwd=cwd, env=environment, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
