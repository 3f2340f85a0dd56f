"""A data source with a state: its process, what it does wrong, and the same prompts however often the buffer dies."""

import os
import signal
import time
from pathlib import Path
from random import Random
from typing import Any

import anyio
import msgspec
import psutil
import pytest

from actors.buffer.prompts.source_process import SourceProcess, SourceSettings, drawn_twice, source_settings
from actors.buffer.prompts.source_worker import MAX_STATE_BYTES, Draw, Source
from actors.registry import hosted
from messages import BatchReady, BufferStarted, GroupsIssued, Plane, RolloutRequested, UserFunctionRaised
from runtime.bus.bus import Bus
from runtime.data.data_files import DataError
from runtime.functions.child import PRINTED_BYTES
from runtime.functions.limits import UserLimits
from runtime.functions.load import load
from runtime.functions.table import SOURCE_CLASS
from runtime.ledger.fold import LEDGER_EVENTS, LedgerState, fold
from runtime.ledger.state import GroupOutcome
from runtime.process.actor import InputError
from runtime.process.hosting import host
from runtime.settings.topology import Topology
from runtime.util.errors import flatten
from tests.build.events import completed, saved, trained
from tests.build.topology import topology_with
from tests.support import curriculum
from tests.support.rollout import announcement

MODEL = Path(__file__).resolve().parents[4] / "topologies/demo/models/reverse-digits"
COUNTER = """
import os, sys, time

def scrawl():
    for fd in range(3, 9):
        try:
            os.write(fd, b"x" * 99)
        except OSError:
            pass

async def later():
    return {{}}

class Source:
    def __init__(self):
        self.seen = []

    def draw(self, number):
        {draw}
        return {{"input": str(number), "seen": len(self.seen)}}

    def told(self, outcome):
        self.seen.append([outcome.number, outcome.kind, outcome.reward, outcome.reason])

    def state(self):
        {state}

    def restore(self, state):
        self.seen = state
"""


def settings_of(tmp_path: Path, draw: str = "pass", state: str = "return self.seen", **fields: Any) -> SourceSettings:
    file = tmp_path / "mine.py"
    file.write_text(COUNTER.format(draw=draw, state=state))
    limits = UserLimits(env=("MY_KEY",))
    named = {"key": "data.0.source_class", "value": f"{file}:Source", "limits": limits}
    return SourceSettings(**{**named, "timeout_s": 30.0, **fields})


def kept(number: int, reward: float = 1.0) -> GroupOutcome:
    return GroupOutcome(number=number, kind="kept", rewards=(reward, 0.0))


def test_a_class_goes_on_from_a_state_in_another_process(tmp_path: Path) -> None:
    with SourceProcess(settings_of(tmp_path, draw='print("printed"); os.write(1, b"x")')) as source:
        first = source.draw(0, 2)
        second = source.draw(2, 1, (kept(0), GroupOutcome(number=1, kind="dropped", reason="r")), state=first.state)
        assert second.state is not None
        assert msgspec.json.decode(second.state.content) == [[0, "kept", 0.5, ""], [1, "dropped", None, "r"]]
        pid = source.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        third = source.draw(3, 1, (kept(2),), state=second.state)
        assert msgspec.json.decode(third.rows[0]) == {"input": "3", "seen": 3}
        assert source.pid not in (None, pid)
        again = source.draw(3, 1, (), state=first.state)  # what was drawn for an issue that never was is forgotten
        assert msgspec.json.decode(again.rows[0]) == {"input": "3", "seen": 0}


