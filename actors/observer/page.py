"""The page of a run: static files and server-sent events, on a loopback address, for holders of its token."""

import asyncio
import base64
import hashlib
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, cast

import anyio
import msgspec
from aiohttp import web

from actors.observer.samples import TOKENIZER_FILE, Samples, add_routes
from actors.observer.stored_samples import StoredSamples
from runtime.bus.addresses import host_port
from runtime.bus.errors import BusError
from runtime.node.claims.rundir import BUS_FILE, TOPOLOGY_FILE
from runtime.node.external_clients import ClientsUnreadable
from runtime.node.observing import observing
from runtime.node.reopen import FoundRun, NoLog
from runtime.report.observed import Observed
from runtime.settings.placement import is_loopback
from runtime.util.errors import flatten

STATIC: Final = Path(__file__).parent / "static"
FILES: Final = {  # what is served, and as what; nothing else is
    "index.html": "text/html",
    "samples.js": "text/javascript",
    "app.js": "text/javascript",
    "advice.js": "text/javascript",
    "timeline.js": "text/javascript",
    "app.css": "text/css",
    "uPlot.iife.min.js": "text/javascript",
    "uPlot.min.css": "text/css",
}
SCRIPTS: Final = (
    "uPlot.iife.min.js",
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
    "Cache-Control": "no-store",
}
DIGEST_CHARS: Final = 16  # of the token, in the name of its cookie
UPDATE_EVERY_S: Final = 1.0  # at most; a page gets what changed meanwhile together
PING_EVERY_S: Final = 15.0  # without a change, so that a lost page is noticed
SEND_TIMEOUT_S: Final = 30.0  # a page that takes nothing for so long is dropped; it connects again by itself
LATE_STEPS: Final = 8  # newest steps whose times a late checkpoint may change
MAX_STREAMS: Final = 16  # pages open at once
MAX_DIGITS: Final = 9  # of a number in a query
REPORT_STEPS: Final = 20  # newest steps whose timeline is in a report
AGAIN_S: Final = 2.0  # after a log that cannot be read
LOOK_EVERY_S: Final = 1.0  # whether a run that ended was started again

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Address(NamedTuple):
    """Where a page is served."""

    host: str
    port: int  # 0: any free one

    @classmethod
    def of(cls, text: str) -> "Address":
        """Read `host:port`.

        Raises:
            ValueError: it is not such an address, or other machines could reach it.
        """
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"{text!r} is not an address: write host:port, such as 127.0.0.1:0 (any free port)")
        if not is_loopback(host):
            raise ValueError(
                f"{text!r}: the page has no TLS, so it is served on this machine alone, such as on 127.0.0.1:0; from "
                "another machine reach it with ssh -L"
            )
        return cls(host, int(port))

    def url(self, port: int) -> str:
        """Return the URL of a page at this address that got a port."""
        return f"http://{host_port(self.host, port)}"


