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
from aiohttp import DummyCookieJar
from yarl import URL

from actors.observer.page import FILES, STATIC, Address, Page, follow, new_token, served
from runtime.node.reopen import FoundRun
from runtime.report.observed import Observed
from tests.bin.test_ledger import RUN, make
from tests.build.events import failed
from tests.support.log_of_a_run import LOG

pytestmark = pytest.mark.anyio

TOKEN = new_token()
COOKIE = Page(Observed(RUN), TOKEN).cookie
ANY_PORT = Address("127.0.0.1", 0)


@asynccontextmanager
async def opened(
    observed: Observed, versions: Callable[[], Mapping[str, str]] = dict
) -> AsyncGenerator[tuple[Page, aiohttp.ClientSession]]:
    page = Page(observed, TOKEN, versions=versions)
    async with (
        served(page, ANY_PORT) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}", cookie_jar=DummyCookieJar()) as client,
    ):
        yield page, client


def folded() -> Observed:
    observed = Observed(RUN, 2)
    for seq, event in enumerate(LOG, 1):
        observed.apply(event, seq, 1000.0 + seq)
    return observed


async def test_the_token_of_the_url_becomes_a_cookie_and_all_else_needs_it() -> None:
    with_cookie = {"Cookie": f"{COOKIE}={TOKEN}"}
    async with opened(folded()) as (_, client):
        first = await client.get("/", params={"token": TOKEN}, allow_redirects=False)
        assert (first.status, first.headers["Location"]) == (303, "/")
        assert first.headers["Set-Cookie"] == f"{COOKIE}={TOKEN}; HttpOnly; Path=/; SameSite=Strict"
        page = await client.get("/", headers=with_cookie)
        assert page.status == 200
        policy = page.headers["Content-Security-Policy"]
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        for name in FILES:
            assert (await client.get(f"/static/{name}", headers=with_cookie)).status == 200
        for path in ("/", "/events", "/timeline", *(f"/static/{name}" for name in FILES)):
            assert (await client.get(path)).status == 401
            assert (await client.get(path, headers={"Cookie": f"{COOKIE}=guess"})).status == 401
        assert (await client.get("/", params={"token": "guess"}, allow_redirects=False)).status == 403


async def test_pages_on_one_machine_have_cookies_of_their_own() -> None:
    jar = aiohttp.CookieJar(unsafe=True)  # it keeps cookies of an address, which ignore the port
    pages = [Page(folded(), new_token()) for _ in range(2)]
    async with (
        served(pages[0], ANY_PORT) as one,
        served(pages[1], ANY_PORT) as two,
        aiohttp.ClientSession(cookie_jar=jar) as client,
    ):
        for port, page in ((one, pages[0]), (two, pages[1])):
            assert (await client.get(f"http://127.0.0.1:{port}/", params={"token": page._token})).status == 200
        assert [(await client.get(f"http://127.0.0.1:{port}/")).status for port in (one, two)] == [200, 200]


@pytest.mark.parametrize("host", ["127.0.0.2:80", "[::1]:80", "[::1]", "localhost", "localhost:1", "127.0.0.1"])
async def test_each_loopback_address_may_serve_the_page(host: str) -> None:
    async with opened(folded()) as (_, client):
        assert (await client.get("/", headers={"Host": host, "Cookie": f"{COOKIE}={TOKEN}"})).status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example:80", "0.0.0.0:80", ""])
async def test_a_foreign_host_gets_nothing_even_with_the_token(host: str) -> None:
    async with opened(folded()) as (_, client):
        for path in ("/", f"/?token={TOKEN}", "/events", "/static/app.js"):
            headers = {"Host": host, "Cookie": f"{COOKIE}={TOKEN}"}
            assert (await client.get(path, headers=headers, allow_redirects=False)).status in (400, 403)


@pytest.mark.parametrize(
    "name", ["../page.py", "..%2fpage.py", "%2e%2e/page.py", "VENDORED.toml", "/etc/passwd", "a/b"]
)
async def test_no_other_file_is_served(name: str) -> None:
    async with opened(folded()) as (_, client):
        url = URL(f"{client._base_url}/static/{name}".replace("//static", "/static"), encoded=True)
        assert (await client.get(url, headers={"Cookie": f"{COOKIE}={TOKEN}"})).status == 404


async def sent(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The next event."""
    while not (line := await response.content.readline()).startswith(b"data: "):
        assert line, "the stream has ended"
    return msgspec.json.decode(line.removeprefix(b"data: "))


async def test_a_page_gets_all_then_what_changes() -> None:
    observed = folded()
    async with opened(observed) as (page, client):
        response = await client.get("/events", headers={"Cookie": f"{COOKIE}={TOKEN}"})
        first = await sent(response)
        assert (first["whole"], first["now"]["step"], first["now"]["num_events"]) == (True, 2, len(LOG))
        assert [step["step"] for step in first["times"]["steps"]] == [1]
        assert first["ledger"]["books"]["issued"] == 8
        observed.problems = ["2 events cannot be decoded"]
        observed.apply(failed(7, "<script>alert(1)</script>"), len(LOG) + 1, 2000.0)
        page.changed()
        with anyio.fail_after(50):
            second = await sent(response)
        assert second["ledger"]["endings"][0]["reason"] == "<script>alert(1)</script>"
        assert second["now"]["problems"] == ["2 events cannot be decoded"]
        assert (second["whole"], [row["step"] for row in second["rows"]]) == (False, [1])  # the newest one
        response.close()


async def test_a_page_shows_the_versions_that_nodes_have_recorded_when_it_is_opened() -> None:
    recorded = {"home: torch": "2.11"}
    async with opened(folded(), lambda: recorded) as (_, client):
        for num in (1, 2):
            response = await client.get("/events", headers={"Cookie": f"{COOKIE}={TOKEN}"})
            assert len((await sent(response))["versions"]) == num
            response.close()
            recorded["other: torch"] = "2.11"  # another node joins


async def test_a_page_asks_for_the_spans_of_some_steps() -> None:
    headers = {"Cookie": f"{COOKIE}={TOKEN}"}
    async with opened(folded()) as (_, client):
        window = await (await client.get("/timeline", params={"last": "1", "steps": "1"}, headers=headers)).json()
        assert (window["first"], window["last"], window["newest"]) == (1, 1, 1)
        assert {bar[0] for bar in window["bars"]} >= {"rollout", "scores", "train"}
        for query in ({"last": "x"}, {"steps": "-1"}, {"last": "1" * 10}, {"steps": "²"}):
            assert (await client.get("/timeline", params=query, headers=headers)).status == 400


async def test_a_run_that_ended_is_shown_as_not_running(tmp_path: Path) -> None:
    run_dir = await make(tmp_path / RUN)
    observed = Observed(RUN, 2)
    page = Page(observed, TOKEN)
    caught_up = asyncio.Event()

    def progress(_: str) -> None:
        if observed.seq == len(LOG):
            caught_up.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow, FoundRun(name=RUN, directory=run_dir), observed, page, progress, progress)
        with anyio.fail_after(30):
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
    assert re.findall(r"<script(?! src=)|\son\w+=|style=|https?:", page) == []


def test_the_vendored_files_are_those_of_the_package() -> None:
    vendored = tomllib.loads((STATIC / "VENDORED.toml").read_text())
    sums = {name: hashlib.sha256((STATIC / name).read_bytes()).hexdigest() for name in vendored["sha256"]}
    assert sums == vendored["sha256"]
