"""Spans of real runs, which rotel, a collector of others, passes on; and collectors that refuse or hang."""

import json
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.audit import audit
from tests.chaos.harness import Run
from tests.fixtures.nats import eventually
from tests.support.extra_packages import installed
from tests.support.prometheus_text import free_address
from tests.support.trackers import tracker_python

pytestmark = [pytest.mark.observe, pytest.mark.anyio, pytest.mark.timeout(900)]

BACKEND = """
import gzip, http.server, json, sys
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

class Backend(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        assert self.path == "/v1/traces", self.path
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                values = {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
                links = [[link.trace_id.hex(), link.span_id.hex()] for link in span.links]
                ids = {"trace": span.trace_id.hex(), "span": span.span_id.hex(), "parent": span.parent_span_id.hex()}
                times = {"begin": span.start_time_unix_nano, "end": span.end_time_unix_nano}
                facts = {"run": names["physarum.run"], "name": span.name, "values": values, "links": links}
                print(json.dumps({**facts, **ids, **times}))
        sys.stdout.flush()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.end_headers()

    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Backend).serve_forever()
"""


@contextmanager
def started(*command: str, output: Path) -> Iterator[None]:
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=output.parent)
    try:
        yield
        assert process.poll() is None, output.read_text()
    finally:
        process.kill()
        process.wait(10)


@contextmanager
def rotel(directory: Path) -> Iterator[tuple[str, Path]]:
    """Run rotel, which passes spans on to a backend. Yield its URL, and the file of the backend's spans."""
    agent = installed("rotel", "rotel==0.0.1a15") / "rotel" / "rotel-agent"
    agent.chmod(0o755)
    receiver, grpc, backend = free_address(), free_address(), free_address()
    spans = directory / "spans.jsonl"
    options = {
        "otlp-http-endpoint": receiver,
        "otlp-grpc-endpoint": grpc,
        "exporter": "otlp",
        "otlp-exporter-protocol": "http",
        "otlp-exporter-endpoint": f"http://{backend}",
        "pid-file": str(directory / "rotel.pid"),
        "log-file": str(directory / "rotel-agent.log"),
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    python = tracker_python("opentelemetry")
    with (
        started(python, "-c", BACKEND, backend.rpartition(":")[2], output=spans),
        started(str(agent), "start", *arguments, output=directory / "rotel.txt"),
    ):
        yield f"http://{receiver}", spans


async def test_every_group_and_step_is_a_trace_though_the_sender_is_killed(tmp_path: Path) -> None:
    with rotel(tmp_path) as (url, file):
        run = Run(tmp_path, num_steps=10, eval_interval=None, overrides=(f"observe.otlp.endpoint={url}",))
        async with run.started() as command:
            await command.log.until_trained(3)
            command.process_of("actors.observer.otlp").kill()
            command.log.kill("rollout")
            await command.log.until_trained(6)
            command.send(signal.SIGINT)
            assert await command.end() == 130
        async with run.started() as command:
            assert await command.end() == 0
        books = await audit(run, killed=None)

        def spans() -> list[dict[str, Any]]:
            lines = file.read_text().splitlines(keepends=True)
            return [json.loads(line) for line in lines if line.endswith("\n")]

        def roots(name: str) -> dict[str, dict[str, Any]]:
            return {span["span"]: span for span in spans() if span["name"] == name}

        await eventually(lambda: len(roots("train step")) >= run.num_steps)
        steps, groups = roots("train step"), roots("prompt group")
    assert sorted(span["values"]["physarum.step"] for span in steps.values()) == list(range(1, run.num_steps + 1))
    ended = Counter(span["values"]["physarum.outcome"] for span in groups.values())
    assert ended == {"trained": books.trained}
    assert len({span["values"]["physarum.group"] for span in groups.values()}) == len(groups)
    step_traces = {(span["trace"], span["span"]): span["values"]["physarum.step"] for span in steps.values()}
    for span in groups.values():
        ((trace, linked),) = span["links"]
        assert step_traces[trace, linked] == span["values"]["physarum.step"]
    by_id = {span["span"]: span for span in spans()}
    children = [span for span in by_id.values() if span["parent"]]
    assert len(children) > 5 * len(groups)
    for span in children:
        parent = by_id[span["parent"]]
        assert span["trace"] == parent["trace"]
        assert parent["begin"] <= span["begin"] <= span["end"] <= parent["end"]
    assert {span["run"] for span in by_id.values()} == {run.directory.name}


@pytest.mark.parametrize("kind", ["refuses", "hangs"])
async def test_a_collector_that_fails_costs_its_spans_alone(tmp_path: Path, kind: str) -> None:
    tracker_python("opentelemetry")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if kind == "hangs":
            server.listen(64)  # the kernel accepts, and no process answers
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        overrides = (f"observe.otlp.endpoint={url}", "observe.stop_timeout_s=25")
        run = Run(tmp_path, num_steps=3, eval_interval=None, overrides=overrides)
        async with run.started() as command:
            assert await command.end() == 0
    await audit(run)
    told = (run.directory / "logs" / "opentelemetry.jsonl").read_text()
    assert "the collector does not accept spans" in told
    assert told.count("Connection refused" if kind == "refuses" else "due to timeout") == 1  # why, once a minute
    assert "0 spans sent, 0 spans dropped, 303 left" in told
    assert "run r finished" in run.output.read_text()
