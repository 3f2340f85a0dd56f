"""The cache of a judge's answers: its key, its bound, a full or read-only disk, damage, and a death while it writes."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections import deque
from contextlib import closing
from pathlib import Path

import pytest

from actors.reward.judging.cache import AnswerCache, CacheError, Caches, key_of
from actors.reward.judging.requests import request_of
from tests.support.small_disk import fill, small_disk

REQUEST = request_of("Is this good?", 0.0, 8, {})
ROOM = 1 << 30


def test_the_key_depends_on_model_message_and_sampling() -> None:
    others = [request_of("Is it?", 0.0, 8, {}), request_of("Is this good?", 0.5, 8, {}), {**REQUEST, "top_p": 0.9}]
    keys = {key_of("m", REQUEST), key_of("n", REQUEST), *(key_of("m", other) for other in others)}
    assert len(keys) == 5
    assert key_of("m", dict(reversed(REQUEST.items()))) == key_of("m", REQUEST)


def test_the_oldest_answers_go_first_and_the_bound_holds(tmp_path: Path) -> None:
    with closing(AnswerCache(tmp_path / "a" / "cache.sqlite", 1000)) as cache:
        for number in range(50):
            cache.put(bytes([number]), b"x" * 100)
            assert cache.num_bytes <= 1000
        cache.put(b"large", b"x" * 1001)
        assert [cache.get(key) is None for key in (b"\0", b"\x31", b"large")] == [True, False, True]
        size = cache.num_bytes
    with closing(AnswerCache(tmp_path / "a" / "cache.sqlite", 1000)) as again:
        assert (again.num_bytes, again.get(b"\x31")) == (size, b"x" * 100)


@pytest.mark.parametrize("place", [0, 50, 4096, 20_000, 100_000], ids=str)
def test_a_damaged_file_gives_no_wrong_answer_and_is_replaced(place: int, tmp_path: Path) -> None:
    """At the start or when it is read, by SQLite or by the checksum of an answer."""
    path = tmp_path / "cache.sqlite"
    answers = {bytes([number]): bytes([number]) * 1000 for number in range(200)}
    with closing(AnswerCache(path, ROOM)) as cache:
        for key, body in answers.items():
            cache.put(key, body)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\xa5" * 700)
    with closing(AnswerCache(path, ROOM)) as cache:
        for key, body in answers.items():
            try:
                assert cache.get(key) in (None, body)
            except CacheError:
                assert cache.get(key) is None
            cache.put(key, body)
        assert [cache.get(key) for key in answers] == list(answers.values())


@pytest.mark.anyio
async def test_a_full_disk_costs_what_is_not_kept_and_is_reported_ever_more_rarely(tmp_path: Path) -> None:
    said: list[tuple[str, str, int]] = []
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        with closing(AnswerCache(disk / "cache.sqlite", ROOM)) as cache:
            keys = iter(range(1000))
            with pytest.raises(CacheError, match="not written: database or disk is full"):
                deque(cache.put(key.to_bytes(4, "big"), b"x" * 8000) for key in keys)
            assert next(keys) > 20
            with closing(sqlite3.connect(disk / "cache.sqlite")) as file:
                assert cache.num_bytes == file.execute("SELECT sum(length(body)) FROM answers").fetchone()[0]
        fill(disk)
        files = {"old": (disk / "cache.sqlite", ROOM), "new": (disk / "new.sqlite", ROOM)}
        with closing(Caches(files, lambda cache, reason, number: said.append((cache, reason, number)))) as caches:
            assert ("old" in caches, "new" in caches) == (True, False)
            for number in range(5):
                await caches.put("old", b"%d" % number, b"x" * 40_000)
            assert await caches.get("old", bytes(4)) == b"x" * 8000  # a full disk is no damage
    full = "database or disk is full"
    old = [("the cache of the judge old", f"not written: {full}", number) for number in (1, 2, 4)]
    assert said == [("the cache of the judge new", f"not opened: {full}", 1), *old]


def test_a_read_only_disk_leaves_the_judge_without_a_cache(tmp_path: Path) -> None:
    said: list[tuple[str, str, int]] = []
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        with closing(AnswerCache(disk / "cache.sqlite", ROOM)):
            pass
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=10)
        files = {"old": (disk / "cache.sqlite", ROOM), "new": (disk / "new" / "cache.sqlite", ROOM)}
        with closing(Caches(files, lambda cache, reason, number: said.append((cache, reason, number)))) as caches:
            assert ("old" in caches, "new" in caches) == (False, False)
    reasons = {cache: reason for cache, reason, _ in said}
    assert reasons["the cache of the judge old"] == "not opened: unable to open database file"
    assert "not opened: [Errno 30] Read-only file system" in reasons["the cache of the judge new"]


def test_a_process_that_is_killed_while_it_writes_leaves_whole_answers(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    program = """
import sys
from pathlib import Path
from actors.reward.judging.cache import AnswerCache
cache, number = AnswerCache(Path(sys.argv[1]), 1 << 30), int(sys.argv[2])
while True:
    cache.put(number.to_bytes(4, "big"), number.to_bytes(4, "big") * 20_000)
    print(number, flush=True)
    number += 1
"""
    stored: list[int] = []
    for first in (0, 1000):
        command = [sys.executable, "-c", program, str(path), str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[4]) as process:
            assert process.stdout is not None
            stored += [int(process.stdout.readline()) for _ in range(20)]
            os.kill(process.pid, signal.SIGKILL)
            stored += [int(line) for line in process.stdout.read().splitlines()]
        with closing(AnswerCache(path, ROOM)) as cache:
            for key in stored:
                assert cache.get(key.to_bytes(4, "big")) == key.to_bytes(4, "big") * 20_000
