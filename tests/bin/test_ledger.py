"""bin/ledger on the store of a small run: called in this process, and a few times as a person calls it.

Where a run goes on, its bus is a client of a thread of its own: the command needs the main thread for its signals.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import psutil
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from bin.ledger import main
from messages import ActorStarted, BufferStarted, Message, Plane, RunStalled
from runtime.bus.bus import Bus
from runtime.bus.nats.server import ServerSettings
from runtime.ledger.archive import archive
from runtime.ledger.fold import LedgerState, fold
from runtime.node.claims.claim import Claim
from tests.build.events import announced, completed, issued, snapshot
from tests.fixtures.nats import TEST_LIMITS, TEST_STREAMS
from tests.support.commands import called
from tests.support.log_of_a_run import LOG, THE_END
from tests.support.running_server import running_server

ROOT = Path(__file__).parents[2]
COMMAND = ROOT / "bin" / "physarum.py"
RUN = "small"
BOOKS = {"issued": 8, "trained": 4, "skipped": 0, "dropped": 2, "failed": 1, "pooled": 0, "ready": 0, "in_flight": 1}

A_FACT = ActorStarted(actor="a", node="n", pid=1, restarts=0)


def ledger(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return called(main, *arguments, cwd=cwd)


def started(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The command as a process."""
    command = [sys.executable, str(COMMAND), "ledger", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)


@asynccontextmanager
async def bus_of(run_dir: Path, events: Sequence[Message] = LOG) -> AsyncGenerator[Bus]:
    """The bus of a run, with a log, found as the bus of a node daemon is."""
    settings = ServerSettings(store_dir=run_dir / "nats")
    async with (
        running_server(run_dir / "bus", settings) as server,
        Bus.connect(server.url, run_dir.name, name="test", limits=TEST_LIMITS) as bus,
    ):
        await anyio.Path(run_dir / "bus.url").write_text(f"{server.url}\n")
        await bus.ensure_streams(TEST_STREAMS)
        for event in events:
            await bus.publish(event)
        yield bus


async def make(run_dir: Path, events: Sequence[Message] = LOG) -> Path:
    with Claim.take(run_dir):
        async with bus_of(run_dir, events):
            pass
    return run_dir


