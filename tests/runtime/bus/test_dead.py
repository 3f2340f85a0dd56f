"""Setting a message aside: whatever it holds, once, and told of once."""

import anyio
import pytest

from messages import DeadLetter, GroupFailed, Message, MessageDeadLettered, Plane, decode
from messages.subjects import subject_of
from runtime.bus.bus import Bus
from runtime.bus.dead import HEADERS_CHARS, KEPT_BYTES, REASON_CHARS, SUBJECT_CHARS
from tests.fixtures.nats import group_failed, score_request
from tests.support.raw_nats import publish_raw

pytestmark = pytest.mark.anyio
TYPE = b"Physarum-Type: group_failed"
SUBJECT = "phy.{}.event.group.failed.9.1"


async def letters(bus: Bus) -> list[DeadLetter]:
    found: list[Message] = [decode(one.payload, one.headers) async for one in bus.stored(Plane.DEAD, below_seq=1 << 60)]
    return [letter for letter in found if isinstance(letter, DeadLetter)]


async def told(bus: Bus) -> list[MessageDeadLettered]:
    async with bus.read(MessageDeadLettered) as events:
        return [received.message async for received in events.so_far()]


HOSTILE = {
    "60 KB of quotes in a header, 7 MB of body": (b"X: " + b'"' * 60_000, b"a" * 7_000_000),
    "control characters": (b"X: " + b"\x01" * 60_000, b"\x00" * 100_000),
    "many headers": (b"\r\n".join(b"X%d: %d" % (i, i) for i in range(3000)), b"x"),
    "a long name": (b"X" * 60_000 + b": 1", b"x"),
    "no text": (b"X: \xff\xfe\xed\xa0\x80", b"\xff"),
    "no headers at all": (b"\xff\xff", b""),
    "a status line's words": (b"Status: 409\r\nDescription: consumer deleted", b""),
    "deep nesting": (b"X: 1", b"[" * 100_000),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_what_a_message_holds_never_keeps_it_from_being_set_aside(bus: Bus, url: str, name: str) -> None:
    headers, payload = HOSTILE[name]
    await publish_raw(url, SUBJECT.format(bus.run), payload, TYPE + b"\r\n" + headers)
    await bus.publish(group_failed(1))
    with anyio.fail_after(200):
        async with bus.read(GroupFailed) as events:
            received = [await anext(events)]
    assert [one.message for one in received] == [group_failed(1)]
    (letter,) = await letters(bus)
    assert payload.startswith(letter.payload)
    assert len(letter.payload) == min(len(payload), KEPT_BYTES)
    assert sum(len(key) + len(value) for key, value in letter.headers.items()) <= HEADERS_CHARS + 8
    assert [event.origin for event in await told(bus)] == ["event.1"]


async def test_a_subject_that_is_no_text_leaves_the_connection_able_to_hear(bus: Bus, url: str) -> None:
    await publish_raw(url, b"phy.%s.event.\xff\xfe" % bus.run.encode(), b"{}", TYPE)
    await bus.publish(group_failed(1))
    with anyio.fail_after(200):
        async with bus.read(buries=False) as events:
            assert (await anext(events)).message == group_failed(1)


async def test_a_long_subject_and_reason_are_cut(bus: Bus) -> None:
    assert await bus._dead_letters.bury(
        "event.1", subject='"' * 50_000, reason="\x01\ud800" * 50_000, headers=None, payload=b""
    )
    (letter,) = await letters(bus)
    assert len(letter.subject) <= SUBJECT_CHARS + 3
    assert len(letter.reason) <= REASON_CHARS + 3
    assert len((await told(bus))[0].reason) <= REASON_CHARS + 3


async def test_what_comes_again_is_kept_and_told_of_once(bus: Bus) -> None:
    for _ in range(2):
        await bus._dead_letters.bury("event.1", subject="s", reason="poison", headers=None, payload=b"")
    assert len(await letters(bus)) == 1
    assert [event.dead_seq for event in await told(bus)] == [1]


async def test_what_its_finder_died_of_before_telling_is_told_by_the_next(bus: Bus) -> None:
    letter = DeadLetter(origin="event.1", subject="s", reason="poison", headers={}, payload=b"")
    await bus.publish(letter)
    await bus._dead_letters.bury("event.1", subject="s", reason="poison", headers=None, payload=b"")
    assert [event.dead_seq for event in await told(bus)] == [1]


async def test_a_task_under_a_hostile_header_is_taken_from_the_queue(bus: Bus, url: str) -> None:
    subject = subject_of(bus.run, score_request("bad"))
    await publish_raw(url, subject, b"a" * 7_000_000, b"Physarum-Type: score_requested\r\nX: " + b'"' * 60_000)
    await bus.publish(score_request("good"))
    async with bus.consume(type(score_request("")), durable="score") as deliveries:
        delivery = await deliveries.next(30)
        assert delivery is not None
        assert delivery.message == score_request("good")
    assert [event.subject for event in await told(bus)] == [subject]
