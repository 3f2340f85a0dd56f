"""The secret of the page in Chromium: it works in all tabs of its owner, and no other server of the address sees it."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream

from actors.observer.access import Address
from actors.observer.observed import Observed
from actors.observer.page import Page, served
from runtime.node.page_url import PageUrl, renew
from runtime.settings.tables.observe import PAGE_FILE
from tests.page.chromium import needs_chromium, visited
from tests.support.log_of_a_run import LOG

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.xdist_group("chromium")]

# What another user's server sends: it asks the page for all it has, in each way that a page of another origin can.
FOREIGN = b"""<!doctype html><meta charset="utf-8"><title>foreign</title><body><script>
(async () => {
  const origin = location.search.slice(1);
  window.found = { cookie: document.cookie, storage: sessionStorage.length, answers: [] };
  for (const path of origin ? ["", "events", "timeline", "samples", "ticket", "static/app.js"] : []) {
    for (const mode of ["cors", "no-cors"]) {
      try {
        const method = path === "ticket" ? "POST" : "GET";
        const answer = await fetch(origin + path, { credentials: "include", mode, method });
        window.found.answers.push([path, mode, answer.type, await answer.text()]);
      } catch (error) {
        window.found.answers.push([path, mode, "failed", ""]);
      }
    }
  }
  const channel = new BroadcastChannel("physarum");
  channel.onmessage = (message) => { window.found.told = message.data; };
  channel.postMessage({ asks: true });
  for (const name of ["iframe", "img", "script"]) {
    const element = document.createElement(name);
    element.src = origin || "about:blank";
    document.body.append(element);
  }
  await new Promise((resolve) => setTimeout(resolve, 1000));
  window.done = true;
})();
</script>"""


@asynccontextmanager
async def listening(handle: Callable[[ByteStream], Awaitable[None]]) -> AsyncGenerator[int]:
    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(listener.serve, handle)
        yield listener.extra(anyio.abc.SocketAttribute.local_port)
        tasks.cancel_scope.cancel()


async def test_the_owner_reads_the_page_everywhere_and_a_server_on_another_port_sees_no_secret(tmp_path: Path) -> None:
    needs_chromium()
    heads, found = list[str](), dict[str, Any]()

    async def foreign(stream: ByteStream) -> None:
        async with stream:
            heads.append((await stream.receive()).decode("latin-1"))
            size = f"Content-Length: {len(FOREIGN)}"
            head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n{size}\r\n\r\n"
            await stream.send(head.encode() + FOREIGN)

    observed = Observed("r", 2)
    for seq, event in enumerate(LOG, 1):
        observed.apply(event, seq, 1000.0 + seq)
    url = PageUrl(tmp_path / PAGE_FILE)
    secrets = [url.secret()]

    async def forward(stream: ByteStream) -> None:
        """As ssh -L does."""

        async def copy(source: ByteStream, sink: ByteStream) -> None:
            async for some in source:
                await sink.send(some)
            await sink.send_eof()

        async with stream, await anyio.connect_tcp("127.0.0.1", port) as onward, anyio.create_task_group() as tasks:
            tasks.start_soon(copy, stream, onward)
            tasks.start_soon(copy, onward, stream)

    async def renew_once_opened() -> None:
        while not (tmp_path / "opened").exists():  # noqa: ASYNC110 - another process writes it
            await anyio.sleep(0.05)
        renewed = renew(url.path)
        secrets.append(renewed.rpartition("=")[2])
        (tmp_path / "partial").write_text(renewed)
        (tmp_path / "partial").rename(tmp_path / "renewed")

    async with (
        served(Page(observed, url.secret), Address("127.0.0.1", 0)) as port,
        listening(foreign) as other,
        listening(forward) as tunnel,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(renew_once_opened)
        places = [f"http://127.0.0.1:{number}" for number in (tunnel, other)]
        arguments = url.write(f"http://127.0.0.1:{port}"), *places, str(tmp_path / "renewed")
        found = await visited("owner.py", *arguments)
    assert found["address"] == f"http://127.0.0.1:{port}/"  # not in the history either
    assert found["cookies"] == []
    assert found["opened"] == ["", "", 0, True]
    assert found["navigated"] == ["", "", 0, True]
    assert "told" not in found["foreign"]
    answers: list[tuple[str, str, str, str]] = found["foreign"]["answers"]
    assert {kind for _, _, kind, _ in answers} == {"failed"}
    assert len(heads) >= 3
    assert len(set(secrets)) == 2
    for secret in secrets:
        assert secret not in "".join(heads)
        assert secret not in str(found)
    assert not [head for head in heads if "cookie:" in head.lower() or f":{port}" in head.partition("referer:")[2]]
