"""The page and /metrics of a run, as processes: what another user of the machine gets, and what a flood costs."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import aiohttp
import anyio
import pytest

from actors.observer.page import STATIC
from runtime.bus.addresses import NODE_VARIABLE
from runtime.node.page_url import url_in
from runtime.node.supervisor.ports import free_port
from runtime.settings.tables.observe import PAGE_FILE
from tests.bin.test_ledger import ROOT, RUN, make
from tests.fixtures.nats import eventually
from tests.support.other_user import open_directory

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

DESCRIPTORS: Final = 1024
FEW: Final = 200
HALF_OPEN: Final = 2000
FLOOD: Final = r"""
import resource, select, socket, sys, time
number, *ports = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (4 * number, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
polled, known = select.epoll(), {}

def begin(port):
    client = socket.socket()
    client.setblocking(False)
    client.connect_ex(("127.0.0.1", port))
    known[client.fileno()] = client, port
    polled.register(client, select.EPOLLOUT | select.EPOLLRDHUP)

for _ in range(number // len(ports)):
    for port in ports:
        begin(port)
print("begun", flush=True)
renewed = 0
while True:
    for descriptor, events in polled.poll():
        client, port = known[descriptor]
        if events & (select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP):
            del known[descriptor]
            client.close()
            begin(port)
            renewed += 1
            if renewed % 1000 == 0:
                print(renewed, flush=True)
        else:
            client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
            polled.modify(descriptor, select.EPOLLRDHUP)
"""
OTHER_USER: Final = r"""
import encodings.idna, json, os, sys, urllib.error, urllib.request
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
page, metrics, *files = sys.argv[1:]
answers = {}
for path in ("", "static/app.js", "events", "timeline", "samples?limit=1", "samples/group?group=1", "ticket"):
    for name, headers in ("", {}), ("guess", {"Authorization": "Bearer guess"}), ("cookie", {"Cookie": "token=guess"}):
        try:
            asked = urllib.request.Request(page + path, headers=headers, method="POST" if path == "ticket" else "GET")
            answer = urllib.request.urlopen(asked, timeout=200)
            answers[f"{path} {name}".strip()] = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            answers[f"{path} {name}".strip()] = error.code, error.read().decode()
answers["/metrics"] = 200, urllib.request.urlopen(metrics, timeout=200).read().decode()
for file in files:
    try:
        open(file).close()
        answers[file] = 200, ""
    except PermissionError:
        answers[file] = 403, ""
print(json.dumps(answers))
"""


class Doors:
    """A page and an exporter of a run that has ended."""

    def __init__(self, run_dir: Path, metrics: str, logs: list[Path]) -> None:
        self.page = run_dir / PAGE_FILE
        self.metrics = metrics
        self.logs = logs

    @property
    def place(self) -> str:
        return url_in(self.page).partition("#")[0]

    async def ask(self) -> tuple[int, int, int]:
        """Get the page, its first event, and /metrics, each on a new connection, as their owner does."""
        timeout = aiohttp.ClientTimeout(total=30)
        place, _, secret = url_in(self.page).partition("#token=")
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as client:
            page = await client.get(place)
            ticket = await client.post(f"{place}ticket", headers={"Authorization": f"Bearer {secret}"})
            events = await client.get(f"{place}events", params={"ticket": await ticket.text()})
            assert (await events.content.readany()).startswith(b"data: ")
            events.close()
            metrics = await client.get(self.metrics)
            assert "physarum_exporter_caught_up" in await metrics.text()
            return page.status, events.status, metrics.status

    def log_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.logs)


@contextmanager
def process(log: Path, *command: str, env: dict[str, str], limit: int) -> Generator[subprocess.Popen[bytes]]:
    limited = ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", sys.executable, "-P", *command]
    with log.open("wb") as file, subprocess.Popen(limited, env=env, stdout=file, stderr=file, cwd=ROOT) as started:
        try:
            yield started
        finally:
            started.terminate()


@contextmanager
def lines_of(command: list[str]) -> Generator[Callable[[], str]]:
    """Run a command, and yield what reads its next line."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            yield started.stdout.readline
        finally:
            started.kill()


@asynccontextmanager
async def doors(directory: Path, limit: int = DESCRIPTORS) -> AsyncGenerator[Doors]:
    run_dir, port = await make(directory / RUN), free_port()
    env = {**os.environ, "PHYSARUM_RUN_DIR": str(run_dir), "PHYSARUM_RUN": RUN, NODE_VARIABLE: "n0"}
    logs = [directory / "page.log", directory / "metrics.log"]
    exporter = "-m", "actors.observer.exporter", f"127.0.0.1:{port}", "log"
    page = "-m", "actors.observer", "127.0.0.1:0"
    with process(logs[0], *page, env=env, limit=limit), process(logs[1], *exporter, env=env, limit=limit):
        found = Doors(run_dir, f"http://127.0.0.1:{port}/metrics", logs)

        async def answers() -> bool:
            try:
                async with aiohttp.ClientSession() as client:
                    return (await client.get(found.metrics)).status == 200 and found.page.exists()
            except (OSError, aiohttp.ClientError):
                return False

        await eventually(answers)
        yield found


@pytest.mark.parametrize("descriptors", [DESCRIPTORS, FEW])
async def test_two_thousand_half_open_requests_leave_the_owner_room(tmp_path: Path, descriptors: int) -> None:
    async with doors(tmp_path, descriptors) as found:
        before = found.log_bytes()
        ports = [url.rpartition(":")[2].partition("/")[0] for url in (found.place, found.metrics)]
        with lines_of([sys.executable, "-c", FLOOD, str(HALF_OPEN), *ports]) as line:
            assert await anyio.to_thread.run_sync(line) == "begun\n"
            for _ in range(3):
                assert await anyio.to_thread.run_sync(line) != ""  # some are renewed
                assert await found.ask() == (200, 200, 200)
        assert found.log_bytes() - before < 100_000


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_of_the_machine_gets_nothing_of_the_run() -> None:
    with open_directory() as directory:
        async with doors(directory) as found:
            secret = url_in(found.page).rpartition("=")[2]
            run_dir = found.page.parent
            private = [found.page, run_dir, *(path for path in run_dir.rglob("*") if path.is_file())]
            command = [sys.executable, "-I", "-S", "-c", OTHER_USER, found.place, found.metrics, *map(str, private)]
            done = await anyio.run_process(command, cwd="/", stderr=None)
    answers = json.loads(done.stdout)
    open_to_all = {name: text for name, (status, text) in answers.items() if status == 200}
    assert {name.partition(" ")[0] for name in open_to_all} == {"", "guess", "cookie", "static/app.js", "/metrics"}
    assert {status for status, _ in answers.values()} == {200, 401, 403}
    for text in (text for _, text in answers.values()):
        assert secret not in text
    assert open_to_all[""] == (STATIC / "index.html").read_text()
