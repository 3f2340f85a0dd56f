"""Discarding a run takes its streams and its directory, and nothing that is another's or in use."""

import fcntl
from pathlib import Path

import anyio
import pytest

from messages import GroupFailed, Plane
from runtime.bus.bus import Bus
from runtime.node.claims import discarding
from runtime.node.claims.claim import Claim
from runtime.node.claims.discarding import NotDiscarded, delete_unclaimed, discard
from runtime.node.claims.node_claim import NodeClaim, NodeClaimed, NodeHolder
from runtime.util.secrets import Secret
from tests.fixtures.nats import TEST_LIMITS, TEST_STREAMS, NatsServer, group_failed

pytestmark = pytest.mark.anyio


def filled(run_dir: Path) -> None:
    for name in ("topology.json", "run-id.json", "agent-n0.lock", "agent-n1.lock"):
        (run_dir / name).touch()
    (run_dir / "checkpoints" / "step-3").mkdir(parents=True)


def left_in(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.iterdir())


async def test_streams_consumers_and_bucket_of_the_run_alone_are_deleted(
    bus: Bus, nats_server: NatsServer, tmp_path: Path
) -> None:
    longer = f"{bus.run[:50]}-event"  # as if it were a stream of the other
    async with Bus.connect(nats_server.url, longer, name="test", limits=TEST_LIMITS) as other:
        await other.ensure_streams(TEST_STREAMS)
        for one in (bus, other):
            await one.publish(group_failed(1))
            await one.kv.put("key", "value")
        async with bus.consume(GroupFailed, durable="reader"):
            pass
        await delete_unclaimed(bus, ["n0"], tmp_path)
        held = await bus.holdings()
        assert (held.whole, held.has_bucket, held.used) == (False, False, False)
        assert (await other.state(Plane.EVENT)).messages == 1
        assert (await other.holdings()).whole
        await delete_unclaimed(bus, ["n0"], tmp_path)  # again: nothing is missed
        await other.delete_streams()


async def test_streams_of_a_living_agent_stay_whichever_node_it_runs(bus: Bus, tmp_path: Path) -> None:
    claim = await NodeClaim.take(bus, "n7", tmp_path / "elsewhere", incarnation=1, renew_every_s=0.2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(claim.keep)
        with pytest.raises(ExceptionGroup) as refused:
            await delete_unclaimed(bus, ["n0"], tmp_path)
        tasks.cancel_scope.cancel()
    assert refused.group_contains(NodeClaimed, match="node n7 of run .* is run by another node daemon")
    assert (await bus.holdings()).whole


async def test_the_claim_of_a_dead_agent_is_waited_out(bus: Bus, tmp_path: Path) -> None:
    holder = NodeHolder(host="other", pid=1, run_dir="/elsewhere", incarnation=1, since=0.0)
    await bus.kv.put("agent.n0", holder, ttl_s=1)
    await delete_unclaimed(bus, ["n0"], tmp_path)
    assert not (await bus.holdings()).has_bucket


def test_the_directory_is_emptied_but_for_locks(tmp_path: Path) -> None:
    filled(tmp_path)
    with Claim.take(tmp_path, node="n0") as claim:
        discard(claim, "r", ["n0", "n1"], None)
    assert left_in(tmp_path) == ["agent-n0.lock", "agent-n1.lock", "agent.lock"]


@pytest.mark.parametrize("lock", ["agent-n1.lock", "agent-n2.lock", "agent.lock"])
def test_a_lock_that_another_agent_of_the_directory_holds_keeps_everything(tmp_path: Path, lock: str) -> None:
    filled(tmp_path)
    with (tmp_path / lock).open("w") as held, Claim.take(tmp_path, node="n0") as claim:
        fcntl.flock(held, fcntl.LOCK_EX)
        before = left_in(tmp_path)
        with pytest.raises(NotDiscarded, match=r"is in use: .*; nothing was discarded"):
            discard(claim, "r", ["n0", "n1"], Secret("nats://127.0.0.1:1"))
        assert set(before) <= set(left_in(tmp_path))
        assert (tmp_path / "checkpoints" / "step-3").exists()
        with (tmp_path / lock).open() as again, pytest.raises(BlockingIOError):
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is still the file that is held


def test_no_agent_of_the_directory_starts_while_it_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []

    def start_others(run_dir: Path) -> None:
        for node in ("n1", None):
            try:
                Claim.take(run_dir, node=node)
            except Exception as error:  # noqa: BLE001 - which one is what is asked
                refused.append(type(error).__name__)

    monkeypatch.setattr(discarding, "_empty", start_others)
    with Claim.take(tmp_path, node="n0") as claim:
        discard(claim, "r", ["n0", "n1"], None)
    assert refused == ["RunClaimed", "RunClaimed"]


@pytest.mark.slow
def test_a_bus_that_is_away_keeps_the_directory(tmp_path: Path) -> None:
    filled(tmp_path)
    with Claim.take(tmp_path) as claim, pytest.raises(NotDiscarded, match="nothing was discarded"):
        discard(claim, "r", ["local"], Secret("nats://127.0.0.1:1"), bus_limits=TEST_LIMITS)
    assert (tmp_path / "checkpoints" / "step-3").exists()
