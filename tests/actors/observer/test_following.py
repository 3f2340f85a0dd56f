"""Following a run for an observer: its history, its archive, new events, restarts of the server, and its end."""

import os
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import anyio
import msgspec
import nats
import pytest

from actors.observer.following import OBSERVER, followed, observer_login
from messages import ActorStarted, Message, Plane, RunFinished
from runtime.bus.bus import Bus
from runtime.bus.nats.accounts import ClientKind, ExternalClient
from runtime.bus.nats.server import ServerSettings
from runtime.ledger.archive import archive
from runtime.node.claims.claim import Claim
from runtime.node.external_clients import Clients, ServerAccounts, locked, read_clients, write_clients
from runtime.node.reopen import FoundRun, NoLog
from runtime.util.secrets import Login, Secret, with_login
from tests.fixtures.nats import TEST_LIMITS, TEST_STREAMS, eventually
from tests.runtime.node.test_daemon import Running, plan
from tests.support.log_of_a_run import LOG
from tests.support.running_server import RunningServer, running_server

pytestmark = pytest.mark.anyio

RUN = "small"
ACTOR = ActorStarted(actor="a", node="n", pid=1)
NODE = Login(user="physarum", password=Secret("of-nodes"))


@asynccontextmanager
async def a_run(run_dir: Path) -> AsyncGenerator[tuple[Bus, RunningServer]]:
    """A run that goes on, as observers find it: a claim, a server with accounts, and the log of a small run."""
    base = ServerSettings(store_dir=run_dir / "nats", login=NODE)
    accounts = ServerAccounts(RUN, run_dir / "bus", base, ["math"], lambda line: None)
    with Claim.take(run_dir):
        async with (
            running_server(run_dir / "bus", accounts.settings()) as server,
            Bus.connect(server.url, RUN, name="test", limits=TEST_LIMITS) as bus,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(accounts.run, server.ports.url, None, lambda: os.kill(server.pid, signal.SIGHUP) is None)
            await anyio.Path(run_dir / "bus.url").write_text(with_login(server.ports.url, NODE))
            await bus.ensure_streams(TEST_STREAMS)
            yield bus, server
            tasks.cancel_scope.cancel()


async def publish(bus: Bus, events: Sequence[Message]) -> None:
    for event in events:
        await bus.publish(event)


def found(run_dir: Path) -> FoundRun:
    return FoundRun(name=RUN, directory=run_dir)


def times_of(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


async def so_far(run_dir: Path, from_seq: int = 1) -> list[tuple[int, Message]]:
    async with followed(found(run_dir), from_seq=from_seq, waits=False) as events:
        return [(received.seq, received.message) async for received in events]


async def test_an_observer_knows_how_much_of_the_log_it_has_read_until_it_has_caught_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.bus.viewing.BATCH", 2)
    monkeypatch.setattr("actors.observer.following.EVENTS", 3)
    monkeypatch.setattr("actors.observer.following.BEHIND", 5)
    async with a_run(tmp_path) as (bus, _):
        await publish(bus, LOG)
        await archive(bus, tmp_path, below_seq=9)
        await bus.purge(Plane.EVENT, below_seq=9)
        shares = list[float | None]()
        async with followed(found(tmp_path)) as events:
            assert events.share_read(0) is not None  # nothing is read yet
            with anyio.fail_after(200):
                async for batch in events.batches():
                    shares.append(events.share_read(batch[-1].seq))
                    if batch[-1].seq == len(LOG):
                        break
            assert shares == [*(at / len(LOG) for at in (3, 6, 8, *range(10, len(LOG), 2))), None]
            await publish(bus, [ACTOR] * 12)
            with anyio.fail_after(200):
                async for batch in events.batches():
                    if batch[-1].seq == len(LOG) + 12:
                        break
            assert events.share_read(len(LOG)) == len(LOG) / (len(LOG) + 12)  # behind again, as after a SIGSTOP
            assert events.share_read(len(LOG) + 12) is None
            assert events.share_read(len(LOG) + 9) is None  # a few events late is the present


async def test_an_observer_of_an_empty_log_or_of_one_with_an_unreadable_end_catches_up(tmp_path: Path) -> None:
    async with a_run(tmp_path) as (bus, server):
        async with followed(found(tmp_path)) as events:
            await eventually(lambda: events.share_read(0) is None)
        await publish(bus, LOG)
        client = await nats.connect(with_login(server.ports.url, NODE))
        await client.jetstream().publish(f"phy.{RUN}.event.a_later_version", b"of a later version")
        await client.close()
        async with followed(found(tmp_path)) as events:
            async for batch in events.batches():
                assert events.share_read(batch[-1].seq) is None
                break


async def test_a_late_observer_gets_the_whole_run_and_then_new_events_until_it_finishes(tmp_path: Path) -> None:
    async with a_run(tmp_path) as (bus, _):
        await publish(bus, LOG)
        await archive(bus, tmp_path, below_seq=9)
        await bus.purge(Plane.EVENT, below_seq=9)
        seen: list[tuple[int, Message]] = []
        async with followed(found(tmp_path), ends=True) as events:
            assert (events.live, [client.name for client in read_clients(tmp_path / "bus").clients]) == (
                True,
                [OBSERVER],
            )
            async for received in events:
                seen.append((received.seq, received.message))
                if received.seq == len(LOG):
                    await bus.publish(RunFinished(incarnation=1, steps=2, reason="all steps trained"))
        assert seen[:-1] == list(enumerate(LOG, 1))
        assert isinstance(seen[-1][1], RunFinished)
        assert (events.first_seq, events.problems) == (1, [])


async def test_after_the_end_it_reads_the_store_and_changes_nothing_in_it(tmp_path: Path) -> None:
    async with a_run(tmp_path) as (bus, _):
        await publish(bus, LOG)
    before = times_of(tmp_path)
    assert await so_far(tmp_path) == list(enumerate(LOG, 1))
    assert await so_far(tmp_path, from_seq=5) == list(enumerate(LOG, 1))[4:]
    assert times_of(tmp_path) == before


async def test_a_server_that_is_killed_costs_no_event_and_no_gap(tmp_path: Path) -> None:
    observer_login(found(tmp_path))  # as a node daemon does before it starts the server
    async with a_run(tmp_path) as (bus, server):
        await publish(bus, LOG)
        seen: list[int] = []
        async with followed(found(tmp_path)) as events:
            async for received in events:
                seen.append(received.seq)
                if received.seq == 7:
                    await server.kill()
                    await server.start()
                if received.seq == len(LOG):
                    await bus.publish(ActorStarted(actor="late", node="n", pid=1))
                if isinstance(received.message, ActorStarted) and received.message.actor == "late":
                    break
        assert seen == list(range(1, len(LOG) + 2))


async def test_it_creates_no_consumer(tmp_path: Path) -> None:
    async with a_run(tmp_path) as (bus, server):
        await publish(bus, LOG)
        client = await nats.connect(server.url)  # pyright: ignore[reportUnknownMemberType]
        async with followed(found(tmp_path)) as events:
            async for received in events:
                if received.seq == len(LOG):
                    break
            assert (await client.jetstream().stream_info(f"phy-{RUN}-event")).state.consumer_count == 0
            async with bus.read() as _:
                assert (await client.jetstream().stream_info(f"phy-{RUN}-event")).state.consumer_count == 1
        await client.close()


async def test_a_damaged_archive_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    async with a_run(tmp_path) as (bus, _):
        await publish(bus, LOG)
        path, _ = await archive(bus, tmp_path, below_seq=9)
        await bus.purge(Plane.EVENT, below_seq=9)
        path.write_bytes(path.read_bytes()[:60])
        async with followed(found(tmp_path), waits=False) as events:
            seen = [received.seq async for received in events]
        assert seen[-len(LOG) + 8 :] == list(range(9, len(LOG) + 1))
        assert len(events.problems) == 1
        assert path.name in events.problems[0]


async def test_events_that_this_version_cannot_decode_are_counted(tmp_path: Path) -> None:
    async with a_run(tmp_path) as (bus, server):
        await publish(bus, LOG[:2])
        client = await nats.connect(server.url)  # pyright: ignore[reportUnknownMemberType]
        for _ in range(2):
            await client.jetstream().publish(f"phy.{RUN}.event.later", b"of a later version")
        await client.close()
        await publish(bus, LOG[2:])
        async with followed(found(tmp_path), waits=False) as events:
            seen = [received.seq async for received in events]
        assert len(seen) == len(LOG)
        assert events.problems == ["2 events of the log cannot be decoded by this version: they are missing"]


async def test_a_run_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as refused:
        await so_far(tmp_path)
    assert refused.group_contains(NoLog)


async def test_a_login_of_another_kind_with_its_name_is_refused(tmp_path: Path) -> None:
    expires = datetime(2099, 1, 1, tzinfo=UTC)
    grader = ExternalClient(name=OBSERVER, kind=ClientKind.GRADER, grader="poems", password="x", expires=expires)
    with locked(tmp_path / "bus"):
        write_clients(tmp_path / "bus", Clients(graders=("poems",), clients=(grader,)))
    with pytest.raises(ValueError, match="is not of the kind viewer: revoke it"):
        observer_login(found(tmp_path))


async def test_a_run_that_listens_on_this_machine_alone_accepts_its_observers_while_it_runs(tmp_path: Path) -> None:
    server = ServerSettings(store_dir=tmp_path / "nats", login=NODE)
    run = Running(msgspec.structs.replace(plan(tmp_path), server=server, address=None))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run.daemon.run)
        await eventually((tmp_path / "bus.url").exists)
        async with followed(FoundRun(name="r", directory=tmp_path), waits=False) as events:
            assert events.live
        await run.shown("credential of viewer observer: accepted")
        os.kill(os.getpid(), signal.SIGTERM)
