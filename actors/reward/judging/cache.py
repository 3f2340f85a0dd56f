"""A bounded cache of a judge's answers on disk. It is a convenience: what cannot be read is requested again."""

import hashlib
import sqlite3
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import anyio.to_thread
import msgspec
import structlog

log = structlog.get_logger()

LEFT_SHARE: Final = 0.9  # of the bytes that stay when the cache is full
WAIT_S: Final = 1.0  # for another process that writes
SUM_BYTES: Final = 4  # checksum before each answer
# a disk that is full or read-only, a closed file: not damage
OTHERS: Final = (sqlite3.OperationalError, sqlite3.ProgrammingError)
_TABLE: Final = "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, body BLOB NOT NULL) STRICT"

Report = Callable[[str, str, int], None]  # name of a cache, reason, failures so far


def key_of(model: str, request: Mapping[str, Any]) -> bytes:
    """The key of a request: model, message (the template filled with prompt and answer) and sampling, by SHA-256."""
    return hashlib.sha256(msgspec.json.encode([model, request], order="deterministic")).digest()


class CacheError(Exception):
    """The cache could not be read or written. The answer is requested, and training goes on."""


class AnswerCache:
    """Answers by the key of their request. The oldest are removed over a number of bytes. Its calls block."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Open the file, or begin anew if it is damaged.

        Args:
            path: the file, of this process alone.
            max_bytes: of all answers.

        Raises:
            CacheError: the file cannot be opened, as on a full disk or in a read-only directory.
        """
        self._path, self._max_bytes = path, max_bytes
        self._lock = threading.Lock()
        self._num_bytes = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._open()
        except (OSError, sqlite3.OperationalError) as error:  # the file may be sound
            raise CacheError(f"not opened: {error}") from error
        except sqlite3.DatabaseError as error:
            self._begin_anew(error)

    @property
    def num_bytes(self) -> int:
        """Bytes of all answers."""
        return self._num_bytes

    def get(self, key: bytes) -> bytes | None:
        """The stored response, or None. One whose bytes have changed since is removed.

        Raises:
            CacheError: the file cannot be read.
        """
        with self._lock:
            try:
                row = self._database.execute("SELECT body FROM answers WHERE key = ?", (key,)).fetchone()
                if row is None or _is_sound(row[0]):
                    return None if row is None else row[0][SUM_BYTES:]
                with self._database:
                    self._remove(key)
            except sqlite3.Error as error:
                raise self._failed("not read", error) from error
            raise CacheError("an answer was damaged, and is requested again")

    def put(self, key: bytes, body: bytes) -> None:
        """Store a response, and remove the oldest ones if the cache is full.

        Raises:
            CacheError: the file cannot be written, as on a full disk.
        """
        stored = zlib.crc32(body).to_bytes(SUM_BYTES, "little") + body
        if len(stored) > self._max_bytes:
            return
        with self._lock:
            try:
                with self._database:
                    insert = "INSERT OR IGNORE INTO answers VALUES (?, ?)"
                    is_new = self._database.execute(insert, (key, stored)).rowcount > 0
                    num_bytes = self._num_bytes + (len(stored) if is_new else 0)
                    if num_bytes > self._max_bytes:
                        num_bytes = self._remove_oldest(num_bytes)
            except sqlite3.Error as error:
                raise self._failed("not written", error) from error
            self._num_bytes = num_bytes

    def forget(self, key: bytes) -> None:
        """Remove a stored response.

        Raises:
            CacheError: the file cannot be written.
        """
        with self._lock:
            try:
                with self._database:
                    self._remove(key)
            except sqlite3.Error as error:
                raise self._failed("not written", error) from error

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()

    def _open(self) -> None:
        self._database = _opened(self._path)
        try:
            (self._num_bytes,) = self._database.execute("SELECT coalesce(sum(length(body)), 0) FROM answers").fetchone()
        except sqlite3.Error:
            self._database.close()
            raise

    def _begin_anew(self, error: sqlite3.Error) -> None:
        """Replace a damaged file by an empty one.

        Raises:
            CacheError: that failed.
        """
        log.warning("judge_cache_damaged", path=str(self._path), error=str(error))
        try:
            for ending in ("", "-wal", "-shm"):
                self._path.with_name(self._path.name + ending).unlink(missing_ok=True)
            self._open()
        except (OSError, sqlite3.Error) as again:
            raise CacheError(f"damaged ({error}), and not replaced: {again}") from again

    def _failed(self, what: str, error: sqlite3.Error) -> CacheError:
        """Begin anew if the file is damaged, and return the error of the call."""
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, OTHERS):
            self._database.close()
            try:
                self._begin_anew(error)
            except CacheError as failed:
                return failed
            return CacheError(f"damaged ({error}), and begun anew")
        return CacheError(f"{what}: {error}")

    def _remove(self, key: bytes) -> None:
        removed = self._database.execute("DELETE FROM answers WHERE key = ? RETURNING length(body)", (key,)).fetchall()
        self._num_bytes -= sum(length for (length,) in removed)

    def _remove_oldest(self, left: int) -> int:
        """Remove the oldest answers; return the bytes that are left."""
        last = 0
        with closing(self._database.execute("SELECT rowid, length(body) FROM answers ORDER BY rowid")) as rows:
            for row, length in rows:
                if left <= LEFT_SHARE * self._max_bytes:
                    break
                last, left = row, left - length
        self._database.execute("DELETE FROM answers WHERE rowid <= ?", (last,))
        return left


class Caches:
    """The caches of a reward actor's judges. A failure is logged and reported, and costs a request."""

    def __init__(self, files: Mapping[str, tuple[Path, int]], report: Report = lambda _cache, _reason, _number: None):
        """Open the caches.

        Args:
            files: file and bytes of each cache, by the judge's name.
            report: called for the first failures of a cache.
        """
        self._report, self._failures = report, Counter[str]()
        self._caches: dict[str, AnswerCache] = {}
        for name, (path, max_bytes) in files.items():
            with self._reported(name):
                self._caches[name] = AnswerCache(path, max_bytes)

    def __contains__(self, name: str) -> bool:
        """Whether this judge has a cache that could be opened."""
        return name in self._caches

    async def get(self, name: str, key: bytes) -> bytes | None:
        """The kept response of a judge to a request, or None."""
        with self._reported(name):
            return await anyio.to_thread.run_sync(self._caches[name].get, key)
        return None

    async def put(self, name: str, key: bytes, body: bytes) -> None:
        """Keep the response of a judge to a request."""
        with self._reported(name):
            await anyio.to_thread.run_sync(self._caches[name].put, key, body)

    async def forget(self, name: str, key: bytes) -> None:
        """Remove the kept response of a judge to a request."""
        with self._reported(name):
            await anyio.to_thread.run_sync(self._caches[name].forget, key)

    def close(self) -> None:
        """Close the files."""
        for cache in self._caches.values():
            cache.close()

    @contextmanager
    def _reported(self, name: str) -> Generator[None]:
        """Report an error of a cache, the first time and ever more rarely."""
        try:
            yield
        except CacheError as error:
            self._failures[name] += 1
            number = self._failures[name]
            if number.bit_count() == 1:  # 1, 2, 4, 8, ...
                log.warning("judge_cache_failed", judge=name, number=number, error=str(error))
                self._report(f"the cache of the judge {name}", str(error), number)


def _is_sound(stored: bytes) -> bool:
    return zlib.crc32(stored[SUM_BYTES:]) == int.from_bytes(stored[:SUM_BYTES], "little")


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
