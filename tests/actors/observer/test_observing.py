"""Folding of a run from snapshots: what is stored, when it is used, and when it is not."""

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
import pytest

from actors.observer import observing as module
from actors.observer.observed import Observed
from actors.observer.observing import SNAPSHOT_FILE, Header, Snapshots, Take, observing
from messages import Message
from runtime.bus.events import Received
from runtime.ledger.archive import ARCHIVE, ArchivedEvent, archived_files
from runtime.ledger.changes import Change
from runtime.node.reopen import FoundRun
from runtime.report.rows import MetricRow
from tests.support.archived_run import RUN, make_archived_run

EVERY = 100
NUM_EVENTS = 300  # at least


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of which most events are archived; tests work on copies."""
    directory = tmp_path_factory.mktemp("runs") / RUN
    anyio.run(lambda: make_archived_run(directory, NUM_EVENTS, samples=1))
    return directory


@pytest.fixture
def run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FoundRun:
    monkeypatch.setattr(module, "SNAPSHOT_EVERY", EVERY)
    monkeypatch.setattr("actors.observer.following.EVENTS", 30)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(made, tmp_path / RUN)
    return FoundRun(name=RUN, directory=tmp_path / RUN)


async def fold(run: FoundRun, num_steps: int = 9, *, take: Take | None = None) -> tuple[Observed, list[int], list[str]]:
    """Fold a run; return also the sequences of the events that were read for it, and the notes."""
    observed, seqs, notes = Observed(run.name, num_steps), list[int](), list[str]()
    async with observing(run, observed, note=notes.append, waits=False, take=take) as folding:
        async for batch in folding.batches():
            seqs += [received.seq for received in batch]
    return observed, seqs, notes


@pytest.mark.anyio
async def test_a_second_observer_folds_only_what_came_after_the_newest_snapshot(run: FoundRun) -> None:
    first, seqs, notes = await fold(run)
    assert (seqs, notes) == (list(range(1, first.seq + 1)), [])
    again, seqs, notes = await fold(run)
    assert (again, notes) == (first, [])
    assert seqs == list(range(301, first.seq + 1))  # the end of the first batch with 300 events
    every, seqs, _ = await fold(run, take=ignore)
    assert (every, seqs[0]) == (first, 1)


@pytest.mark.anyio
async def test_a_snapshot_at_the_end_of_the_log_is_enough(run: FoundRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SNAPSHOT_EVERY", 1)
    first, _, _ = await fold(run)
    again, seqs, notes = await fold(run)
    assert (again, seqs, notes) == (first, [], [])


def ignore(received: Received[Message], rows: list[MetricRow], changes: list[Change]) -> None:
    """Take each event, so that no snapshot is used."""


def first_line(content: bytes, **changes: object) -> bytes:
    line, _, state = content.partition(b"\n")
    header = msgspec.structs.replace(msgspec.json.decode(line, type=Header), **changes)
    return msgspec.json.encode(header) + b"\n" + state


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda content: content[:-1] + bytes([content[-1] ^ 1]), "its SHA-256 differs from that in its first line"),
        (lambda content: content[:-9], "its SHA-256 differs"),
        (lambda content: b"", "its first line cannot be read"),
        (lambda content: b"\x80\x04" + content, "its first line cannot be read"),
        (lambda content: first_line(content, code="x"), "another version of this package wrote it"),
        (lambda content: first_line(content, run_id="x"), "it is of another run with the same name"),
        (lambda content: first_line(content, seq=7), "its state is that of event 300, its first line says 7"),
    ],
)
def test_a_snapshot_that_cannot_be_used_says_why(run: FoundRun, harm: Callable[[bytes], bytes], why: str) -> None:
    observed, path = Observed(run.name, 9, seq=300), run.directory / SNAPSHOT_FILE
    snapshots = Snapshots(run, observed)
    assert snapshots.write(300, observed.encoded())
    assert (snapshots.read(), snapshots.problem) == (observed, "")
    path.write_bytes(harm(path.read_bytes()))
    assert snapshots.read() is None
    assert snapshots.problem.startswith(f"{path} is not used: {why}")
    assert snapshots.write(300, observed.encoded())  # it is replaced
    assert snapshots.read() == observed


@pytest.mark.anyio
async def test_a_damaged_snapshot_costs_one_line(run: FoundRun) -> None:
    first, _, _ = await fold(run)
    path = run.directory / SNAPSHOT_FILE
    path.write_bytes(path.read_bytes()[:-1])
    again, seqs, notes = await fold(run)
    assert (again, seqs[0], len(notes)) == (first, 1, 1)
    _, seqs, notes = await fold(run)  # it was replaced
    assert (seqs[0], notes) == (301, [])


@pytest.mark.anyio
async def test_other_settings_begin_anew_and_replace_the_snapshot(run: FoundRun) -> None:
    await fold(run, 9)
    other, seqs, notes = await fold(run, 10)
    assert (other.now()["num_steps"], seqs[0]) == (10, 1)
    assert len(notes) == 1
    assert "for another number of train steps" in notes[0]
    assert (await fold(run, 10))[1][0] == 301


@pytest.mark.anyio
async def test_a_log_with_another_event_at_its_place_is_another_log(run: FoundRun) -> None:
    await fold(run)
    (file,) = archived_files(run.directory)
    lines = gzip.decompress(file.path.read_bytes()).splitlines()
    late = [msgspec.json.decode(line, type=ArchivedEvent) for line in lines]
    late = [msgspec.structs.replace(event, time=event.time.replace(year=2031)) for event in late]
    file.path.write_bytes(gzip.compress(b"\n".join(map(msgspec.json.encode, late))))
    again, seqs, notes = await fold(run)
    assert seqs[0] == 1
    assert again == (await fold(run, take=ignore))[0]
    assert notes == ["a snapshot is not used: the log has another event 300 than its newest one"]


@pytest.mark.anyio
async def test_a_log_that_is_too_slow_is_not_called_another_log(run: FoundRun, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _, _ = await fold(run)
    monkeypatch.setattr(module, "FIRST_EVENT_S", 0.0)
    again, _, notes = await fold(run)
    assert again == first
    assert notes == ["a snapshot is not used: event 300, its newest one, did not come within 0 s"]


def test_a_file_of_the_cache_that_is_gone_does_not_end_the_writing(run: FoundRun, tmp_path: Path) -> None:
    (run.directory / SNAPSHOT_FILE).mkdir()
    cache = tmp_path / "cache" / "physarum" / "observer"
    cache.mkdir(parents=True)
    (cache / "gone.snapshot").symlink_to(tmp_path / "nothing")
    empty = Observed(run.name, 9)
    assert Snapshots(run, empty).write(100, empty.encoded())


@pytest.mark.anyio
async def test_without_a_right_to_write_snapshots_go_to_the_cache_or_nowhere(run: FoundRun, tmp_path: Path) -> None:
    (run.directory / SNAPSHOT_FILE).mkdir()  # nothing can replace a directory, not even root
    first, _, _ = await fold(run)
    (cached,) = (tmp_path / "cache").rglob("*.snapshot")
    assert cached.parent == tmp_path / "cache" / "physarum" / "observer"
    again, seqs, notes = await fold(run)
    assert (again, seqs[0], len(notes)) == (first, 301, 1)
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no directory")
    again, seqs, notes = await fold(run)
    assert (again, seqs[0]) == (first, 1)
    assert "no snapshot of this run is written" in notes[-1]


@pytest.mark.anyio
async def test_a_slower_observer_replaces_no_newer_snapshot(run: FoundRun) -> None:
    first, _, _ = await fold(run)
    content = (run.directory / SNAPSHOT_FILE).read_bytes()
    early = Observed(run.name, 9)
    assert Snapshots(run, early).write(100, early.encoded())
    assert (run.directory / SNAPSHOT_FILE).read_bytes() == content
    assert Snapshots(run, early).write(first.seq, first.encoded())
    assert (await fold(run))[:2] == (first, [])


@pytest.mark.anyio
async def test_a_fold_that_lacks_events_is_not_stored_and_says_why(run: FoundRun) -> None:
    (file,) = archived_files(run.directory)
    lines = gzip.decompress(file.path.read_bytes()).splitlines()
    strange = msgspec.structs.replace(msgspec.json.decode(lines[49], type=ArchivedEvent), type="later")
    lines[49] = msgspec.json.encode(strange)
    file.path.write_bytes(gzip.compress(b"\n".join(lines)))
    observed, seqs, _ = await fold(run)
    assert len(seqs) == observed.seq - 1
    assert observed.problems == ["1 event of the log cannot be decoded by this version: they are missing"]
    assert not (run.directory / SNAPSHOT_FILE).exists()
    shutil.rmtree(run.directory / ARCHIVE)
    late, _, _ = await fold(run)
    assert (late.first_seq, late.num_events) == (observed.seq, 1)
    assert not (run.directory / SNAPSHOT_FILE).exists()
