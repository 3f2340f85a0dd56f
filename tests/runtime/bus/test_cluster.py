"""A bus on a cluster of three servers: leaders may die, and a majority may be away for a while."""

from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import msgspec
import pytest

from messages import BufferStarted, GroupFailed, GroupsIssued, Plane, ScoreRequested
from messages.subjects import stream_of
from runtime.bus.bus import Bus
from runtime.bus.limits import BusLimits
from runtime.bus.nats.streams import found_streams
from tests.fixtures.nats import TEST_STREAMS, eventually, group_failed, score_request
from tests.support.cluster import Cluster, ClusterServer, running_cluster

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]
RUN = "run"
LOG = stream_of(RUN, Plane.EVENT)
REPLICATED = msgspec.structs.replace(TEST_STREAMS, replicas=3)
LIMITS = BusLimits(outage_s=120.0)
WITHOUT_LIMIT = msgspec.structs.replace(LIMITS, publish_timeout_s=400.0, attempt_timeout_s=400.0)  # an attempt may hang
NUM_WRITERS = 4
GOES_ON_S = 90.0  # for the load to go on, on a busy machine: an attempt at a leader that died may take longer
CONFIRMED_S = 60.0  # for reading what was confirmed, also from a server that lags behind the leader


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncGenerator[Cluster, None]:
    async with running_cluster(tmp_path) as cluster:
        yield cluster


class Load:
    """Writers of events, an appender to the ledger, and a worker on the work stream, until `stop` is set."""

    def __init__(self, url: str) -> None:
        self.stop = False
        self.appended: list[int] = []
        self.published: list[int] = []
        self.worked: set[str] = set()
        self.asked: set[str] = set()
        self._all_asked = False  # a publish that was under way at the stop counts
        self._url = url

    async def run(self) -> None:
        async with Bus.connect(self._url, RUN, name="load", limits=LIMITS) as bus, anyio.create_task_group() as tasks:
            for number in range(NUM_WRITERS):
                tasks.start_soon(self._write, bus, number)
            tasks.start_soon(self._append)
            tasks.start_soon(self._ask, bus)
            await self._work(bus)

    async def _write(self, bus: Bus, number: int) -> None:
        while not self.stop:
            group = number * 1_000_000 + len(self.published)
            await bus.publish(group_failed(group))
            self.published.append(group)
            await anyio.sleep(0.002)

    async def _append(self) -> None:
        async with Bus.connect(self._url, RUN, name="appender", limits=WITHOUT_LIMIT) as bus:
            last = 0
            while not self.stop:
                number = len(self.appended)
                last = await bus.append(
                    GroupsIssued(incarnation=1, round=number, min_version=0, groups=()), expected_last=last
                )
                self.appended.append(last)
                await anyio.sleep(0.002)

    async def _ask(self, bus: Bus) -> None:
        while not self.stop:
            name = f"r{len(self.asked)}"
            await bus.publish(score_request(name))
            self.asked.add(name)
            await anyio.sleep(0.01)
        self._all_asked = True

    async def _work(self, bus: Bus) -> None:
        async with bus.consume(ScoreRequested, durable="score", ack_wait_s=5.0) as deliveries:
            while not self._all_asked or self.worked != self.asked:
                delivery = await deliveries.next(0.5)
                if delivery is not None:
                    self.worked.add(delivery.message.request_id)
                    await delivery.ack()


async def check(cluster: Cluster, load: Load) -> None:
    """Compare the log with what was confirmed: nothing is missing, and nothing is there twice."""
    async with Bus.connect(cluster.url, RUN, name="check") as bus:
        failed: list[int] = []
        ledger: list[int] = []
        async with bus.read() as events:
            with anyio.move_on_after(CONFIRMED_S):
                while len(failed) + len(ledger) < len(load.published) + len(load.appended) or events.pending:
                    event = await events.next(1.0)
                    if event is not None and isinstance(event.message, GroupFailed):
                        failed.append(event.message.group_id)
                    elif event is not None:
                        ledger.append(event.seq)
    assert ledger == load.appended
    assert sorted(failed) == sorted(load.published)
    assert load.worked == load.asked


