"""Process that sends a run's spans to a collector by OTLP, until SIGTERM. The run starts it, and does not wait for it.

It runs in an environment of its own, which has OpenTelemetry's packages and those of the bus client. Spans wait in a
bounded queue while the collector fails; the oldest are dropped, counted and said. A process that starts again begins
after the events whose spans its predecessor had sent. Ids follow from the run and the group or step alone, so that a
span that is sent twice is the same span.
"""

import hashlib
import importlib
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import anyio
from anyio import to_thread

from actors.observer.following import followed
from actors.observer.traces import OtlpSpan, traced
from runtime.bus.errors import BusError
from runtime.node.claims.run_id import RunMismatch, id_in
from runtime.node.external_clients import ClientsUnreadable
from runtime.node.reopen import FoundRun, NoLog, find_run
from runtime.report.fold.account import Account
from runtime.report.fold.spans import Span
from runtime.util.errors import flatten
from runtime.util.exit_codes import EXIT_INPUT_ERROR, EXIT_OK
from runtime.util.files import write_atomically
from runtime.util.formatting import count_of
from runtime.util.retrying import Backoff

RUN_DIR_VARIABLE: Final = "PHYSARUM_RUN_DIR"
SENT_FILE: Final = "spans.sent"  # in the run directory: log sequence up to which all spans are sent
QUEUE: Final = 8_192  # spans
AT_ONCE: Final = 512
SDK: Final = "opentelemetry.sdk"
EXPORT_TIMEOUT_S: Final = 5.0
AGAIN: Final = Backoff(first_s=1.0, max_s=30.0)
PROBLEM_EVERY_S: Final = 60.0
READ_AGAIN_S: Final = 2.0  # after a log that cannot be read

log = logging.getLogger("opentelemetry-spans")


class Sender(Protocol):
    """Sends spans. Blocks."""

    def send(self, spans: Sequence[OtlpSpan]) -> bool:
        """Send spans; return whether the collector accepted them."""
        ...


class Queued(NamedTuple):
    """A span, and the log sequence of the event that ended it."""

    span: OtlpSpan
    seq: int


class Queue:
    """Spans on their way to the collector, in the order of the log."""

    def __init__(self, sender: Sender, sent_file: Path, *, bound: int = QUEUE) -> None:
        self.num_sent = 0
        self.num_dropped = 0
        self.fails = False  # the collector did not accept the last spans
        self._sender = sender
        self._file = sent_file
        self._bound = bound
        self._waiting: deque[Queued] = deque()
        self._added = anyio.Event()
        self._taken = anyio.Event()
        self._done_seq = sent_in(sent_file)
        self._added_seq = 0  # of the newest event whose spans are all added
        self.first_seq = self._done_seq + 1  # of the first event whose spans are sent

    async def add(self, spans: Sequence[OtlpSpan], seq: int) -> None:
        """Add the spans of an event. Wait for room while the collector accepts spans; else drop the oldest."""
        for span in spans:
            while len(self._waiting) >= self._bound and not self.fails:
                self._taken = anyio.Event()
                await self._taken.wait()
            self._waiting.append(Queued(span, seq))
        self._added_seq = seq
        self._drop()
        self._added.set()

    def _drop(self) -> None:
        while len(self._waiting) > self._bound:
            self._waiting.popleft()
            self.num_dropped += 1

    async def send(self, *, again: Backoff = AGAIN) -> None:
        """Send what is added. Never returns."""
        failures = 0
        while True:
            if not self._waiting:
                self._added = anyio.Event()
                await self._added.wait()
            if await self.send_some():
                failures = 0
                continue
            failures += 1
            await anyio.sleep(again.pause_s(failures))

    async def send_some(self) -> bool:
        """Send the oldest spans; return whether they were accepted."""
        some = [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]
        accepted = False
        with anyio.CancelScope(shield=True):  # it ends by itself
            accepted = await to_thread.run_sync(self._sender.send, [each.span for each in some])
        if accepted and self.fails:
            log.warning("the collector accepts spans again; %s dropped so far", count_of(self.num_dropped, "span"))
        elif not accepted and not self.fails:
            log.warning("the collector does not accept spans: at most %d of them wait for it", self._bound)
        self.fails = not accepted
        self._settle(some)
        return accepted

    def _settle(self, some: Sequence[Queued]) -> None:
        """Count spans as sent, or put them back if the collector did not accept them."""
        if self.fails:
            self._waiting.extendleft(reversed(some))
            self._drop()
        else:
            self.num_sent += len(some)
            self._note()
        self._taken.set()

    async def close(self, *, within_s: float) -> None:
        """Send the rest, unless the collector fails. The next start of the run sends the others.

        Args:
            within_s: seconds after which no further request begins.
        """
        deadline = time.monotonic() + within_s
        while self._waiting and time.monotonic() < deadline and await self.send_some():
            pass
        sent, dropped = count_of(self.num_sent, "span"), count_of(self.num_dropped, "span")
        log.info("%s sent, %s dropped, %d left", sent, dropped, len(self._waiting))

    def _note(self) -> None:
        """Store which spans are sent: those of all events before the oldest that waits."""
        done = self._waiting[0].seq - 1 if self._waiting else self._added_seq
        if done > self._done_seq:
            self._done_seq = done
            write_atomically(self._file, f"{done}\n".encode())