class Page:
    """The HTTP side of the page. It sends what `observed` holds, each time that `changed` was called.

    Args:
        observed: the run.
        token: of its URL.
        settings: of the run by key.
        stored: samples that the run's server still stores; None: the page must not show them.
        versions: returns those of what the run uses, as its nodes have recorded them by then.
    """

    def __init__(
        self,
        observed: Observed,
        token: str,
        settings: Mapping[str, str] | None = None,
        stored: StoredSamples | None = None,
        versions: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._observed = observed
        self._settings = settings or {}
        self._versions = versions
        self._token = token
        digest = hashlib.sha256(token.encode()).hexdigest()
        self.cookie = f"physarum-{digest[:DIGEST_CHARS]}"  # pages of other runs on this machine get it too
        self._changed = asyncio.Event()
        self._num_streams = 0
        self._files = {name: (STATIC / name).read_bytes() for name in FILES}
        model = _text_of(self._settings, "model.hf_checkpoint")
        tokenizer = None if model is None else Path(model) / TOKENIZER_FILE
        self._samples = Samples(dump_directory(self._settings), stored, tokenizer)
        self.live = False
        self.problem = ""  # why the log cannot be read

    def changed(self) -> None:
        """Have all pages updated."""
        before, self._changed = self._changed, asyncio.Event()
        before.set()

    def application(self) -> web.Application:
        """Return the application to serve."""
        application = web.Application(middlewares=[self._guard])
        application.router.add_get("/", self._index)
        application.router.add_get("/static/{name}", self._file)
        application.router.add_get("/events", self._events)
        application.router.add_get("/timeline", self._timeline)
        add_routes(application, self._samples, _responded)
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse foreign hosts, which a foreign page may have pointed here, and requests without the token."""
        if not is_loopback(_host_of(request.host)):
            return _refused(403, "This page is served to localhost and loopback addresses alone.")
        given = request.query.get("token")
        if request.path == "/" and given is not None:
            if not self._is_token(given):
                return _refused(403, "This is not the token of this page: open the URL that the command printed.")
            response = web.Response(status=303, headers={**HEADERS, "Location": "/"})
            response.set_cookie(self.cookie, self._token, httponly=True, samesite="Strict", path="/")
            return response
        if not self._is_token(request.cookies.get(self.cookie, "")):
            return _refused(401, "Open the URL that the command printed: it has the token of this page.")
        return await handler(request)

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())

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
        try:
            response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
            await response.prepare(request)
            since = from_step = 0
            while True:
                changed = self._changed
                content = msgspec.json.encode(self._state(since, from_step))
                since, from_step = self._observed.seq, max(0, self._observed.steps - LATE_STEPS)
                await _send(response, b"data: " + content + b"\n\n")
                await asyncio.sleep(UPDATE_EVERY_S)
                while not changed.is_set():
                    with anyio.move_on_after(PING_EVERY_S):
                        await changed.wait()
                    if not changed.is_set():
                        await _send(response, b": still here\n\n")
        except (ConnectionResetError, TimeoutError):
            return web.Response(status=499)  # the page was closed
        finally:
            self._num_streams -= 1

    def _state(self, since: int, from_step: int) -> Mapping[str, Any]:
        shown = _state_of(self._observed, since=since, from_step=from_step, live=self.live)
        fixed = {"settings": self._settings, "versions": self._versions()} if since == 0 else {}
        return shown | {"problem": self.problem, **fixed}


def _state_of(observed: Observed, *, since: int = 0, from_step: int = 0, live: bool) -> dict[str, Any]:
    """Return what a page shows and what may change.

    Args:
        observed: the run.
        since: log sequence up to which the page has the rows; 0: it has nothing.
        from_step: first step whose times the page lacks.
        live: whether the run goes on.
    """
    return {
        "whole": since == 0,
        "live": live,
        "problem": "",
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
    *,
    live: bool,
    other: tuple[Observed, Mapping[str, str], Mapping[str, str]] | None = None,
) -> bytes:
    """Return one HTML file with what a page shows. It loads nothing, and runs the scripts of this package alone.

    Args:
        observed: the run.
        settings: of the run.
        versions: of what the run uses, as its nodes recorded them.
        live: whether the run goes on.
        other: another run to compare with, its settings and its versions.

    It has samples of the run's dumps, if this machine has them.
    """
    files = {name: (STATIC / name).read_text(encoding="utf-8") for name in FILES}
    scripts, styles = SCRIPTS, ("uPlot.min.css", "app.css")
    shown = _state_of(observed, live=live) | {"settings": settings, "versions": versions}
    shown["timeline"] = observed.timeline.window(0, REPORT_STEPS)
    shown["samples"] = Samples(dump_directory(settings)).report()
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
    """Return an empty fold for a run, and its settings by key."""
    path = run.directory / TOPOLOGY_FILE
    stored: Any = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
    settings = dict(_flat(stored))
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


def dump_directory(settings: Mapping[str, str]) -> Path | None:
    """Return the directory of a run's dumps; None if it writes none."""
    directory = _text_of(settings, "run.dump_details")
    return None if directory is None else Path(directory)


def stored_samples(run: FoundRun, settings: Mapping[str, str]) -> StoredSamples | None:
    """Return what reads the samples that a run's server still stores.

    None: the run has dumps, or its settings do not allow it.
    """
    is_wanted = settings.get("observe.samples") == "true" and dump_directory(settings) is None
    return StoredSamples(run) if is_wanted else None


def _text_of(settings: Mapping[str, str], key: str) -> str | None:
    stored: Any = msgspec.json.decode(settings.get(key, "null"))
    return stored if isinstance(stored, str) else None


def _host_of(header: str) -> str:
    """Return the host of a Host header, without its port."""
    host, colon, port = header.rpartition(":")
    return host if colon and port.isdigit() else header


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
    runner = web.AppRunner(page.application(), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        site = web.TCPSite(runner, address.host, address.port)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        with anyio.CancelScope(shield=True):
            await runner.cleanup()


class Shown(Protocol):
    """What shows a fold: the page, or the view in a terminal."""

    live: bool
    problem: str  # why the log cannot be read

    def changed(self) -> None:
        """Have it drawn again."""


async def follow(
    run: FoundRun,
    observed: Observed,
    page: Shown,
    progress: Callable[[str], None],
    note: Callable[[str], None],
    stored: StoredSamples | None = None,
) -> None:
    """Fold the events of a run into what the page shows, and go on when the run is started again. Never returns.

    Args:
        run: the run.
        observed: what the page shows.
        page: told of every change.
        progress: called with what was read so far, or why the log cannot be read.
        note: called with a line per snapshot that cannot be used or written.
        stored: gets the events too.
    """
    while True:
        started = _start_of(run)
        page.problem = ""
        try:
            await _follow_once(run, observed, page, progress, note, stored)
        except* (NoLog, BusError, ClientsUnreadable, OSError) as errors:
            page.problem = str(flatten(errors)[0])
            progress(page.problem)
        page.live = False
        if stored is not None:
            stored.live = False
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
    stored: StoredSamples | None,
) -> None:
    async with observing(run, observed, note=note) as folding:
        async for batch in folding.batches():
            if stored is not None:
                stored.live = folding.events.live
                for received in batch:
                    stored.take(received.message, received.seq)
            page.live = folding.events.live
            page.changed()
            progress(f"{observed.num_events:,} events read, step {observed.steps}")
            await asyncio.sleep(0)  # requests get their turn between two batches of a long history


def _start_of(run: FoundRun) -> int:
    """Return what changes when a node daemon starts the run."""
    try:
        return (run.directory / BUS_FILE).stat().st_mtime_ns
    except OSError:
        return 0


def new_token() -> str:
    """Return a random token for one page."""
    return secrets.token_urlsafe(24)
