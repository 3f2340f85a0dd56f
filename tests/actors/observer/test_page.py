"""The page of a run: who gets it, what it sends, and that nothing of a run can become markup."""

import asyncio
import hashlib
import re
import tomllib
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec
import pytest
from yarl import URL

from actors.observer import access
from actors.observer.access import Address
from actors.observer.observed import Observed
from actors.observer.page import FILES, MAX_STREAMS, STATIC, Page, follow, served
from runtime.node.reopen import FoundRun
from tests.bin.test_ledger import RUN, make
from tests.build.events import failed
from tests.fixtures.nats import eventually
from tests.support.log_of_a_run import LOG

pytestmark = pytest.mark.anyio

SECRET = "5ec4e7" * 8
WITH_SECRET = {"Authorization": f"Bearer {SECRET}"}
OF_THE_RUN = ("/events", "/timeline", "/samples", "/samples/group", "/samples/tokens", "/unknown")
ANY_PORT = Address("127.0.0.1", 0)


@asynccontextmanager
async def opened(
    observed: Observed, versions: Callable[[], Mapping[str, str]] = dict
) -> AsyncGenerator[tuple[Page, aiohttp.ClientSession]]:
    page = Page(observed, lambda: SECRET, versions=versions)
    async with served(page, ANY_PORT) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        yield page, client


def folded() -> Observed:
    observed = Observed(RUN, 2)
    for seq, event in enumerate(LOG, 1):
        observed.apply(event, seq, 1000.0 + seq)
    return observed


async def ticket(client: aiohttp.ClientSession) -> dict[str, str]:
    """A query with a ticket."""
    response = await client.post("/ticket", headers=WITH_SECRET)
    assert response.status == 200
    return {"ticket": await response.text()}


async def test_the_files_are_the_same_for_all_and_what_is_of_the_run_needs_the_secret() -> None:
    async with opened(folded()) as (_, client):
        page = await client.get("/")
        assert page.status == 200
        policy = page.headers["Content-Security-Policy"]
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert "Set-Cookie" not in page.headers
        for name in FILES:
            assert (await client.get(f"/static/{name}")).status == 200
        for path in OF_THE_RUN:
            for headers in ({}, {"Authorization": "Bearer guess"}, {"Authorization": SECRET}, {"Cookie": SECRET}):
                assert (await client.get(path, headers=headers)).status == 401
            assert (await client.get(path, params={"token": SECRET})).status == 401
            assert (await client.get(path, params={"ticket": SECRET})).status == 401
        assert (await client.post("/ticket")).status == 401
        assert (await client.get("/timeline", headers=WITH_SECRET)).status == 200


async def test_a_ticket_is_valid_once_for_a_while_and_only_with_the_secret_it_was_given_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    valid = SECRET
    page = Page(folded(), lambda: valid)
    async with served(page, ANY_PORT) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        once = await ticket(client)
        assert [(await client.get("/timeline", params=once)).status for _ in range(2)] == [200, 401]
        before = await ticket(client)
        stream = await client.get("/events", params=await ticket(client))
        assert (await sent(stream))["whole"]
        valid = "renewed"
        assert (await client.get("/timeline", params=before)).status == 401
        assert (await client.get("/timeline", headers=WITH_SECRET)).status == 401
        with anyio.fail_after(200):
            assert (await stream.content.read()).strip() == b""  # the stream of the old secret ends
        valid = SECRET
        many = [await ticket(client) for _ in range(access.MAX_TICKETS + 1)]
        assert [(await client.get("/timeline", params=each)).status for each in (many[0], many[1])] == [401, 200]
        monkeypatch.setattr(access, "TICKET_S", 0.0)
        assert (await client.get("/timeline", params=await ticket(client))).status == 401


VALUES = (b"\xff\xfe", b"Bearer \xff", b"a=\xc3\x28", b"\xed\xa0\x80", b"=;=,;", b"\x00", b"\x7f")


async def test_headers_that_are_not_utf8_are_refused() -> None:
    found = dict[tuple[bytes, bytes, bytes], bytes]()
    async with served(Page(folded(), lambda: SECRET), ANY_PORT) as port:
        for name in (b"Cookie", b"Authorization", b"Host", b"Accept", b"X"):
            for value, query in [*((value, b"") for value in VALUES), (b"a", b"?ticket=%ff"), (b"a", b"?ticket=\xff")]:
                host = b"" if name == b"Host" else b"Host: localhost\r\n"
                head = b"GET /events" + query + b" HTTP/1.1\r\n" + host + name + b": " + value + b"\r\n\r\n"
                async with await anyio.connect_tcp("127.0.0.1", port) as client:
                    await client.send(head)
                    with anyio.fail_after(200):
                        found[name, value, query] = (await client.receive()).split()[1]
    assert found[b"Cookie", b"\xff\xfe", b""] == b"401"
    assert set(found.values()) <= {b"400", b"401", b"403"}


@pytest.mark.parametrize("host", ["127.0.0.2:80", "[::1]:80", "[::1]", "localhost", "localhost:1", "127.0.0.1"])
async def test_each_loopback_address_may_serve_the_page(host: str) -> None:
    async with opened(folded()) as (_, client):
        assert (await client.get("/timeline", headers={"Host": host, **WITH_SECRET})).status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example:80", "0.0.0.0:80", ""])