@pytest.mark.parametrize(
    ("draw", "state", "said"),
    [
        ("1 / 0", "return 1", "draw(0): raised ZeroDivisionError: division by zero\nTraceback"),
        ("sys.exit(3)", "return 1", "draw(0): raised SystemExit: 3"),
        ("return 7", "return 1", "draw(0): expected a dict, the columns of a row, and got int"),
        ("return {'a': object()}", "return 1", "draw(0): column 'a': expected a value that JSON brings back as it is"),
        ("return {'a': 1, 'label': float('nan')}", "return 1", "draw(0): column 'label': expected a value that JSON"),
        ("return {'a': (1, 2)}", "return 1", "draw(0): column 'a': expected a value that JSON brings back as it is"),
        ("return {1: 2}", "return 1", "draw(0): expected a value that JSON brings back as it is: objects with text"),
        ("return later()", "return 1", "draw(0): returned a coroutine, which would have to run first"),
        ("pass", "return (1, 2)", "state(): expected bytes, or a value that JSON brings back as it is"),
        ("pass", "return float('nan')", "state(): expected bytes, or a value that JSON brings back as it is"),
        ("pass", "return {1: 2}", "state(): expected bytes, or a value that JSON brings back as it is"),
        ("pass", f"return bytes({MAX_STATE_BYTES + 1})", f"state(): has {MAX_STATE_BYTES + 1} bytes, and at most"),
    ],
)
def test_what_a_class_does_wrong_is_told(tmp_path: Path, draw: str, state: str, said: str) -> None:
    settings = settings_of(tmp_path, draw, state)
    loaded = load(SOURCE_CLASS, settings.key, settings.value).function
    drawn = Source(loaded, settings.value, settings.hello).answer(Draw(first=0, count=1))
    assert f"{drawn.error}\n{drawn.trace}".startswith(said)
    assert not drawn.rows


def test_a_process_that_dies_again_or_breaks_its_pipe_is_named(tmp_path: Path) -> None:
    with SourceProcess(settings_of(tmp_path, "os._exit(4)"), max_tries=2) as source:
        with pytest.raises(DataError, match=r"Source: drawing row 0: its process exited with code 4, 2 times"):
            source.draw(0, 1)
    with SourceProcess(settings_of(tmp_path, "scrawl()")) as source:
        with pytest.raises(DataError, match=r"drawing rows 0 to 0: it wrote to the pipe of its process"):
            source.draw(0, 1)


def test_a_class_that_ends_its_process_while_it_is_imported_cannot_be_used(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    with (tmp_path / "mine.py").open("a") as file:
        file.write("os._exit(3)")
    with SourceProcess(settings) as source, pytest.raises(DataError, match="loading it: its process exited with code"):
        source.start()


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("async def told(self, outcome): pass", "Source.told is async; a plain method is needed here"),
        ("def told(self, outcome): yield", "Source.told is a generator: write it without yield"),
        ("told = 7", "Source has no method told"),
    ],
)
def test_a_method_that_would_not_run_is_refused(tmp_path: Path, told: str, said: str) -> None:
    settings = settings_of(tmp_path)
    with (tmp_path / "mine.py").open("a") as file:
        file.write(f"\n    {told}\n")
    with SourceProcess(settings) as source, pytest.raises(DataError, match=said):
        source.start()


