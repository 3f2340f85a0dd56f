"""The bucket: compare-and-set, watching, lifetimes."""

import anyio
import msgspec
import pytest

from runtime.bus.bus import Bus
from runtime.bus.errors import PayloadUnreadable, SequenceMismatch
from tests.fixtures.nats import NatsServer, eventually

pytestmark = pytest.mark.anyio


class Address(msgspec.Struct, frozen=True):
    url: str


A, B = Address("http://a"), Address("http://b")


async def value_of(bus: Bus, key: str) -> Address | None:
    entry = await bus.kv.get(key, Address)
    return None if entry is None else entry.value


async def test_a_value_comes_back_until_it_is_deleted(bus: Bus) -> None:
    assert await value_of(bus, "router.policy") is None
    await bus.kv.put("router.policy", A)
    assert await value_of(bus, "router.policy") == A
    await bus.kv.delete("router.policy")
    assert await value_of(bus, "router.policy") is None


async def test_create_takes_a_key_that_is_free_also_after_a_deletion(bus: Bus) -> None:
    revision = await bus.kv.create("node.n0", A)
    with pytest.raises(SequenceMismatch):
        await bus.kv.create("node.n0", B)
    await bus.kv.delete("node.n0", revision=revision)
    await bus.kv.create("node.n0", B)
    assert await value_of(bus, "node.n0") == B


async def test_update_succeeds_at_the_latest_revision_only(bus: Bus) -> None:
    first = await bus.kv.put("k", A)
    second = await bus.kv.update("k", B, first)
    with pytest.raises(SequenceMismatch) as refused:
        await bus.kv.update("k", A, first)
    assert refused.value.last == second


async def test_concurrent_counters_lose_no_step(bus: Bus) -> None:
    await bus.kv.put("count", 0)

    async def count() -> None:
        while True:
            entry = await bus.kv.get("count", int)
            assert entry is not None
            assert entry.value is not None
            try:
                await bus.kv.update("count", entry.value + 1, entry.revision)
            except SequenceMismatch:
                continue
            return

    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(count)
    entry = await bus.kv.get("count", int)
    assert entry is not None
    assert entry.value == 10


async def test_entries_are_those_present_under_a_filter(bus: Bus) -> None:
    await bus.kv.put("engine.policy.0", A)
    await bus.kv.put("engine.policy.1", A)
    await bus.kv.put("engine.policy.1", B)
    await bus.kv.put("engine.policy.2", B)
    await bus.kv.delete("engine.policy.2")
    await bus.kv.put("router.policy", A)
    found = {entry.key: entry.value for entry in await bus.kv.entries("engine.>", Address)}
    assert found == {"engine.policy.0": A, "engine.policy.1": B}
    assert await bus.kv.entries("nothing.>", Address) == []


async def test_a_watch_shows_what_is_there_and_then_every_change(bus: Bus) -> None:
    await bus.kv.put("engine.0", A)
    async with bus.kv.watch("engine.*", Address) as changes:
        assert changes.num_pending == 1
        seen = [await changes.next(30)]
        assert changes.num_pending == 0
        await bus.kv.put("engine.1", B)
        seen.append(await changes.next(30))
        await bus.kv.delete("engine.0")
        seen.append(await changes.next(30))
        assert await changes.next(0.05) is None
    assert [(entry.key, entry.value) for entry in seen if entry is not None] == [
        ("engine.0", A),
        ("engine.1", B),
        ("engine.0", None),
    ]


async def test_a_watch_survives_a_killed_server(own_bus: Bus, own_nats_server: NatsServer) -> None:
    await own_bus.kv.put("engine.0", A)
    async with own_bus.kv.watch("engine.*", Address) as changes:
        assert await changes.next(30) is not None
        await own_nats_server.restart()
        await own_bus.kv.put("engine.0", B)
        entry = await changes.next(30)
        assert entry is not None
        assert entry.value == B


async def test_a_value_with_a_lifetime_ends_by_itself_and_the_key_is_free_again(bus: Bus) -> None:
    await bus.kv.put("claim.n0", A, ttl_s=1)

    async def is_gone() -> bool:
        return await value_of(bus, "claim.n0") is None

    await eventually(is_gone)
    await bus.kv.create("claim.n0", B)


async def test_a_value_of_another_form_is_an_error_for_get_and_passed_over_by_a_watch(bus: Bus) -> None:
    await bus.kv.put("engine.0", 7)
    await bus.kv.put("engine.1", A)
    with pytest.raises(PayloadUnreadable, match=r"engine\.0"):
        await bus.kv.get("engine.0", Address)
    assert [entry.key for entry in await bus.kv.entries("engine.*", Address)] == ["engine.1"]
