"""Answers go where clients of this run take answers, whatever a message from outside asks for."""

import anyio
import pytest

from messages import Message, MessageDeadLettered, Plane, StatsGiven, StatsRequested, encode
from messages.subjects import call_subject, inbox_prefix, is_inbox
from runtime.bus.bus import Bus
from runtime.bus.errors import MessageRefused
from tests.fixtures.nats import eventually, group_failed

pytestmark = pytest.mark.anyio

FORGED = [
    "phy.r.event.ledger.round_halted",
    "phy.r.work.rollout.1.1",
    "$JS.API.STREAM.PURGE.phy-r-event",
    "$KV.phy-r.roster.buffer",
    "a b",
    "",
    "_INBOX.other.rollout.x",
    "_INBOX.r",
    "_INBOX.r.*",
    "_INBOX.r.>",
    "_INBOX.r..x",
    "_INBOX.r.a\r\nPUB x 0",
    "_INBOX.r." + "a" * 600,
]


@pytest.mark.parametrize("subject", FORGED)
def test_what_is_no_inbox_of_a_run(subject: str) -> None:
    assert not is_inbox("r", subject)


@pytest.mark.parametrize("name", ["rollout", "policy.0", "a b>*", ""])
def test_an_inbox_of_any_client_is_one(name: str) -> None:
    assert is_inbox("r", inbox_prefix("r", name) + ".Xy7")


async def test_clients_take_answers_under_their_run_and_name(bus: Bus) -> None:
    assert bus._connection.new_inbox().startswith(f"_INBOX.{bus.run}.test.")


async def test_a_call_that_is_to_be_answered_elsewhere_is_dead_lettered(bus: Bus) -> None:
    async def give_stats(_request: Message) -> StatsGiven:
        return StatsGiven(instance="i", uptime_s=1.0, stats={})

    forged = f"phy.{bus.run}.event.ledger.round_halted"
    asked = encode(StatsRequested())
    async with bus.serve({StatsRequested: give_stats}, instance="i"):
        subject = call_subject(bus.run, "i", StatsRequested.topic)
        await bus._connection.send(subject, asked.payload, asked.headers, reply=forged)

        async def told() -> bool:
            return (await bus.state(Plane.DEAD)).messages == 1

        await eventually(told)
        assert (await bus.call("i", StatsRequested(), StatsGiven, timeout_s=30)).instance == "i"
    assert await bus.last_ledger_seq() == 0
    async with bus.read(MessageDeadLettered) as events:
        with anyio.fail_after(200):
            assert "is not an inbox of this run" in (await anext(events)).message.reason


@pytest.mark.parametrize("subject", ["phy.x.event.ledger.round_halted", "a b"])
async def test_nothing_is_sent_to_what_is_no_inbox(bus: Bus, subject: str) -> None:
    with pytest.raises(MessageRefused, match="is not an inbox of run"):
        await bus.notify(group_failed(1), to=subject)