@contextmanager
def held(run_dir: Path, events: Sequence[Message] = LOG) -> Iterator[tuple[Bus, BlockingPortal]]:
    """A run that goes on: a claim as that of its node daemon, and its bus, to be used through the portal."""
    with (
        Claim.take(run_dir),
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(bus_of(run_dir, events)) as bus,
    ):
        yield bus, portal


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that is over; tests only read it."""
    return anyio.run(make, tmp_path_factory.mktemp("runs") / RUN)


def json_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line)


def content_of(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_json_holds_the_books_and_the_groups_of_each_step(ended: Path) -> None:
    told = json_of(ledger(str(ended), "--json"))
    assert told["books"] == BOOKS
    assert told["trained"] == [[0, [0, 1]], [1, [3, 5]]]
    assert (told["dropped"], told["failed"], told["steps"]) == ({"too_stale": 1, "zero_std": 1}, {"no score": 1}, 2)
    assert (told["run"], told["live"], told["finished"]) == (RUN, False, None)


def test_a_name_under_runs_is_found_and_told_for_people(ended: Path) -> None:
    runs = ended.parent.with_name("runs")
    if not runs.exists():
        runs.symlink_to(ended.parent)
    done = started(RUN, cwd=runs.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == [
        f"run         {RUN}, not finished (no node daemon runs it)",
        "groups      8 issued = 4 trained + 0 skipped + 2 dropped + 1 failed + 0 pooled + 0 ready + 1 in flight",
    ]


def test_a_group_is_told_from_its_first_event_to_its_last(ended: Path) -> None:
    done = ledger(str(ended), "--group", "1", "--json")
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(event["seq"], event["type"]) for event in events] == [
        (3, "groups_issued"),
        (6, "group_completed"),
        (9, "verdict_given"),
        (10, "batch_ready"),
        (14, "batch_trained"),
    ]
    assert events[0]["groups"] == [{"group_id": 1, "attempt": 0, "prompt": 1, "prompt_parts": []}]
    assert events[0]["time"] <= events[-1]["time"]


def test_a_group_is_told_in_words(ended: Path) -> None:
    told = ledger(str(ended), "--group", "3")
    assert told.returncode == 0, told.stderr
    samples = "1 sample (1 completed) with 0 tokens, mean reward 0.500"
    done = f"rollout.policy.0: {samples}; rollout 0.000 s, scores 0.000 s"
    assert [line.partition("  ")[2] for line in told.stdout.splitlines()] == [
        "issued: attempt 0 in round 0, for weights v1",
        "attempt 0 halted, rollout.policy.0 had no tokens yet",
        "issued again: attempt 1 in round 1, for weights v1",
        f"attempt 1 completed by {done}",
        f"attempt 0 completed by {done}; too late, it changes nothing",
        "verdict on attempt 1: keep",
        "put into the batch of step 2",
        "trained, as TrainerStarted implies",
    ]


def test_issued_samples_are_compared_with_trained_ones(ended: Path) -> None:
    told = json_of(ledger(str(ended), "--bias", "--json"))
    assert (told["issued"], told["trained"]) == (5, 4)
    lines = ledger(str(ended), "--bias").stdout.splitlines()
    assert lines[0] == "samples      4 of 5 issued are trained"
    assert "too few samples" in lines[-1]


def test_the_wall_time_is_told_and_adds_up(ended: Path) -> None:
    told = json_of(ledger(str(ended), "--time", "--json"))
    assert sum(told["seconds"].values()) == pytest.approx(told["wall_s"], rel=1e-6)
    assert "effective training time" in ledger(str(ended), "--time").stdout


def test_a_group_of_a_run_without_a_filter_is_told_as_kept_without_a_verdict(tmp_path: Path) -> None:
    """Group 0 is kept when it completes, group 1, which waited for a verdict, by the buffer that has no filter."""
    later = msgspec.structs.replace(issued(0, 1), verdicts=True)
    without = BufferStarted(incarnation=2, verdicts=False)
    again = msgspec.structs.replace(issued(2), verdicts=False)
    log = (BufferStarted(incarnation=1), announced(1, 0), later, completed(1), without, completed(0), again)
    run_dir = anyio.run(make, tmp_path / RUN, log)
    expected = {
        0: [("groups_issued", False), ("group_completed", True)],
        1: [("groups_issued", False), ("group_completed", False), ("buffer_started", True)],
    }
    for group_id, life in expected.items():
        done = ledger(str(run_dir), "--group", str(group_id), "--json")
        told = [json.loads(line) for line in done.stdout.splitlines()]
        assert [(event["type"], event.get("kept_without_verdict", False)) for event in told] == life


def test_a_group_that_never_was_is_an_error_that_says_which_there_are(ended: Path) -> None:
    done = ledger(str(ended), "--group", "8")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith(f"run {RUN} has no group 8: it has issued groups 0 to 7\n")


def test_an_ended_run_is_left_as_it_was_and_nothing_stays(
    ended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content_of(ended)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert ledger(str(ended)).returncode == 0
    assert content_of(ended) == before
    assert list(tmp_path.iterdir()) == []


def test_a_live_run_is_read_from_its_bus_which_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / RUN
    with held(run_dir) as (bus, portal):
        told = json_of(ledger(str(run_dir), "--trust", "--json"))
        assert (told["live"], told["books"], told["finished"]) == (True, BOOKS, None)
        assert portal.call(bus.publish, THE_END) == len(LOG) + 1
        assert ledger(str(run_dir), "--trust").stdout.startswith(f"run         {RUN}, finished: trained 2 steps\n")
    assert json_of(ledger(str(run_dir), "--trust", "--json"))["live"] is False


@pytest.mark.parametrize(
    ("last", "code", "said"),
    [
        (A_FACT, 0, ""),  # a fact that this version does not know changes no group
        (THE_END, 1, "'from_the_future'"),  # without a decision, whatever is told would be false
    ],
)
def test_what_this_version_does_not_know_is_passed_over_unless_it_is_a_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: Message, code: int, said: str
) -> None:
    run_dir = tmp_path / RUN
    with held(run_dir) as (bus, portal):
        with monkeypatch.context() as patch:
            patch.setattr("runtime.bus.wire.encode", _unknown)
            assert portal.call(bus.publish, last) == len(LOG) + 1
        done = ledger(str(run_dir), "--trust", "--json")
        assert done.returncode == code
        assert said in done.stderr
        if code == 0:
            assert json_of(done)["books"] == BOOKS
        assert portal.call(bus.state, last.plane).last_seq == len(LOG) + 1


@pytest.mark.parametrize("live", [False, True])
def test_what_was_moved_to_the_archive_is_told_too(tmp_path: Path, live: bool) -> None:
    run_dir = tmp_path / RUN
    with held(run_dir) as (bus, portal):
        portal.call(partial(archive, bus, run_dir, below_seq=12))
        portal.call(partial(bus.purge, Plane.EVENT, below_seq=12))
        if live:
            check_a_trimmed_run(run_dir, live=True)
    if not live:
        check_a_trimmed_run(run_dir, live=False)


def check_a_trimmed_run(run_dir: Path, *, live: bool) -> None:
    done = ledger(str(run_dir), "--trust", "--json")
    told = json_of(done)
    assert (told["live"], told["books"], told["trained"]) == (live, BOOKS, [[0, [0, 1]], [1, [3, 5]]])
    assert "may be a stranger's" not in done.stderr
    group = ledger(str(run_dir), "--trust", "--group", "1", "--json")
    assert [json.loads(line)["seq"] for line in group.stdout.splitlines()] == [3, 6, 9, 10, 14]


def test_without_its_archive_a_trimmed_run_is_told_from_the_snapshot_on(tmp_path: Path) -> None:
    state = LedgerState()
    for seq, event in enumerate(LOG, start=1):
        fold(state, event, seq)
    run_dir = tmp_path / RUN
    with held(run_dir, (*LOG, snapshot(state))) as (bus, portal):
        portal.call(partial(bus.purge, Plane.EVENT, below_seq=20))
    done = ledger(str(run_dir), "--json")
    told = json_of(done)
    assert (told["books"], told["steps"], told["trained"]) == (BOOKS, 2, [])
    assert "the log begins at event 20, and" in done.stderr
    assert "has no archive of earlier events" in done.stderr


def test_a_stall_is_told_until_something_happens(tmp_path: Path) -> None:
    stalled = RunStalled(idle_s=300.0, waiting={"buffer": "batch 2 to be trained", "trainer": "no answer in 5 s"})
    run_dir = anyio.run(make, tmp_path / RUN, (*LOG, stalled))
    assert json_of(ledger(str(run_dir), "--json"))["stalled"] == {"idle_s": 300.0, "waiting": stalled.waiting}
    assert ledger(str(run_dir)).stdout.splitlines()[-3:] == [
        "stalled     nothing happened for 5m00s",
        "            buffer: batch 2 to be trained",
        "            trainer: no answer in 5 s",
    ]


def _unknown(_message: Message) -> Any:
    from messages.codec import Encoded

    return Encoded(b'{"type": "from_the_future"}', {"Physarum-Type": "from_the_future"})


@pytest.mark.anyio
async def test_the_books_are_told_while_the_bus_comes_back(tmp_path: Path) -> None:
    """A node daemon holds the run and restarts its server on another port while the command waits."""
    run_dir = await make(tmp_path / RUN)
    with Claim.take(run_dir):
        async with anyio.create_task_group() as tasks:

            async def told() -> None:
                assert (
                    json_of(await anyio.to_thread.run_sync(started, str(run_dir), "--trust", "--json"))["live"] is True
                )
                tasks.cancel_scope.cancel()

            tasks.start_soon(told)
            async with bus_of(run_dir, ()):
                await anyio.sleep_forever()


def test_the_run_is_named_by_its_topology_if_its_directory_was_moved(ended: Path, tmp_path: Path) -> None:
    moved = tmp_path / "kept for later"
    subprocess.run(["cp", "-r", str(ended), str(moved)], check=True)
    (moved / "topology.json").write_text(json.dumps({"run": {"name": RUN, "seed": 1}, "bus": {}}))
    assert json_of(ledger(str(moved), "--json"))["run"] == RUN


@pytest.mark.parametrize("make_it", [False, True])
def test_no_such_run_is_wrong_input(tmp_path: Path, make_it: bool) -> None:
    if make_it:
        (tmp_path / "other").mkdir()
    done = ledger("other", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "no run 'other': neither runs/other nor other is the directory of a run\n"


def test_a_run_that_never_had_a_bus_has_no_log(tmp_path: Path) -> None:
    (tmp_path / "topology.json").write_text(json.dumps({"run": {"name": RUN}}))
    done = ledger(str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == f"run {RUN} has no log: no node daemon runs it, and {tmp_path} stores no events\n"


def test_a_wrong_call_is_wrong_input(ended: Path) -> None:
    assert ledger().returncode == 2
    assert ledger(str(ended), "--group", "x").returncode == 2
    assert ledger(str(ended), "--group", "1", "--bias").returncode == 2


def test_an_interrupted_command_leaves_no_server(ended: Path, tmp_path: Path) -> None:
    """Ended at whatever moment it has its server; the server goes, orderly or with it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        scratch = tmp_path / number.name
        scratch.mkdir()
        environment = {**os.environ, "TMPDIR": str(scratch)}
        process, server = _with_a_server([sys.executable, str(COMMAND), "ledger", str(ended)], environment)
        process.send_signal(number)
        assert process.wait(15) != 0
        server.wait(10)
        if number is signal.SIGTERM:
            assert list(scratch.iterdir()) == []


def _with_a_server(command: list[str], environment: dict[str, str]) -> tuple[subprocess.Popen[bytes], psutil.Process]:
    """Start the command until it is seen with its server: on a busy machine one may be over before this looks."""
    for _ in range(20):
        process = subprocess.Popen(command, env=environment)
        while process.poll() is None:
            for child in psutil.Process(process.pid).children():
                return process, child
    raise AssertionError("each ended before its server was seen")


def test_help_answers_at_once_and_loads_no_bus() -> None:
    command = [sys.executable, "-X", "importtime", str(COMMAND), "ledger", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    loaded = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert not {name.partition(".")[0] for name in loaded} & {"nats", "msgspec", "anyio"}
    assert len(loaded) < 160  # 113 in 2026, of which a bare interpreter has 26
