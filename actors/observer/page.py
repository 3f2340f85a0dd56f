"""The page of a run: static files and server-sent events, on a loopback address. The events need its secret."""

import asyncio
import base64
import hashlib
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol, cast

import anyio
import msgspec
from aiohttp import web

from actors.observer.access import Access, Address, is_foreign
from actors.observer.health import health_of
from actors.observer.observed import Observed
from actors.observer.observing import observing
from actors.observer.samples import Samples, add_routes
from actors.observer.terminal_lines import reading_line
from runtime.bus.errors import BusError
from runtime.data.dump_files import NEWEST
from runtime.http.connections import Handler, trust
from runtime.http.connections import served as served_at
from runtime.node.claims.rundir import BUS_FILE, TOPOLOGY_FILE
from runtime.node.external_clients import ClientsUnreadable
from runtime.node.reopen import FoundRun, NoLog
from runtime.settings.reading.foreign import harmless_part
from runtime.settings.reading.schema import stored_tables
from runtime.settings.topology import Topology
from runtime.util.errors import flatten
from runtime.util.import_path import command_name

STATIC: Final = Path(__file__).parent / "static"
FILES: Final = {  # what is served, and as what; nothing else is
    "index.html": "text/html",
    "samples.js": "text/javascript",
    "app.js": "text/javascript",
    "access.js": "text/javascript",
    "health.js": "text/javascript",
    "advice.js": "text/javascript",
    "timeline.js": "text/javascript",
    "app.css": "text/css",
    "uPlot.iife.min.js": "text/javascript",
    "uPlot.min.css": "text/css",
}
SCRIPTS: Final = (
    "uPlot.iife.min.js",
    "access.js",
    "health.js",
    "advice.js",
    "timeline.js",
    "samples.js",
    "app.js",
)  # in the order in which they run
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
UPDATE_EVERY_S: Final = 1.0  # at most; a page gets what changed meanwhile together
PING_EVERY: Final = 15  # updates without a change, so that a lost page is noticed
SEND_TIMEOUT_S: Final = 30.0  # a page that takes nothing for so long is dropped; it connects again by itself
LATE_STEPS: Final = 8  # newest steps whose times a late checkpoint may change
LAST_S: Final = 3.0  # for the last events of a run that ends, and for pages to take them
MAX_STREAMS: Final = 16  # pages open at once
MAX_DIGITS: Final = 9  # of a number in a query
REPORT_STEPS: Final = 20  # newest steps whose timeline is in a report
AGAIN_S: Final = 2.0  # after a log that cannot be read
LOOK_EVERY_S: Final = 1.0  # whether a run that ended was started again