def test_a_trial_says_whether_the_class_gets_outcomes(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    assert drawn_twice(settings, 10).note == "it gets outcomes by told()"
    (tmp_path / "mine.py").write_text((tmp_path / "mine.py").read_text().replace("def told(", "def tolled("))
    assert drawn_twice(settings, 10).note == "it has no method told, so it gets no outcomes"


def test_an_answer_that_is_ready_counts_although_this_process_was_stopped_past_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.functions.child._Output.feed", lambda *_: time.sleep(1.0))
    settings = settings_of(tmp_path, draw="os.write(2, b'x'); time.sleep(0.1)", timeout_s=0.8)
    with SourceProcess(settings) as source:
        assert len(source.draw(0, 1).rows) == 1


def test_what_a_class_gets_of_the_environment_and_what_it_may_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("SSL_CERT_FILE", "PHYSARUM_AGENT", "MY_KEY", "SECRET"):
        monkeypatch.setenv(name, "x")
    draw = "os.write(2, b'y' * 200_000); return {'names': sorted(n for n in os.environ if os.environ[n] == 'x')}"
    with SourceProcess(settings_of(tmp_path, draw=draw)) as source:
        (row,) = source.draw(0, 1).rows
    assert msgspec.json.decode(row) == {"names": ["MY_KEY", "PHYSARUM_AGENT", "SSL_CERT_FILE"]}
    printed = capfd.readouterr().err
    assert printed.count("y") == PRINTED_BYTES
    assert "(further output is left out: " in printed


def test_a_class_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    seconds = f"99.{os.getpid()}"  # no other session of tests starts the same command
    draw = f"__import__('subprocess').Popen(['sleep', '{seconds}']); time.sleep(99)"
    with SourceProcess(settings_of(tmp_path, draw, timeout_s=1.0)) as source:
        source.start()
        assert source.pid is not None
        process = psutil.Process(source.pid)
        with pytest.raises(DataError, match=r"drawing rows 0 to 0 took longer than 1 s \(data.0.timeout_s\)"):
            source.draw(0, 1)
        assert not process.is_running()
    started = [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", seconds]]
    _, alive = psutil.wait_procs(started, timeout=200)  # a killed process may take a moment to go
    assert not alive


def test_a_class_whose_state_lacks_something_is_found(tmp_path: Path) -> None:
    assert len(drawn_twice(settings_of(tmp_path), 40).rows) == 40
    with pytest.raises(DataError, match=r"row 20 differs between two runs .* went on from its state"):
        drawn_twice(settings_of(tmp_path, state="return []"), 40)


def test_a_class_gets_the_rows_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"input": "7"}\n{"input": "8"}\n')
    file = tmp_path / "mine.py"
    text = COUNTER.format(draw="return self.files['a'][number]", state="return 1")
    file.write_text(text.replace("def __init__(self):", "def __init__(self, files):\n        self.files = files"))
    data = [{"name": "d", "source_class": f"{file}:Source", "files": {"a": str(tmp_path / "rows.jsonl")}}]
    settings = source_settings(topology_with(data=data))
    assert settings is not None
    with SourceProcess(settings) as source:
        assert [msgspec.json.decode(row) for row in source.draw(0, 2).rows] == [{"input": "7"}, {"input": "8"}]


# A buffer on a class


@pytest.fixture
def topology() -> Topology:
    data = [{"name": "d", "source_class": f"{curriculum.__file__}:Curriculum", "rm_type": "exact_match"}]
    rollout = {"rollout_batch_size": 4, "n_samples_per_prompt": 1, "max_response_len": 8}
    return topology_with(
        model={"hf_checkpoint": str(MODEL)}, data=data, rollout=rollout, train={"num_steps": 6, "save_interval": 1}
    )


class Others:
    """Rollout actor and trainer in one: complete each task with the reward of its row, and train each batch."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.rows: dict[int, dict[str, Any]] = {}  # by prompt number
        self.num_events = 0
        self.state = LedgerState()

    async def run(self, num_steps: int, happened: Any) -> None:
        async with (
            self.bus.read(*LEDGER_EVENTS) as events,
            self.bus.consume(RolloutRequested, durable="t", ack_wait_s=30, max_ack_pending=64) as tasks,
        ):
            await self.bus.publish(announcement(1))
            while self.state.trained_steps < num_steps:
                received = await events.next(20)
                assert received is not None
                event = received.message
                fold(self.state, event, received.seq)
                self.num_events += 1
                if isinstance(event, GroupsIssued):
                    await self.complete(event, tasks)
                elif isinstance(event, BatchReady):
                    step = event.step + 1
                    await self.bus.publish(trained(event.step))
                    await self.bus.publish(saved(step, step))
                    await self.bus.publish(announcement(step + 1, step=step))
                await happened(event)

    async def complete(self, event: GroupsIssued, tasks: Any) -> None:
        found = dict[int, Any]()
        while len(found) < len(event.groups):
            delivery = await tasks.next(20)
            assert delivery is not None
            found[delivery.message.group_id] = delivery
        for issued in event.groups:
            metadata = found[issued.group_id].message.prompt.metadata
            self.rows[issued.prompt] = metadata
            await self.bus.publish(completed(issued.group_id, issued.attempt, reward=curriculum.reward_of(metadata)))
            await found[issued.group_id].ack()


async def rows_with_kills(bus: Bus, topology: Topology, run_dir: Path, kills: int) -> list[dict[str, Any]]:
    """Let a buffer issue six rounds, and end it again and again at random events."""
    others, random = Others(bus), Random(kills)
    restart = anyio.Event()
    left = kills

    async def happened(event: Any) -> None:
        nonlocal left
        if left and not isinstance(event, BufferStarted) and random.random() < 0.6:
            left -= 1
            restart.set()

    async def buffers() -> None:
        nonlocal restart
        while True:
            async with anyio.create_task_group() as group:
                group.start_soon(host, bus, [hosted("buffer", topology, run_dir)])
                await restart.wait()
                restart = anyio.Event()
                group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(buffers)
        await others.run(6, happened)
        group.cancel_scope.cancel()
    assert left == 0
    assert others.state.books().closed
    return [others.rows[number] for number in sorted(others.rows)]


@pytest.mark.anyio
async def test_a_curriculum_by_outcome_goes_on_where_a_killed_buffer_left_it(
    bus: Bus, topology: Topology, tmp_path: Path
) -> None:
    rows = await rows_with_kills(bus, topology, tmp_path, kills=5)
    assert rows[:24] == curriculum.expected(6, 4)
    assert len({row["level"] for row in rows}) > 2  # it has risen
    assert len({row["item"] for row in rows[:24]}) < 24  # and drawn missed items again


async def error_of(bus: Bus, topology: Topology, run_dir: Path) -> str:
    with pytest.raises(ExceptionGroup) as caught, anyio.fail_after(200):
        await host(bus, [hosted("buffer", topology, run_dir)])
    (error,) = flatten(caught.value)
    assert isinstance(error, InputError)
    return str(error)


@pytest.mark.anyio
async def test_a_class_that_raises_later_ends_the_run_with_the_call_and_the_user_s_traceback(
    bus: Bus, topology: Topology, tmp_path: Path
) -> None:
    draw = "assert number < 3, 'no more'"
    value = settings_of(tmp_path, draw).value
    data = (msgspec.structs.replace(topology.data[0], source_class=value),)
    await bus.publish(announcement(1))
    error = await error_of(bus, msgspec.structs.replace(topology, data=data), tmp_path)
    assert error.endswith("mine.py:Source: draw(3): raised AssertionError: no more")
    async with bus.read(UserFunctionRaised) as events:
        raised = await events.next(40)
    assert raised is not None
    frames = raised.message.traceback.splitlines()
    assert "mine.py" in frames[1]  # the user's own comes first
    assert "assert number < 3" in frames[2]


@pytest.mark.anyio
async def test_a_run_on_a_class_is_not_resumed_on_a_file(bus: Bus, topology: Topology, tmp_path: Path) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(host, bus, [hosted("buffer", topology, tmp_path)])
        await bus.publish(announcement(1))
        async with bus.read(GroupsIssued) as events:
            received = await events.next(20)
        assert received is not None
        assert received.message.draws
        group.cancel_scope.cancel()
    (tmp_path / "rows.jsonl").write_text('{"input": "1"}\n')
    data = ({"name": "d", "path": str(tmp_path / "rows.jsonl"), "rm_type": "exact_match"},)
    other = topology_with(model={"hf_checkpoint": str(MODEL)}, data=data)
    assert (await error_of(bus, other, tmp_path)).startswith("buffer: this run began with data.source_class, and would")
    await bus.purge(Plane.DATA, below_seq=2**32)
    assert "the state of the data source is lost" in await error_of(bus, topology, tmp_path)
