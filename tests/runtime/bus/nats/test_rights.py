"""Rights of a run's login: each is tried on the server, one that lacks is named, and nothing changes."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from messages import (
    ActorDescribed,
    BufferStarted,
    DescribeRequested,
    GroupFailed,
    Plane,
    SegmentsPublished,
)
from runtime.bus.bus import Bus
from runtime.bus.nats.rights import Right, rights_of_run
from runtime.bus.nats.store import api_call
from runtime.bus.nats.streams import stream_names
from runtime.util.secrets import Login, Secret, with_login
from tests.fixtures.nats import TEST_LIMITS, TEST_STREAMS, NatsServer, group_failed, score_request, segments
from tests.support.cluster import running_cluster
from tests.support.running_server import configured_server

pytestmark = pytest.mark.anyio
RUN = "Run-1"
RIGHTS = list(rights_of_run(RUN))
ALL, ANY = "all", "any"
PASSWORD = Secret("secret")


def user(name: str, rights: list[Right]) -> dict[str, Any]:
    return {
        "user": name,
        "password": PASSWORD.reveal(),
        "permissions": {
            verb: {"allow": [right.subjects for right in rights if right.verb == verb]}
            for verb in ("publish", "subscribe")
        },
    }


def accounts() -> str:
    """Accounts with one user that has all rights, and one user for each right that lacks it alone."""
    users = [{"user": ANY, "password": PASSWORD.reveal()}, user(ALL, RIGHTS)]
    users += [user(f"u{lacks}", [each for i, each in enumerate(RIGHTS) if i != lacks]) for lacks in range(len(RIGHTS))]
    account: dict[str, Any] = {"RL": {"jetstream": "enabled", "users": users}}
    return f"accounts {msgspec.json.encode(account).decode()}\n"


def login_url(url: str, name: str) -> str:
    return with_login(url, Login(user=name, password=PASSWORD))


@pytest.fixture
async def url(tmp_path: Path) -> AsyncGenerator[str, None]:
    async with configured_server(tmp_path, accounts(), Login(user=ANY, password=PASSWORD)) as url:
        yield url


async def use(bus: Bus) -> None:
    """Do what the processes of a run do."""
    await bus.ensure_streams(TEST_STREAMS)
    await bus.ensure_streams(msgspec.structs.replace(TEST_STREAMS, event_bytes=2 * TEST_STREAMS.event_bytes))
    for graders in (["exact_match", "code"], ["exact_match"]):
        await bus.ensure_score_queues(graders)
    await bus.holdings()
    await bus.kv.create("key", 1)
    await bus.kv.latest("*", int)
    async with bus.kv.changes("key", int, lambda _: None):
        await bus.kv.put("key", 2, ttl_s=60)
    ledger = await bus.append(BufferStarted(incarnation=1), expected_last=0)
    assert await bus.last_ledger_seq() == ledger
    seq = await bus.publish(group_failed(1))
    async with bus.read(GroupFailed) as events:
        assert await events.next(30) is not None
    data = await bus.publish(segments(1))
    assert (await bus.fetch(SegmentsPublished, data)).group_id == 1
    task = await bus.publish(score_request("a"))
    async with bus.consume_scoring("exact_match") as deliveries:
        delivery = await deliveries.next(30)
        assert delivery is not None
        await delivery.ack()
    await bus.withdraw(task)

    async def describe(_: DescribeRequested) -> ActorDescribed:
        return ActorDescribed(instance="test", role="test", reads=(), writes=(), pid=1, node="n")

    async with bus.serve({DescribeRequested: describe}):
        await bus.call("test", DescribeRequested(), timeout_s=30)
    await bus.purge(Plane.EVENT, below_seq=seq)


async def state_of(bus: Bus) -> dict[str, Any]:
    """Streams, messages and consumers on the server."""
    found: dict[str, Any] = {}
    for name in stream_names(bus.run):
        info = await api_call(bus._connection, f"STREAM.INFO.{name}")
        consumers = await api_call(bus._connection, f"CONSUMER.NAMES.{name}")
        found[name] = (info["config"], info["state"], consumers["consumers"])
    return found


async def test_a_run_needs_no_right_beyond_the_table(url: str) -> None:
    async with Bus.connect(login_url(url, ALL), RUN, name="test", limits=TEST_LIMITS) as bus:
        assert await bus.missing_rights() == []
        await use(bus)
        assert await bus.missing_rights() == []
        await bus.delete_streams()
        assert bus.stats()["bus/async_errors"] == 0


async def test_each_right_that_lacks_is_named(url: str) -> None:
    async def find(lacks: int) -> None:
        async with Bus.connect(login_url(url, f"u{lacks}"), RUN, name="test") as bus:
            assert await bus.missing_rights() == [str(RIGHTS[lacks])]

    async with anyio.create_task_group() as tasks:
        for lacks, right in enumerate(RIGHTS):
            if not right.subjects.startswith("_INBOX"):  # a client needs these to connect
                tasks.start_soon(find, lacks)


async def test_a_login_without_inboxes_is_no_endless_wait(url: str) -> None:
    for lacks, right in enumerate(RIGHTS):
        if right.subjects.startswith("_INBOX"):
            async with Bus.connect(login_url(url, f"u{lacks}"), RUN, name="test") as bus:
                assert await bus.missing_rights() == [str(right)]


async def unchanged_by_a_check(bus: Bus) -> None:
    await use(bus)
    for number in range(20):
        await bus.publish(group_failed(number))
        await bus.publish(score_request(f"r{number}"))
    before = await state_of(bus)
    assert await bus.missing_rights() == []
    assert await state_of(bus) == before


async def test_a_check_changes_nothing_of_a_run(nats_server: NatsServer) -> None:
    async with Bus.connect(nats_server.url, RUN, name="test") as bus:
        await unchanged_by_a_check(bus)
        await bus.delete_streams()


@pytest.mark.slow
async def test_a_check_changes_nothing_of_a_run_on_a_cluster(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster, Bus.connect(cluster.url, RUN, name="test") as bus:
        await unchanged_by_a_check(bus)