def sent_in(path: Path) -> int:
    """Return the sequence in the file of sent spans; 0 if it has none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return 0
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0


class Seldom(logging.Filter):
    """Passes what OpenTelemetry says about failed attempts once in PROBLEM_EVERY_S, and all other lines."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0  # monotonic time

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith("opentelemetry."):
            return True
        now = time.monotonic()
        passes = now >= self._next
        self._next = now + PROBLEM_EVERY_S if passes else self._next
        return passes


class Otlp:
    """Sends spans with OpenTelemetry's own exporter.

    Args:
        endpoint: URL of the collector.
        run: name of the run.
        run_id: of the run; ids of traces and spans follow from it.
    """

    def __init__(self, endpoint: str, run: str, run_id: str) -> None:
        exporters = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        sdk, resources = importlib.import_module("opentelemetry.sdk.trace"), importlib.import_module(f"{SDK}.resources")
        scopes = importlib.import_module(f"{SDK}.util.instrumentation")
        self._api = importlib.import_module("opentelemetry.trace")
        self._success: Any = importlib.import_module(f"{SDK}.trace.export").SpanExportResult.SUCCESS
        self._span: Any = sdk.ReadableSpan
        self._run_id = run_id
        about = {"service.name": "physarum", "physarum.run": run, "physarum.run_id": run_id}
        self._resource: Any = resources.Resource.create(about)
        self._scope: Any = scopes.InstrumentationScope("physarum")
        url = f"{endpoint.rstrip('/')}/v1/traces"
        self._exporter: Any = exporters.OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)

    def send(self, spans: Sequence[OtlpSpan]) -> bool:
        """Send spans; return whether the collector accepted them."""
        return self._exporter.export([self._readable(span) for span in spans]) is self._success

    def _readable(self, span: OtlpSpan) -> Any:
        api = self._api
        failed = {"status": api.Status(api.StatusCode.ERROR, span.error)} if span.error else {}
        return self._span(
            name=span.name,
            context=self._context_of(span.root, span.key),
            parent=self._context_of(span.root, span.parent) if span.parent else None,
            resource=self._resource,
            attributes=span.attributes,
            links=[api.Link(self._context_of(span.link, span.link))] if span.link else [],
            instrumentation_scope=self._scope,
            start_time=_nanoseconds(span.begin),
            end_time=_nanoseconds(span.end),
            **failed,
        )

    def _context_of(self, root: str, key: str) -> Any:
        trace_id, span_id = self._digest(root, 16), self._digest(f"span {key}", 8)
        flags = self._api.TraceFlags(self._api.TraceFlags.SAMPLED)
        return self._api.SpanContext(trace_id=trace_id, span_id=span_id, is_remote=False, trace_flags=flags)

    def _digest(self, key: str, num_bytes: int) -> int:
        return int.from_bytes(hashlib.sha256(f"{self._run_id} {key}".encode()).digest()[:num_bytes], "big")


def _nanoseconds(time: float) -> int:
    return round(time * 1e6) * 1000


async def follow(run: FoundRun, queue: Queue) -> None:
    """Fold the events of a run into spans, and add those that are not sent yet. Never returns."""
    account, next_seq = Account(reads_facts=True), 1
    while True:
        try:
            async with followed(run, from_seq=next_seq) as events:
                async for received in events:
                    ended: list[Span] = []
                    account.apply(received.message, received.unix_time, ended)
                    next_seq = received.seq + 1
                    if ended and received.seq >= queue.first_seq:
                        await queue.add([span for span in map(traced, ended) if span is not None], received.seq)
        except* (NoLog, BusError, ClientsUnreadable, OSError) as errors:
            log.warning("the log cannot be read: %s", flatten(errors)[0])
        await anyio.sleep(READ_AGAIN_S)


async def _run(endpoint: str, stop_timeout_s: float) -> None:
    run = find_run(os.environ[RUN_DIR_VARIABLE], trust=True)
    try:
        known = id_in(run.directory)
    except RunMismatch:
        known = None
    queue = Queue(Otlp(endpoint, run.name, run.name if known is None else known.id), run.directory / SENT_FILE)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow, run, queue)
        tasks.start_soon(queue.send)
        log.info("spans are sent to %s from event %d of the log on", endpoint, queue.first_seq)
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                break
        tasks.cancel_scope.cancel()
    await queue.close(within_s=stop_timeout_s / 2)  # the rest is for the requests before and after


def main(arguments: Sequence[str]) -> int:
    """Send the spans of the run in PHYSARUM_RUN_DIR to the URL in the first argument.

    The second one is the number of seconds from SIGTERM to SIGKILL.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    logging.getLogger().handlers[0].addFilter(Seldom())
    try:
        anyio.run(_run, arguments[0], float(arguments[1]))
    except ImportError as error:
        log.error("%s is missing in %s: run bin/setup --with opentelemetry", error.name, sys.executable)
        return EXIT_INPUT_ERROR
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