class Page:
    """The HTTP side of the page. It sends what `observed` holds, each time that `changed` was called.

    Args:
        observed: the run.
        secret: returns the one in its URL.
        settings: of the run by key.
        dumps: directory of the run's dumps, whose samples it shows; None: there are none.
        versions: returns those of what the run uses, as its nodes have recorded them by then.
    """

    def __init__(
        self,
        observed: Observed,
        secret: Callable[[], str],
        settings: Mapping[str, str] | None = None,
        dumps: Path | None = None,
        versions: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._observed = observed
        self._settings = settings or {}
        self._versions = versions
        self._access = Access(secret)
        self._changed = asyncio.Event()
        self._num_streams = 0
        self._is_closing = False
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        self._files = {name: (STATIC / name).read_bytes() for name in FILES}
        self._samples = Samples(dumps)
        self.live = False
        self.problem = ""  # why the log cannot be read
        self.share_read: float | None = None

    async def close(self) -> None:
        """Send how the run ended to all open pages, which do not take the end of their connection for it."""
        with anyio.move_on_after(LAST_S):
            while self._num_streams and self.live and not self._observed.ended:
                await self._changed.wait()
            self._is_closing = True
            self.changed()
            await self._all_closed.wait()

    def changed(self) -> None:
        """Have all pages updated."""
        before, self._changed = self._changed, asyncio.Event()
        before.set()

    def application(self) -> web.Application:
        """Return the application to serve."""
        application = web.Application(middlewares=[self._guard])
        application.router.add_get("/", self._index)
        application.router.add_get("/static/{name}", self._file)
        application.router.add_post("/ticket", self._ticket)
        application.router.add_get("/events", self._events)
        application.router.add_get("/timeline", self._timeline)
        add_routes(application, self._samples, _responded)
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse foreign hosts, and requests without the secret for what is of the run."""
        if is_foreign(request):
            return _refused(403, "This page is served to localhost and loopback addresses alone.")
        if self._access.allows(request):
            trust(request)
        elif request.path != "/" and not request.path.startswith("/static/"):
            command = command_name("watch")
            return _refused(401, f"Open the URL of this page, which has its secret: {command} RUN --url prints it.")
        return await handler(request)

    async def _ticket(self, _: web.Request) -> web.StreamResponse:
        return _responded(200, self._access.ticket().encode(), "text/plain")

    async def _index(self, _: web.Request) -> web.StreamResponse:
        return self._content("index.html")

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        return self._content(name) if name in FILES else _refused(404, "There is no such file.")

    def _content(self, name: str) -> web.Response:
        return web.Response(body=self._files[name], content_type=FILES[name], charset="utf-8", headers=HEADERS)

    async def _timeline(self, request: web.Request) -> web.StreamResponse:
        """Send the spans of some steps."""
        last, num_steps = request.query.get("last", "0"), request.query.get("steps", "1")
        if not all(text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS for text in (last, num_steps)):
            return _refused(400, "last and steps are numbers of steps.")
        window = self._observed.timeline.window(int(last), int(num_steps))
        return _responded(200, msgspec.json.encode(window), "application/json")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send all that there is, then what changes, until the page is closed."""
        if self._num_streams >= MAX_STREAMS:
            return _refused(503, f"{MAX_STREAMS} pages are open: close one.")
        self._num_streams += 1
        self._all_closed.clear()
        try:
            response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
            await response.prepare(request)
            since = from_step = 0
            secret = self._access.secret()
            while self._access.secret() == secret:
                changed = self._changed
                content = msgspec.json.encode(self._state(since, from_step))
                since, from_step = self._observed.seq, max(0, self._observed.steps - LATE_STEPS)
                await _send(response, b"data: " + content + b"\n\n")
                if self._is_closing:
                    return response
                await asyncio.sleep(UPDATE_EVERY_S)
                for num_looks in itertools.count(1):
                    with anyio.move_on_after(UPDATE_EVERY_S):
                        await changed.wait()
                    if request.transport is None or request.transport.is_closing():
                        raise ConnectionResetError  # a page that is closed counts no longer than this
                    if changed.is_set() or self._access.secret() != secret:
                        break
                    if num_looks % PING_EVERY == 0:
                        await _send(response, b": still here\n\n")
            return response  # its client has a secret that was renewed
        except (ConnectionResetError, TimeoutError):
            return web.Response(status=499)  # the page was closed
        finally:
            self._num_streams -= 1
            if not self._num_streams:
                self._all_closed.set()

    def _state(self, since: int, from_step: int) -> Mapping[str, Any]:
        shown = _state_of(
            self._observed,
            since=since,
            from_step=from_step,
            live=self.live,
            problem=self.problem,
            share_read=self.share_read,
        )
        fixed = {"settings": self._settings, "versions": self._versions()} if since == 0 else {}
        return shown | {"closing": self._is_closing, **fixed}


def _state_of(
    observed: Observed,
    *,
    since: int = 0,
    from_step: int = 0,
    live: bool,
    problem: str = "",
    share_read: float | None = None,
) -> dict[str, Any]:
    """Return what a page shows and what may change.

    Args:
        observed: the run.
        since: log sequence up to which the page has the rows; 0: it has nothing.
        from_step: first step whose times the page lacks.
        live: whether the run goes on.
        problem: why the log cannot be read.
        share_read: of the log; None: all.
    """
    return {
        "whole": since == 0,
        "live": live,
        "problem": problem,
        "share_read": share_read,
        "closing": False,
        "health": health_of(observed, live=live, problem=problem, share_read=share_read),
        "now": observed.now(),
        "ledger": observed.ledger(),
        "times": observed.times(from_step),
        "advice": observed.advice(),
        "rows": observed.curves(since),
    }


def report_page(
    observed: Observed,
    settings: Mapping[str, str],
    versions: Mapping[str, str],
    dumps: Path | None = None,
    *,
    live: bool,
    other: tuple[Observed, Mapping[str, str], Mapping[str, str]] | None = None,
) -> bytes:
    """Return one HTML file with what a page shows. It loads nothing, and runs the scripts of this package alone.

    Args:
        observed: the run.
        settings: of the run.
        versions: of what the run uses, as its nodes recorded them.
        dumps: directory of the run's dumps; None: there are none.
        live: whether the run goes on.
        other: another run to compare with, its settings and its versions.

    It has samples of the run's dumps, if this machine has them.
    """
    files = {name: (STATIC / name).read_text(encoding="utf-8") for name in FILES}
    scripts, styles = SCRIPTS, ("uPlot.min.css", "app.css")
    shown = _state_of(observed, live=live) | {"settings": settings, "versions": versions}
    shown["timeline"] = observed.timeline.window(0, REPORT_STEPS)
    shown["samples"] = Samples(dumps).report()
    if other is not None:
        run, its_settings, its_versions = other
        shown["other"] = {"run": run.run, "rows": run.curves(), "times": run.times()}
        shown["other"] |= {"settings": its_settings, "versions": its_versions}
    state = msgspec.json.encode(shown).decode().replace("<", "\\u003c")
    allowed = " ".join(f"'sha256-{_digest(files[name])}'" for name in scripts)
    styled = " ".join(f"'sha256-{_digest(files[name])}'" for name in styles)
    policy = f"default-src 'none'; script-src {allowed}; style-src {styled}; img-src data:; base-uri 'none'"
    body = files["index.html"].partition("<body>")[2].partition("</body>")[0]
    head = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">',
        "<title>Physarum</title>",
        *(f"<style>{files[name]}</style>" for name in styles),
        f"</head>\n<body>{body}",
        f'<script type="application/json" id="state">{state}</script>',
        *(f"<script>{files[name]}</script>" for name in scripts),
        "</body>\n</html>\n",
    ]
    return "\n".join(head).encode()


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def observed_of(run: FoundRun) -> tuple[Observed, dict[str, str]]:
    """Return an empty fold for a run, and its settings by key: those that are harmless, if it may be a stranger's."""
    path = run.directory / TOPOLOGY_FILE
    stored = stored_tables(path.read_bytes(), Topology) if path.exists() else {}
    settings = dict(_flat(harmless_part(stored, Topology)[0] if run.foreign else stored))
    num_steps = settings.get("train.num_steps", "")
    return Observed(run.name, int(num_steps) if num_steps.isdigit() else 0), settings


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings of a table by their full keys."""
    if isinstance(value, list) and any(isinstance(each, dict) for each in cast("list[Any]", value)):
        value = {str(index): each for index, each in enumerate(cast("list[Any]", value))}
    if isinstance(value, dict) and (value or not key):
        for name, inner in cast("dict[str, Any]", value).items():
            yield from _flat(inner, f"{key}.{name}" if key else name)
    else:
        yield key, msgspec.json.encode(value).decode()


def dump_directory(run: FoundRun, settings: Mapping[str, str]) -> Path | None:
    """Return the directory of a run's dumps, of all steps or of the newest ones; None if it writes none."""
    directory: Any = msgspec.json.decode(settings.get("run.dump_details", "null"))
    if isinstance(directory, str):
        return Path(directory)
    return run.directory / NEWEST if settings.get("observe.samples") == "true" else None


