"""Logging of a run's processes: one JSON object per line, or colour on a terminal."""

import logging
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor

from runtime.util.secrets import without_logins

LEVEL_VARIABLE = "PHYSARUM_LOG_LEVEL"  # debug, info (default), warning, error

_encoder = msgspec.json.Encoder(enc_hook=repr)


def configure_logging(actor: str, run: str, stream: TextIO | None = None) -> None:
    """Set up structlog and the standard library's logging for this process.

    Args:
        actor: bound to every line, unless a context variable sets another.
        run: bound to every line.
        stream: output, by default standard error; a terminal gets colour instead of JSON.
    """
    target: TextIO = sys.stderr if stream is None else stream
    level = logging.getLevelNamesMapping().get(os.environ.get(LEVEL_VARIABLE, "info").upper(), logging.INFO)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            _bound_to(run=run, actor=actor),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            *_renderer(target),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=target),
        cache_logger_on_first_use=False,  # tests and tools may reconfigure
    )
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[_Forwarded()], force=True)


@contextmanager
def silenced() -> Generator[None]:
    """Disable logging in this process for a block, whose caller reports errors itself."""
    before = structlog.get_config()
    disabled = logging.root.manager.disable
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        structlog.configure(**before)


def _bound_to(**values: str) -> Processor:
    def bind(_logger: Any, _method: str, event: EventDict) -> EventDict:
        for key, value in values.items():
            event.setdefault(key, value)
        return event

    return bind


def _renderer(stream: TextIO) -> list[Processor]:
    if stream.isatty():
        return [structlog.dev.ConsoleRenderer(timestamp_key="time")]
    return [structlog.processors.format_exc_info, _hide_logins, _to_json]


def _hide_logins(_logger: Any, _method: str, event: EventDict) -> EventDict:
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = without_logins(value)
    return event


def _to_json(_logger: Any, _method: str, event: EventDict) -> str:
    head = {key: event.pop(key) for key in ("time", "level", "event") if key in event}
    return _encoder.encode({**head, **event}).decode()


class _Forwarded(logging.Handler):
    """Forwards log records of third-party packages to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = structlog.get_logger()
        write: Callable[..., Any] = getattr(logger, logging.getLevelName(record.levelno).lower(), logger.warning)
        write(record.getMessage(), logger=record.name, exc_info=record.exc_info)
