"""The queue of spans: in order, bounded, without waiting for a collector that fails, and sent once."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest

from actors.observer import otlp
from actors.observer.otlp import AT_ONCE, RUN_DIR_VARIABLE, Queue, sent_in
from actors.observer.traces import OtlpSpan
from runtime.node.claims.rundir import BUS_FILE
from runtime.util.exit_codes import EXIT_INPUT_ERROR
from runtime.util.retrying import Backoff
from tests.fixtures.nats import eventually

pytestmark = pytest.mark.anyio

AT_ONCE_AGAIN = Backoff(first_s=0.001, max_s=0.001)


class Collector:
    """A sender that accepts spans, or not."""

    def __init__(self, *, accepts: bool) -> None:
        self.accepts = accepts
        self.late_s = 0.0
        self.got: list[str] = []
        self.num_calls = 0

    def send(self, spans: Sequence[OtlpSpan]) -> bool:
        self.num_calls += 1
        self.late_s += 1000.0  # on the clock of the one test that sets it
        if self.accepts:
            self.got += [span.key for span in spans]
        return self.accepts


def span(number: int) -> OtlpSpan:
    return OtlpSpan(root="r", key=str(number), name="n", begin=0.0, end=1.0)


async def fill(queue: Queue, *numbers: int) -> None:
    for number in numbers:
        await queue.add([span(number)], number)


async def test_all_spans_arrive_in_order_and_the_reader_waits_for_room(tmp_path: Path) -> None:
    collector = Collector(accepts=True)
    queue = Queue(collector, tmp_path / "sent", bound=10)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(queue.send)
        with anyio.fail_after(200):
            await fill(queue, *range(1, 101))
        tasks.cancel_scope.cancel()
    await queue.close(within_s=50)
    assert collector.got == [str(number) for number in range(1, 101)]
    assert (queue.num_sent, queue.num_dropped, sent_in(tmp_path / "sent")) == (100, 0, 100)


async def test_while_the_collector_fails_the_oldest_are_dropped_counted_and_said(
    tmp_path: Path, logged: list[logging.LogRecord]
) -> None:
    collector = Collector(accepts=False)
    queue = Queue(collector, tmp_path / "sent", bound=10)
    await fill(queue, *range(1, 11))
    assert not await queue.send_some()
    with anyio.fail_after(200):
        await fill(queue, *range(11, 31))  # nobody sends: it does not wait
    assert (queue.num_dropped, sent_in(tmp_path / "sent")) == (20, 0)
    collector.accepts = True
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: queue.send(again=AT_ONCE_AGAIN))
        with anyio.fail_after(200):
            await eventually(lambda: len(collector.got) == 10)
        tasks.cancel_scope.cancel()
    assert collector.got == [str(number) for number in range(21, 31)]
    assert [record.getMessage() for record in logged] == [
        "the collector does not accept spans: at most 10 of them wait for it",
        "the collector accepts spans again; 20 spans dropped so far",
    ]


async def test_a_later_process_begins_after_what_is_sent(tmp_path: Path) -> None:
    file, collector = tmp_path / "sent", Collector(accepts=True)
    queue = Queue(collector, file, bound=2 * AT_ONCE)
    await queue.add([span(number) for number in range(AT_ONCE - 1)], 4)
    await queue.add([span(number) for number in range(2)], 5)  # its spans are sent with two requests
    assert await queue.send_some()
    assert sent_in(file) == 4
    assert Queue(collector, file).first_seq == 5
    await queue.close(within_s=50)
    assert Queue(collector, file).first_seq == 6
    for text in ("", "x", "-1", "9" * 30):
        file.write_text(text)
        assert Queue(collector, file).first_seq == 1


async def test_at_the_end_a_collector_that_fails_is_asked_once(tmp_path: Path) -> None:
    collector = Collector(accepts=False)
    queue = Queue(collector, tmp_path / "sent")
    await fill(queue, 1, 2)
    await queue.close(within_s=50)
    assert (collector.num_calls, queue.num_sent, Queue(collector, tmp_path / "sent").first_seq) == (1, 0, 1)


async def test_no_request_begins_after_the_deadline_of_the_end(
    tmp_path: Path, logged: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    collector, monotonic = Collector(accepts=True), time.monotonic
    monkeypatch.setattr(otlp, "time", SimpleNamespace(monotonic=lambda: monotonic() + collector.late_s))
    queue = Queue(collector, tmp_path / "sent")
    await fill(queue, *range(1, 3 * AT_ONCE + 1))
    await queue.close(within_s=500)
    assert (collector.num_calls, queue.num_sent) == (1, AT_ONCE)
    assert logged[-1].getMessage() == "512 spans sent, 0 spans dropped, 1024 left"


@pytest.mark.parametrize(
    ("seconds", "code", "problem"),
    [("2.5", EXIT_INPUT_ERROR, "run bin/setup --with opentelemetry"), ("soon", 1, "to float: 'soon'")],
)
def test_the_process_reads_its_arguments_before_it_looks_for_the_packages(
    tmp_path: Path, seconds: str, code: int, problem: str
) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / BUS_FILE).touch()
    command = [sys.executable, "-m", "actors.observer.otlp", "http://127.0.0.1:1", seconds]  # without the packages
    environment = {**os.environ, RUN_DIR_VARIABLE: str(tmp_path / "r")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert (done.returncode, problem in done.stderr) == (code, True), done.stderr
