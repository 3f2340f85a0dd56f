"""The log of a process."""

from pathlib import Path

import msgspec

from runtime.agent.supervision.output import MAX_LINE_BYTES, OutputLog, readable


def test_lines_may_arrive_in_pieces(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "a.jsonl", "a")
    for piece in (b"one li", b"ne\ntwo", b"", b"\n"):
        log.feed(piece)
    log.end()
    log.close()
    assert [msgspec.json.decode(line)["text"] for line in log.path.read_bytes().splitlines()] == ["one line", "two"]
    assert log.tail() == ["one line", "two"]


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
    log.feed(b"""{"level":"error","event":"actor_failed","error":"InputError(\\"rm_type = 'x': no module\\")"}\n""")
    assert log.why() == "rm_type = 'x': no module"
    log.forget()
    log.feed(b"Traceback (most recent call last):\nValueError: no\n")
    assert log.why() == "ValueError: no"
    log.close()


def test_json_lines_are_shown_readable() -> None:
    line = b'{"time":"2026-11-20T14:08:00.1Z","level":"info","event":"weights_published","run":"r","actor":"t","v":7}'
    assert readable(line) == "14:08:00 info weights_published v=7"
