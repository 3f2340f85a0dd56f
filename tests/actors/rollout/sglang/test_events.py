"""Server-sent events out of a connection, however they are written and cut."""

import asyncio
from itertools import pairwise

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.sglang.events import MAX_EVENT_BYTES, EventReader, EventTooLarge, events_of


def events_in(*parts: bytes, max_event_bytes: int = MAX_EVENT_BYTES) -> list[bytes]:
    """The events in bytes that come in these parts."""
    reader = EventReader(max_event_bytes)
    return [event for part in parts for event in reader.feed(part)]


@pytest.mark.anyio
async def test_what_came_before_a_connection_broke_is_read_though_nobody_looked_until_then() -> None:
    """On a busy machine the last chunk and the end of the connection are met in one turn of the loop."""
    loop = asyncio.get_running_loop()
    content = aiohttp.StreamReader(BaseProtocol(loop), 2**16, loop=loop)
    content.feed_data(b"data: one\n\ndata: t")
    content.feed_data(b"wo\n\ndata: thr")
    content.set_exception(aiohttp.ClientPayloadError("the connection broke"))
    events = events_of(content)
    assert [await anext(events), await anext(events)] == [b"one", b"two"]
    with pytest.raises(aiohttp.ClientPayloadError):
        await anext(events)


@pytest.mark.parametrize(
    "written",
    [
        b"data: one\n\ndata: two\n\n",
        b"data: one\r\n\r\ndata: two\r\n\r\n",
        b"data: one\r\rdata: two\r\r\n",
        b"data:one\n\ndata:two\n\n",
        b": hello\n\ndata: one\n: ping\n\n:\n\ndata: two\n\n",
        b"event: token\nid: 7\nretry: 10\ndata: one\n\ndata: two\nevent: x\n\n",
        b"\xef\xbb\xbfdata: one\n\n\n\n\ndata: two\n\n",
        b"data: one\r\n\ndata: two\n\r\n",
    ],
)
def test_each_way_that_the_standard_allows_is_read_wherever_it_is_cut(written: bytes) -> None:
    assert events_in(written) == [b"one", b"two"]
    assert events_in(*(bytes([byte]) for byte in written)) == [b"one", b"two"]


def test_lines_of_data_are_joined_and_an_event_without_its_end_is_not_given() -> None:
    assert events_in(b"data: {\ndata:   1}\n\ndata: cut") == [b"{\n  1}"]


@given(
    st.lists(st.tuples(st.binary(min_size=1), st.sampled_from(["\n", "\r\n"]), st.sampled_from(["", " "]))),
    st.lists(st.integers(0, 200)),
)
def test_events_are_read_however_they_are_cut(written: list[tuple[bytes, str, str]], cuts: list[int]) -> None:
    data = [text.replace(b"\n", b"").replace(b"\r", b"").lstrip(b" ") for text, _, _ in written]
    joined = b"".join(
        b"data:" + space.encode() + text + 2 * end.encode() for text, (_, end, space) in zip(data, written, strict=True)
    )
    bounds = sorted({0, *(cut for cut in cuts if cut < len(joined)), len(joined)})
    parts = [joined[start:end] for start, end in pairwise(bounds)]
    assert events_in(*parts) == data


@pytest.mark.parametrize("endless", [b"data: xxxxxxx", b": comment", b"data: x\n"])
def test_an_event_without_end_is_refused(endless: bytes) -> None:
    longest = b"data: " + b"x" * 900 + b"\n\n"
    assert events_in(longest, longest, max_event_bytes=1000) == 2 * [b"x" * 900]
    with pytest.raises(EventTooLarge, match="larger than 1000 bytes"):
        events_in(*[endless] * 2000, max_event_bytes=1000)
