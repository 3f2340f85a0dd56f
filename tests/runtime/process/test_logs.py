"""Logging set-up."""

import io
import logging
from collections.abc import Iterator

import msgspec
import pytest
import structlog

from runtime.process.logs import configure_logging


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    configure_logging("filter", "r", stream)
    yield stream
    structlog.reset_defaults()
    logging.basicConfig(force=True)


def test_a_line_is_json_with_time_level_run_and_actor(stream: io.StringIO) -> None:
    structlog.get_logger().info("group_judged", outcome="keep", took_s=0.5)
    line = msgspec.json.decode(stream.getvalue())
    assert line.pop("time").endswith("Z")
    expected = {"level": "info", "event": "group_judged", "run": "r", "actor": "filter", "outcome": "keep"}
    assert line == {**expected, "took_s": 0.5}


def test_a_bound_actor_wins_over_the_process(stream: io.StringIO) -> None:
    with structlog.contextvars.bound_contextvars(actor="reward", group_id=7):
        structlog.get_logger().info("scored")
    line = msgspec.json.decode(stream.getvalue())
    assert (line["actor"], line["group_id"]) == ("reward", 7)


def test_exceptions_and_third_party_warnings_stay_one_line_each(stream: io.StringIO) -> None:
    try:
        raise ValueError("no")
    except ValueError:
        structlog.get_logger().exception("failed")
    logging.getLogger("thirdparty").warning("careful %s", "there")
    failed, warned = (msgspec.json.decode(line) for line in stream.getvalue().splitlines())
    assert failed["exception"].endswith("ValueError: no")
    assert (warned["event"], warned["logger"], warned["level"]) == ("careful there", "thirdparty", "warning")