async def test_a_foreign_host_gets_nothing_even_with_the_secret(host: str) -> None:
    async with opened(folded()) as (_, client):
        for path in ("/", "/events", "/static/app.js"):
            headers = {"Host": host, **WITH_SECRET}
            assert (await client.get(path, headers=headers, allow_redirects=False)).status in (400, 403)


@pytest.mark.parametrize(
    "name", ["../page.py", "..%2fpage.py", "%2e%2e/page.py", "VENDORED.toml", "/etc/passwd", "a/b"]
)
async def test_no_other_file_is_served(name: str) -> None:
    async with opened(folded()) as (_, client):
        url = URL(f"{client._base_url}/static/{name}".replace("//static", "/static"), encoded=True)
        assert (await client.get(url, headers=WITH_SECRET)).status == 404


async def sent(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The next event."""
    while not (line := await response.content.readline()).startswith(b"data: "):
        assert line, "the stream has ended"
    return msgspec.json.decode(line.removeprefix(b"data: "))


async def test_a_page_gets_all_then_what_changes() -> None:
    observed = folded()
    async with opened(observed) as (page, client):
        response = await client.get("/events", headers=WITH_SECRET)
        first = await sent(response)
        assert (first["whole"], first["now"]["step"], first["now"]["num_events"]) == (True, 2, len(LOG))
        assert [step["step"] for step in first["times"]["steps"]] == [1]
        assert first["ledger"]["books"]["issued"] == 8
        observed.problems = ["2 events cannot be decoded"]
        observed.apply(failed(7, "<script>alert(1)</script>"), len(LOG) + 1, 2000.0)
        page.changed()
        with anyio.fail_after(200):
            second = await sent(response)
        assert second["ledger"]["endings"][0]["reason"] == "<script>alert(1)</script>"
        assert second["now"]["problems"] == ["2 events cannot be decoded"]
        assert (second["whole"], [row["step"] for row in second["rows"]]) == (False, [1])  # the newest one
        response.close()


async def test_pages_that_were_closed_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.observer.page.UPDATE_EVERY_S", 0.01)
    async with opened(folded()) as (_, client):
        streams = [await client.get("/events", headers=WITH_SECRET) for _ in range(MAX_STREAMS)]
        assert (await client.get("/events", headers=WITH_SECRET)).status == 503
        for stream in streams:
            stream.close()

        async def is_free() -> bool:
            async with client.get("/events", headers=WITH_SECRET) as stream:
                return stream.status == 200

        await eventually(is_free)


async def test_a_page_shows_the_versions_that_nodes_have_recorded_when_it_is_opened() -> None:
    recorded = {"home: torch": "2.11"}
    async with opened(folded(), lambda: recorded) as (_, client):
        for num in (1, 2):
            response = await client.get("/events", headers=WITH_SECRET)
            assert len((await sent(response))["versions"]) == num
            response.close()
            recorded["other: torch"] = "2.11"  # another node joins


async def test_a_page_asks_for_the_spans_of_some_steps() -> None:
    async with opened(folded()) as (_, client):
        window = await (await client.get("/timeline", params={"last": "1", "steps": "1"}, headers=WITH_SECRET)).json()
        assert (window["first"], window["last"], window["newest"]) == (1, 1, 1)
        assert {bar[0] for bar in window["bars"]} >= {"rollout", "scores", "part"}
        for query in ({"last": "x"}, {"steps": "-1"}, {"last": "1" * 10}, {"steps": "²"}):
            assert (await client.get("/timeline", params=query, headers=WITH_SECRET)).status == 400


async def test_a_run_that_ended_is_shown_as_not_running(tmp_path: Path) -> None:
    run_dir = await make(tmp_path / RUN)
    observed = Observed(RUN, 2)
    page = Page(observed, lambda: SECRET)
    caught_up = asyncio.Event()

    def progress(_: str) -> None:
        if observed.seq == len(LOG):
            caught_up.set()

    async with opened(folded()) as (shown, client):
        shown.share_read = 0.25
        async with client.get("/events", headers=WITH_SECRET) as stream:
            assert (await sent(stream))["share_read"] == 0.25
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow, FoundRun(name=RUN, directory=run_dir), observed, page, progress, progress)
        with anyio.fail_after(200):
            await caught_up.wait()
        tasks.cancel_scope.cancel()
    assert (observed.seq, observed.steps, page.live) == (len(LOG), 2, False)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("0.0.0.0:80", "has no TLS"), ("192.0.2.1:80", "has no TLS"), ("80", "write host:port"), ("localhost:x", "write")],
)
def test_an_address_that_others_reach_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Address.of(text)


def test_loopback_addresses_are_taken() -> None:
    assert Address.of("127.0.0.1:0") == ("127.0.0.1", 0)
    assert Address.of("[::1]:8080") == ("::1", 8080)


def test_nothing_of_a_run_can_become_markup_or_code() -> None:
    script = (STATIC / "app.js").read_text()
    found = re.findall(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|setAttribute\(.on", script
    )
    assert found == []
    page = (STATIC / "index.html").read_text()
    assert "document.cookie" not in "".join(path.read_text() for path in STATIC.glob("*.js"))
    assert re.findall(r"<script(?! src=)|\son\w+=|style=|https?:", page) == []


def test_the_vendored_files_are_those_of_the_package() -> None:
    vendored = tomllib.loads((STATIC / "VENDORED.toml").read_text())
    sums = {name: hashlib.sha256((STATIC / name).read_bytes()).hexdigest() for name in vendored["sha256"]}
    assert sums == vendored["sha256"]
