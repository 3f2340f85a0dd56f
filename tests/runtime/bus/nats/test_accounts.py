"""The accounts of external clients, on a real server: what works and what is refused."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import nats
import pytest
from nats.aio.client import Client

from messages import Plane, SegmentsPublished, decode
from runtime.bus.bus import Bus
from runtime.bus.nats.accounts import Accounts, ClientKind, ExternalClient, render_accounts, rights_of
from runtime.bus.nats.server import ServerSettings, write_config
from runtime.util.secrets import Login, Secret
from tests.build.samples import payload, segment
from tests.fixtures.nats import TEST_LIMITS, TEST_STREAMS, group_failed
from tests.support.flushed import flushed
from tests.support.running_server import RunningServer, running_server

pytestmark = pytest.mark.anyio

LOGIN = Login(user="physarum", password=Secret("of-nodes"))
LATER = datetime(2099, 1, 1, tzinfo=UTC)
ALICE = ExternalClient(name="alice", kind=ClientKind.GRADER, grader="math", password="of-alice", expires=LATER)
BOB = ExternalClient(name="bob", kind=ClientKind.VIEWER, password="of-bob", expires=LATER)
ACCOUNTS = Accounts(run="r", graders=("math", "my/file.py:code"), clients=(ALICE, BOB))
WITHOUT = ServerSettings(store_dir=Path(), login=LOGIN)


def settings(directory: Path, accounts: Accounts | None = ACCOUNTS) -> ServerSettings:
    return msgspec.structs.replace(WITHOUT, store_dir=directory / "nats", accounts=accounts)


@asynccontextmanager
async def client(server: RunningServer, one: ExternalClient) -> AsyncGenerator[Client]:
    inboxes = f"_INBOX.r.{one.name}"
    connected = await nats.connect(
        server.ports.url, user=one.name, password=one.password, inbox_prefix=inboxes.encode(), allow_reconnect=False
    )
    try:
        yield connected
    finally:
        await connected.close()


@asynccontextmanager
async def run_bus(server: RunningServer) -> AsyncGenerator[Bus]:
    async with Bus.connect(server.url, "r", name="test", limits=TEST_LIMITS) as bus:
        yield bus


async def test_a_viewer_reads_stored_and_new_events(tmp_path: Path) -> None:
    async with (
        running_server(tmp_path, settings(tmp_path)) as server,
        run_bus(server) as bus,
        client(server, BOB) as bob,
    ):
        await bus.ensure_streams(TEST_STREAMS)
        await bus.publish(group_failed(1))
        stored = await bob.request("$JS.API.DIRECT.GET.phy-r-event", b'{"seq":1}', timeout=200)
        assert (stored.headers or {})["Nats-Subject"] == "phy.r.event.group.failed.1.1"
        live = await bob.subscribe("phy.r.event.>")
        await flushed(bob)
        await bus.publish(group_failed(2))
        assert (await live.next_msg(30)).subject == "phy.r.event.group.failed.2.1"


async def test_a_grader_cannot_read_events_and_a_viewer_cannot_pull(tmp_path: Path) -> None:
    async with running_server(tmp_path, settings(tmp_path)) as server, run_bus(server) as bus:
        await bus.ensure_streams(TEST_STREAMS)
        await bus.publish(group_failed(1))
        for one, subject in (
            (ALICE, "$JS.API.DIRECT.GET.phy-r-event"),
            (BOB, "$JS.API.CONSUMER.INFO.phy-r-work.score-math"),
            (ALICE, "$JS.API.INFO"),
            (BOB, "$JS.API.STREAM.INFO.phy-r-event"),
        ):
            async with client(server, one) as connected:
                with pytest.raises(TimeoutError):
                    await connected.request(subject, b'{"seq":1}', timeout=0.3)


async def test_a_reply_subject_leads_to_no_key_of_the_run(tmp_path: Path) -> None:
    async with running_server(tmp_path, settings(tmp_path)) as server, run_bus(server) as bus:
        await bus.ensure_streams(TEST_STREAMS)
        await bus.publish(group_failed(1))
        before = {plane: await bus.state(plane) for plane in (Plane.EVENT, Plane.WORK, Plane.DATA)}
        async with client(server, BOB) as bob, client(server, ALICE) as alice:
            for reply in ("$KV.phy-r.key", "phy.r.event.ledger.x", "phy.r.work.score.math.1", "phy.r.data.x"):
                await bob.publish("$JS.API.DIRECT.GET.phy-r-event", b'{"seq":1}', reply)
                pull = "$JS.API.CONSUMER.MSG.NEXT.phy-r-work.score-math"
                await alice.publish(pull, b'{"batch":1,"no_wait":true}', reply)
            await flushed(bob)
            await flushed(alice)
        assert {plane: await bus.state(plane) for plane in before} == before


@pytest.mark.parametrize("wrong", ["no login", "token"])
def test_accounts_need_a_login_of_the_nodes(tmp_path: Path, wrong: str) -> None:
    login = None if wrong == "no login" else Login(password=Secret("x"))
    with pytest.raises(ValueError, match=r"login|token"):
        write_config(tmp_path / "nats.conf", msgspec.structs.replace(settings(tmp_path), login=login))


def test_every_right_of_a_client_is_exported_and_imported() -> None:
    text = render_accounts(ACCOUNTS, LOGIN)
    for one in ACCOUNTS.clients:
        for subject in rights_of("r", one).publish:
            exported = subject.replace("$JS.r.API.", "$JS.API.")
            alias = "" if exported == subject else f', to: "{subject}"'
            assert text.count(f'{{ service: "{exported}"') == 1
            assert f'{{ service: {{ account: RUN, subject: "{exported}" }}{alias} }}' in text


async def test_a_jetstream_client_finds_its_consumer_in_the_domain_of_the_run(tmp_path: Path) -> None:
    async with running_server(tmp_path, settings(tmp_path)) as server, run_bus(server) as bus:
        await bus.ensure_streams(TEST_STREAMS)
        node = await nats.connect(server.url)
        subject = "phy.r.work.score.math.*"
        await node.jetstream().pull_subscribe(subject, durable="score-math", stream="phy-r-work")
        await node.jetstream().publish("phy.r.work.score.math.1", b"task")
        async with client(server, ALICE) as alice:
            stream = alice.jetstream(domain="r")
            assert (await stream.consumer_info("phy-r-work", "score-math")).num_pending == 1
            pulled = await stream.pull_subscribe_bind(durable="score-math", stream="phy-r-work")
            (task,) = await pulled.fetch(1, timeout=200)
            await task.ack_sync()
        await node.close()
        assert (await bus.state(Plane.WORK)).messages == 0


async def test_an_auditor_reads_the_data_plane_and_nothing_else(tmp_path: Path) -> None:
    dave = ExternalClient(name="dave", kind=ClientKind.AUDITOR, password="of-dave", expires=LATER)
    accounts = Accounts(run="r", graders=("math",), clients=(dave,))
    async with (
        running_server(tmp_path, settings(tmp_path, accounts)) as server,
        run_bus(server) as bus,
        client(server, dave) as auditor,
    ):
        await bus.ensure_streams(TEST_STREAMS)
        await bus.publish(group_failed(1))
        sampled = payload(4, segment((7, 8)))
        await bus.publish(sampled)
        stored = await auditor.request("$JS.API.DIRECT.GET.phy-r-data", b'{"seq":1}', timeout=200)
        found = decode(stored.data, stored.headers or {})
        assert isinstance(found, SegmentsPublished)
        assert (found.group_id, found.segments[0].response_ids.tolist()) == (4, [7, 8])
        before = {plane: await bus.state(plane) for plane in (Plane.EVENT, Plane.WORK, Plane.DATA)}
        for subject in (
            "$JS.API.DIRECT.GET.phy-r-event",
            "$JS.API.DIRECT.GET.phy-r-work",
            "$JS.API.CONSUMER.MSG.NEXT.phy-r-work.score-math",
            "phy.r.data.segments.4.1",
            "phy.r.event.x",
        ):
            with pytest.raises(TimeoutError):
                await auditor.request(subject, b'{"seq":1}', timeout=0.3)
        assert before == {plane: await bus.state(plane) for plane in before}
