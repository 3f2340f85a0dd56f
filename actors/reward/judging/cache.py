"""A bounded cache of a judge's answers on disk. It is a convenience: what cannot be read is requested again."""

import hashlib
import sqlite3
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

log = structlog.get_logger()

LEFT_SHARE: Final = 0.9  # of the bytes that stay when the cache is full
WAIT_S: Final = 1.0  # for another process that writes
_TABLE: Final = "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, body BLOB NOT NULL) STRICT"


def key_of(model: str, request: Mapping[str, Any]) -> bytes:
    """The key of a request: model, message (the template filled with prompt and answer) and sampling, by SHA-256."""
    return hashlib.sha256(msgspec.json.encode([model, request], order="deterministic")).digest()


class AnswerCache:
    """Answers by the key of their request. The oldest are removed over a number of bytes. Its calls block."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Open the file, or begin anew if it is damaged.

        Args:
            path: the file.
            max_bytes: of all answers.

        Raises:
            OSError, sqlite3.Error: the file cannot be created.
        """
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._database = _opened(path)
        except sqlite3.DatabaseError as error:
            log.warning("judge_cache_damaged", path=str(path), error=str(error))
            path.unlink(missing_ok=True)
            self._database = _opened(path)
        (self._num_bytes,) = self._database.execute("SELECT coalesce(sum(length(body)), 0) FROM answers").fetchone()

    @property
    def num_bytes(self) -> int:
        """Bytes of all answers."""
        return self._num_bytes

    def get(self, key: bytes) -> bytes | None:
        """The stored response, or None."""
        try:
            with self._lock:
                row = self._database.execute("SELECT body FROM answers WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            log.warning("judge_cache_not_read", error=str(error))
            return None
        return None if row is None else row[0]

    def put(self, key: bytes, body: bytes) -> None:
        """Store a response, and remove the oldest ones if the cache is full."""
        if len(body) > self._max_bytes:
            return
        try:
            with self._lock, self._database:
                stored = self._database.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (key, body)).rowcount
                self._num_bytes += len(body) if stored > 0 else 0
                if self._num_bytes > self._max_bytes:
                    self._remove_oldest()
        except sqlite3.Error as error:
            log.warning("judge_cache_not_written", error=str(error))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()

    def _remove_oldest(self) -> None:
        last, left = 0, self._num_bytes
        with closing(self._database.execute("SELECT rowid, length(body) FROM answers ORDER BY rowid")) as rows:
            for row, length in rows:
                if left <= LEFT_SHARE * self._max_bytes:
                    break
                last, left = row, left - length
        self._database.execute("DELETE FROM answers WHERE rowid <= ?", (last,))
        self._num_bytes = left


def _opened(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=WAIT_S, check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = OFF")  # a lost answer is requested again
        database.execute(_TABLE)
    except sqlite3.Error:
        database.close()
        raise
    return database
