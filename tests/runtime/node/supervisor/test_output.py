"""The log of a process."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.node.supervisor.output import MAX_LINE_BYTES, MAX_SHOWN, OutputLog, readable
from runtime.util.secrets import Secret


def test_lines_may_arrive_in_pieces(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "a.jsonl", "a")
    for piece in (b"one li", b"ne\ntwo", b"", b"\n"):
        log.feed(piece)
    log.end()
    log.close()
    assert [msgspec.json.decode(line)["text"] for line in log.path.read_bytes().splitlines()] == ["one line", "two"]
    assert log.tail() == ["one line", "two"]


def test_what_a_process_knows_and_prints_is_hidden(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "a.jsonl", "a", hidden=[Secret("sw0rdf1sh"), Secret("other")])
    log.feed(b'server_args=ServerArgs(api_key=\'sw0rdf1sh\')\n{"key": "sw0rdf1sh"}\nan')
    log.feed(b"other line\n")
    log.close()
    assert b"sw0rdf1sh" not in log.path.read_bytes()
    assert log.tail() == ["server_args=ServerArgs(api_key='***')", "key=***", "an*** line"]


@pytest.mark.parametrize("begins", [-9, -8, -5, -1, 0])
@pytest.mark.parametrize("rest", [0, 1, 100])
def test_a_secret_at_the_place_where_a_line_is_cut_is_hidden_too(tmp_path: Path, begins: int, rest: int) -> None:
    log = OutputLog(tmp_path / "a.jsonl", "a", hidden=[Secret("sw0rdf1sh"), Secret("f1sh")])
    log.feed(b"x" * (MAX_LINE_BYTES + begins) + b"sw0r")
    log.feed(b"df1sh" + b"y" * rest + b"\n")
    log.close()
    (entry,) = map(msgspec.json.decode, log.path.read_bytes().splitlines())
    shown = "***" if begins == -9 else ""
    assert entry["text"] == "x" * (MAX_LINE_BYTES + begins) + shown
    printed = MAX_LINE_BYTES + begins + 9 + rest
    assert entry.get("left_out_bytes", 0) == printed - (MAX_LINE_BYTES + begins + (9 if shown else 0))


def test_a_log_has_a_bound(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "a.jsonl", "a", max_bytes=10_000)
    for number in range(1000):
        log.feed(f"line {number}\n".encode())
    log.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["a.jsonl", "a.jsonl.1"]
    assert all(path.stat().st_size < 11_000 for path in tmp_path.iterdir())
    assert log.tail(1) == ["line 999"]


def test_a_line_without_end_is_cut(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "a.jsonl", "a")
    for _ in range(5):
        log.feed(b"x" * MAX_LINE_BYTES)
    log.close()
    assert all(len(line) < 2 * MAX_LINE_BYTES for line in log.path.read_bytes().splitlines())


def test_the_reason_of_an_end_is_its_last_error(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "a.jsonl", "a")
    log.feed(b'{"level":"error","event":"input_error","error":"prompts.jsonl line 7: not JSON"}\n')
    log.feed(b'{"level":"info","event":"stopped"}\nbye\n')
    assert log.why() == "input_error: prompts.jsonl line 7: not JSON"
    log.feed(b"""{"level":"error","event":"actor_failed","error":"rm_type = 'x': no module"}\n""")
    assert log.why() == "rm_type = 'x': no module"
    log.forget()
    log.feed(b"Traceback (most recent call last):\nValueError: no\n")
    assert log.why() == "ValueError: no"
    log.close()


@pytest.mark.parametrize(
    ("printed", "error"),
    [
        ("epoch 3 done", None),
        ("Traceback (most recent call last):\n  File 'a.py'\nKeyError: 'x'", "KeyError: 'x'"),
        ("Traceback (most recent call last):\n  File 'a.py'\nmylib.Oops: first\nsecond line\nbye", "mylib.Oops: first"),
        ("Traceback (most recent call last):\n  File 'a.py'\nKeyboardInterrupt", None),
        (
            "Fatal Python error: Segmentation fault\n  File 'a.py', line 3 in f",
            "Fatal Python error: Segmentation fault",
        ),
    ],
)
def test_what_a_process_printed_last_is_no_error_unless_it_is_an_exception(
    tmp_path: Path, printed: str, error: str | None
) -> None:
    log = OutputLog(tmp_path / "a.jsonl", "a")
    log.feed(f"{printed}\n".encode())
    assert log.error() == error
    assert log.last_words() == printed.splitlines()[-1]
    log.close()


def test_json_lines_are_shown_readable() -> None:
    line = b'{"time":"2026-11-20T14:08:00.1Z","level":"info","event":"weights_published","run":"r","actor":"t","v":7}'
    assert readable(line) == "14:08:00 info weights_published v=7"


def logged(path: Path, *pieces: bytes) -> tuple[list[dict[str, object]], OutputLog]:
    """What a log holds after these pieces, and the log."""
    log = OutputLog(path / "a.jsonl", "a")
    for piece in pieces:
        log.feed(piece)
    log.end()
    log.close()
    return [msgspec.json.decode(line) for line in log.path.read_bytes().split(b"\n") if line], log


@pytest.mark.parametrize(
    "line",
    [
        b'{"answer": ' + b"[" * 60_000,
        b'{"answer": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"answer": ' + b"9" * 5000 + b"}",
        b'{"answer": "\xff\xfe"}',
        b'{"\xff": 1}',
        b'{"answer": "\\ud800"}',
        b'{"level": "error", "event": "x", "exception": " "}',
        b'{"level": ["error"], "event": {"a": 1}, "time": 7}',
        b"\xff\xfe\x00\x80",
    ],
)
def test_whatever_is_printed_is_logged_and_shown(tmp_path: Path, line: bytes) -> None:
    entries, log = logged(tmp_path, line + b"\nafter\n")
    assert len(entries) == 2
    assert log.tail()[-1] == "after"
    assert log.why() is not None


def test_of_a_line_of_a_gigabyte_the_beginning_is_kept_and_the_rest_counted(tmp_path: Path) -> None:
    mebibyte = b"x" * (1 << 20)
    entries, log = logged(tmp_path, *(mebibyte for _ in range(1024)), b"\nafter\n")
    assert [len(str(entry["text"])) for entry in entries] == [MAX_LINE_BYTES, len("after")]
    assert entries[0]["left_out_bytes"] == (1 << 30) - MAX_LINE_BYTES
    assert log.path.stat().st_size < 2 * MAX_LINE_BYTES
    first, last = log.tail()
    assert first.startswith(
        f"(the first {MAX_LINE_BYTES} bytes of a line, {(1 << 30) - MAX_LINE_BYTES} more are left out) xx"
    )
    assert len(first) < MAX_SHOWN + 100
    assert last == "after"


STEERING = "\x1b]0;title\x07 \x9b2J \x7f \r \u202e \u2028"


@pytest.mark.parametrize("as_json", [False, True])
def test_control_characters_are_escaped_wherever_a_line_is_shown(tmp_path: Path, as_json: bool) -> None:
    told = (
        msgspec.json.encode({"level": "error", "event": STEERING, "note": STEERING}) if as_json else STEERING.encode()
    )
    entries, log = logged(tmp_path, told + b"\nafter\n")
    stored = log.path.read_text(encoding="utf-8")
    assert all(character >= " " for character in stored.replace("\n", ""))
    assert not set(stored) & set("\x7f\x9b\u202e\u2028")
    assert STEERING in entries[0].values()
    for shown in (*log.tail(), log.why() or ""):
        assert not set(shown) & set("\x1b\x07\x9b\x7f\r\u202e\u2028")
    assert "\\x1b]0;title\\x07 \\x9b2J \\x7f" in log.tail()[0]


@given(st.lists(st.binary(max_size=300), max_size=5), st.integers(1, 7))
def test_no_bytes_end_a_log(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], size: int) -> None:
    data = b"\n".join(lines)
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    entries, log = logged(tmp_path_factory.mktemp("log"), *pieces)
    assert len(entries) == sum(bool(line.strip()) for line in data.split(b"\n"))
    log.tail()
    log.why()