async def _send(response: web.StreamResponse, content: bytes) -> None:
    with anyio.fail_after(SEND_TIMEOUT_S):
        await response.write(content)


def _refused(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text, headers=HEADERS)


def _responded(status: int, content: bytes, content_type: str) -> web.Response:
    return web.Response(status=status, body=content, content_type=content_type, headers=HEADERS)


@asynccontextmanager
async def served(page: Page, address: Address) -> AsyncGenerator[int, None]:
    """Serve a page for the duration of a block; yield its port.

    Raises:
        OSError: the port is taken.
    """
    async with served_at(page.application(), address.host, address.port) as port:
        yield port


class Shown(Protocol):
    """What shows a fold: the page, or the view in a terminal."""

    live: bool
    problem: str  # why the log cannot be read
    share_read: float | None  # of the log; None: what it shows is the present

    def changed(self) -> None:
        """Have it drawn again."""


async def follow(
    run: FoundRun,
    observed: Observed,
    page: Shown,
    progress: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    """Fold the events of a run into what the page shows, and go on when the run is started again. Never returns.

    Args:
        run: the run.
        observed: what the page shows.
        page: told of every change.
        progress: called with what was read so far, or why the log cannot be read.
        note: called with a line per snapshot that cannot be used or written.
    """
    while True:
        started = _start_of(run)
        page.problem, page.share_read = "", 0.0
        try:
            await _follow_once(run, observed, page, progress, note)
        except* (NoLog, BusError, ClientsUnreadable, OSError) as errors:
            page.problem = str(flatten(errors)[0])
            progress(page.problem)
        page.live, page.share_read = False, None
        page.changed()
        if page.problem:
            await asyncio.sleep(AGAIN_S)
            started = -1
        while _start_of(run) == started:  # noqa: ASYNC110 - another process writes the file: there is no event
            await asyncio.sleep(LOOK_EVERY_S)


async def _follow_once(
    run: FoundRun,
    observed: Observed,
    page: Shown,
    progress: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    async with observing(run, observed, note=note) as folding:
        async for _ in folding.batches():
            page.live, page.share_read = folding.events.live, folding.share_read
            page.changed()
            read = f"{observed.num_events:,} events read, step {observed.steps}"
            progress(read if page.share_read is None else f"{reading_line(page.share_read)}: {read}")
            await asyncio.sleep(0)  # requests get their turn between two batches of a long history


def _start_of(run: FoundRun) -> int:
    """Return what changes when a node daemon starts the run."""
    try:
        return (run.directory / BUS_FILE).stat().st_mtime_ns
    except OSError:
        return 0