async def until_another_leads(cluster: Cluster, before: ClusterServer) -> None:
    """Wait until another server leads the log."""
    while (await cluster.leader_of(LOG)) is before:  # noqa: ASYNC110 - the servers offer no notification
        await anyio.sleep(0.05)


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param(["kill", "stop"] * 5, id="killed-or-stopped"),
        pytest.param(["kill"] * 10, id="killed", marks=pytest.mark.nightly),
    ],
)
async def test_the_leader_dies_ten_times_and_nothing_is_lost(cluster: Cluster, ends: list[str]) -> None:
    """The servers need 3 to 9 s to elect another leader after a kill; then an append is tried again.

    Its first attempts are short, whatever an attempt may take: the answer of a leader that died never comes.
    """
    async with Bus.connect(cluster.url, RUN, name="test") as bus:
        await bus.ensure_streams(REPLICATED)
    load = Load(cluster.url)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(load.run)
        for end in ends:
            await cluster.wait_whole(LOG)
            leader, num_appended = await cluster.leader_of(LOG), len(load.appended)
            await eventually(lambda n=num_appended: len(load.appended) > n + 10, timeout_s=GOES_ON_S)
            leader.kill() if end == "kill" else leader.stop()
            await until_another_leads(cluster, leader)
            leader.start()
            num_appended = len(load.appended)
            await eventually(lambda n=num_appended: len(load.appended) > n + 10, timeout_s=GOES_ON_S)
        load.stop = True
    await check(cluster, load)


@pytest.mark.parametrize("away_s", [12.0, pytest.param(60.0, marks=pytest.mark.nightly)])
async def test_without_a_majority_everything_waits_and_goes_on(cluster: Cluster, away_s: float) -> None:
    """Longer than a publish may take. The last server still accepts connections.

    A publish may take longer than it takes to find out that the servers are gone (`HEARD_S` and `PROBE_S` of store.py).
    """
    limits = msgspec.structs.replace(LIMITS, publish_timeout_s=11.0)
    async with Bus.connect(cluster.url, RUN, name="test", limits=limits) as bus:
        await bus.ensure_streams(REPLICATED)
        await cluster.wait_whole(LOG)
        last, *gone = cluster.servers.values()
        for server in gone:
            server.kill()
        done: list[int] = []

        async def publish(number: int) -> None:
            done.append(await bus.publish(group_failed(number)))

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(publish, number)
            tasks.start_soon(bus.kv.put, "key", 1)
            await eventually(lambda: bus.away_s > away_s, timeout_s=away_s + 30)
            assert not done
            for server in gone:
                server.start()
        assert (await bus.state(Plane.EVENT)).messages == 8
        await eventually(lambda: bus.away_s == 0)
        assert last.is_alive


async def test_a_first_connect_waits_for_servers_that_elect(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    try:
        cluster.start()
        async with Bus.connect(cluster.url, RUN, name="test") as bus:
            await bus.ensure_streams(REPLICATED)
            assert await bus.append(BufferStarted(incarnation=1), expected_last=0) == 1
    finally:
        cluster.kill()


async def test_what_a_process_stored_it_and_others_read_at_once(cluster: Cluster) -> None:
    """Each server holds a copy, and some are late: a read asks the leader where that matters."""
    async with Bus.connect(cluster.url, RUN, name="test") as bus:
        await bus.ensure_streams(REPLICATED)
    urls = [server.url for server in cluster.servers.values()]
    async with (
        Bus.connect(urls[0], RUN, name="one") as one,
        Bus.connect(urls[1], RUN, name="two") as two,
        Bus.connect(urls[2], RUN, name="three") as three,
    ):
        for number in range(200):
            revision = await one.kv.put("key", number)
            for bus in (one, two, three):
                entry = await bus.kv.get("key", int)
                assert entry is not None
                assert (entry.value, entry.revision) == (number, revision)
            seq = await one.publish(group_failed(number))
            assert await two._store.get(LOG, seq) is not None
            assert (await three._store.last_of(LOG, f"phy.{RUN}.event.>"))[0] == seq
        assert await two._store.get(LOG, 10_000) is None
        assert await two.kv.get("other", int) is None


async def test_the_streams_of_a_run_get_more_replicas_at_its_next_start(cluster: Cluster) -> None:
    async with Bus.connect(cluster.url, RUN, name="test") as bus:
        await bus.ensure_streams(TEST_STREAMS)
        assert await bus.publish(group_failed(1)) == 1
        await bus.ensure_streams(REPLICATED)
        await cluster.wait_whole(LOG)
        assert (await bus.state(Plane.EVENT)).messages == 1


async def test_runs_with_similar_names_own_their_streams_alone(cluster: Cluster) -> None:
    names = ("run", "run-event", "run-2", "RUN", "runs")
    for name in names:
        async with Bus.connect(cluster.url, name, name="test") as bus:
            await bus.ensure_streams(TEST_STREAMS)
            await bus.kv.put("key", name)
            await bus.append(BufferStarted(incarnation=1), expected_last=0)
    async with Bus.connect(cluster.url, "run", name="test") as bus:
        await bus.delete_streams()
        assert not await found_streams(bus._connection, "run")
    for name in names[1:]:
        async with Bus.connect(cluster.url, name, name="test") as bus:
            entry = await bus.kv.get("key", str)
            assert entry is not None
            assert entry.value == name
            assert await bus.last_ledger_seq() == 1
