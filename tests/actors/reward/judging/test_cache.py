"""The cache of a judge's answers: its key, its bound, and a file that is damaged."""

from contextlib import closing
from pathlib import Path

from actors.reward.judging.cache import AnswerCache, key_of
from actors.reward.judging.requests import request_of

REQUEST = request_of("Is this good?", 0.0, 8, {})


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


def test_a_damaged_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    path.write_bytes(b"no database, but longer than its header" * 100)
    with closing(AnswerCache(path, 1000)) as cache:
        cache.put(b"key", b"body")
        assert cache.get(b"key") == b"body"
