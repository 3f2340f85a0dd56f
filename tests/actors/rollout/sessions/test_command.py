"""A program plays samples: through the listener, over halts, in attempts of its own, and it never stays behind."""

import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from actors.sessions.listener import ListenerSettings, listening
from actors.sessions.programs import HolderSettings, holding
from messages import (
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupsClosed,
    RolloutRequested,
    RoundHalted,
    SampleStatus,
    Score,
    ScoreRequested,
    ScoresGiven,
)
from runtime.bus.bus import Bus
from runtime.settings.topology import Topology
from tests.actors.rollout.samples.test_conversation import one_sample, segments_of
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.rollout import announcement, completed, grade, next_event, rollout_actor
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[4]
MODEL = ROOT / "topologies" / "demo" / "models" / "reverse-digits"
AGENT = Path(__file__).with_name("two_turns.py")
END, USER, ASSISTANT, FOUR, SEVEN, ONE = 1, 2, 3, 10, 13, 7  # tokens of the model
FIRST = [FOUR, SEVEN, END]  # the first turn, of the second one too: "47"


def agent_topology(tmp_path: Path, **agent: Any) -> Topology:
    table = {"command": [sys.executable, str(AGENT)], "sandbox": "process", **agent}
    return topology_with(
        run={"name": "t", "dir": str(tmp_path)},
        model={"hf_checkpoint": str(MODEL)},
        rollout={"agent": table, "max_response_len": 32},
    )


def row(tmp_path: Path, *, breaks: int = 0, **of_task: Any) -> RolloutRequested:
    given = one_sample(max_new_tokens=48, **of_task)
    metadata = {"notes": str(tmp_path / "notes"), "breaks": breaks}
    prompt = msgspec.structs.replace(given.prompt, text="47", metadata=metadata, label="secret")
    return msgspec.structs.replace(given, prompt=prompt)


def notes(tmp_path: Path) -> list[str]:
    file = tmp_path / "notes"
    return [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []


def scripted(**knobs: Any) -> ScriptedEngine:
    return ScriptedEngine(script=lambda _prompt, _params: FIRST, **knobs)


@asynccontextmanager
async def listener(tmp_path: Path) -> AsyncGenerator[None]:
    (tmp_path / "t").mkdir(exist_ok=True)
    run_dir = tmp_path / "t"
    async with holding(run_dir, HolderSettings()), listening(run_dir, ListenerSettings()):
        yield


async def ended(
    bus: Bus, router_url: str, tmp_path: Path, topology: Topology, given: RolloutRequested | None = None
) -> tuple[GroupFailed | GroupCompleted, ScriptedEngine]:
    """Have a program play a group; return how that ended, and the engine that answered it."""
    async with serving(scripted()) as engine, listener(tmp_path):
        async with rollout_actor(bus, router_url, [engine], topology):
            await bus.publish(announcement(1))
            await bus.publish(given or row(tmp_path))
            event, _ = await next_event(bus, GroupFailed, GroupCompleted)
    assert isinstance(event, GroupFailed | GroupCompleted)
    return event, engine


async def test_a_program_plays_a_sample_whose_tokens_are_those_sampled_and_its_last_message_is_graded(
    bus: Bus, router_url: str, tmp_path: Path
) -> None:
    async with serving(scripted()) as engine, listener(tmp_path):
        async with (
            rollout_actor(bus, router_url, [engine], agent_topology(tmp_path)),
            bus.consume(ScoreRequested, durable="reward") as requests,
        ):
            await bus.publish(announcement(1))
            await bus.publish(row(tmp_path))
            scored = await requests.next(40)
            assert scored is not None
            request = scored.message
            scores = (Score(index=0, reward=1.0 if request.items[0].response == "47" else 0.0),)
            await bus.notify(ScoresGiven(request_id=request.request_id, scores=scores), to=request.reply_to)
            await scored.ack()
            event = await completed(bus)
    (sample,) = event.samples
    segments = await segments_of(bus, sample)
    assert [segment.prompt_ids.tolist() for segment in segments] == [
        [USER, FOUR, SEVEN, ASSISTANT],
        [USER, ONE, ASSISTANT],  # 4 + 7 ends with 1
    ]
    assert [segment.response_ids.tolist() for segment in segments] == [FIRST, FIRST]
    assert (sample.status, sample.reward, sample.metadata["num_turns"]) == (SampleStatus.COMPLETED, 1.0, 2)
    assert sample.metadata["agent_s"] > 0
    assert engine.requests[1]["input_ids"] == [USER, FOUR, SEVEN, ASSISTANT, *FIRST, USER, ONE, ASSISTANT]


async def test_a_program_plays_on_over_halts_and_is_never_told(bus: Bus, router_url: str, tmp_path: Path) -> None:
    """Its first request is held over one halt, its second one over another."""
    engine = scripted(hold=True)
    async with serving(engine), listener(tmp_path), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], agent_topology(tmp_path)):
            await bus.publish(announcement(1))
            await bus.publish(row(tmp_path))
            carried, seq = (), 0
            for round in range(2):
                await engine.wait_for_requests(2 * round + 1)
                await bus.publish(RoundHalted(incarnation=1, round=round))
                aborted, seq = await next_event(bus, GroupAborted, GroupFailed, from_seq=seq + 1)
                assert isinstance(aborted, GroupAborted)
                assert aborted.held == 1
                carried = aborted.samples
                await bus.publish(row(tmp_path, attempt=round + 1, round=round + 1, carried=carried))
                await engine.wait_for_requests(2 * round + 2)
                engine.release_one()
            event = await completed(bus)
        group.cancel_scope.cancel()
    assert notes(tmp_path) == ["starts", "ends"]
    (sample,) = event.samples
    assert (event.attempt, sample.status, sample.metadata["num_turns"]) == (2, SampleStatus.COMPLETED, 2)
    assert len(engine.requests) == 4


async def test_a_program_that_exits_with_an_error_is_started_anew(bus: Bus, router_url: str, tmp_path: Path) -> None:
    """Its first attempt breaks; there is no reward of 0."""
    async with serving(scripted()) as engine, listener(tmp_path), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], agent_topology(tmp_path)):
            await bus.publish(announcement(1))
            await bus.publish(row(tmp_path, breaks=1))
            event = await completed(bus)
        group.cancel_scope.cancel()
    assert notes(tmp_path) == ["starts", "starts", "ends"]
    assert event.samples[0].reward == 1.0


async def test_the_reason_of_the_last_failed_attempt_is_that_of_the_sample(
    bus: Bus, router_url: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", "import os, sys; sys.exit(f'no way in, {os.environ[\"OPENAI_API_KEY\"]}')"]
    failed, _ = await ended(bus, router_url, tmp_path, agent_topology(tmp_path, command=command, attempts=2))
    assert isinstance(failed, GroupFailed)
    program = f"{sys.executable} exited with code 1: no way in, ***"
    assert failed.reason == f"rollout.agent: aborted 2 times, last: {program}"


async def test_the_time_of_a_program_is_bounded_and_that_of_the_model_does_not_count(
    bus: Bus, router_url: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(3600)"]
    failed, _ = await ended(bus, router_url, tmp_path, agent_topology(tmp_path, command=command, episode_timeout_s=0.5))
    assert isinstance(failed, GroupFailed)
    assert "rollout.agent: took more than 0.5 s" in failed.reason


def pid_of_agent(tmp_path: Path) -> int:
    return int((tmp_path / "notes").read_text().split()[1])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_the_program_of_a_dropped_group_is_killed(bus: Bus, router_url: str, tmp_path: Path) -> None:
    engine = scripted(hold=True)
    async with serving(engine), listener(tmp_path):
        async with rollout_actor(bus, router_url, [engine], agent_topology(tmp_path)):
            await bus.publish(announcement(1))
            await bus.publish(row(tmp_path))
            await engine.wait_for_requests(1)
            await bus.publish(RoundHalted(incarnation=1, round=0))
            await next_event(bus, GroupAborted)
            pid = pid_of_agent(tmp_path)
            assert is_alive(pid)
            await bus.publish(GroupsClosed(incarnation=1, group_ids=(0,), outcome="dropped", reason="halted"))
            await eventually(lambda: not is_alive(pid))


async def test_a_program_of_an_actor_that_ended_is_started_anew_for_its_group(
    bus: Bus, router_url: str, tmp_path: Path
) -> None:
    """The first turn of the earlier program is forgotten: nobody could go on from it."""
    engine = scripted(hold=True)
    async with serving(engine), listener(tmp_path), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], agent_topology(tmp_path)):
            await bus.publish(announcement(1))
            await bus.publish(row(tmp_path))
            await engine.wait_for_requests(1)
            engine.release_one()
            await engine.wait_for_requests(2)
            await bus.publish(RoundHalted(incarnation=1, round=0))
            aborted, _ = await next_event(bus, GroupAborted)
            assert isinstance(aborted, GroupAborted)
            pid = pid_of_agent(tmp_path)
        assert not is_alive(pid)
        engine.release()
        async with rollout_actor(bus, router_url, [engine], agent_topology(tmp_path)):
            await bus.publish(row(tmp_path, attempt=1, round=1, carried=aborted.samples))
            event = await completed(bus)
        group.cancel_scope.cancel()
    assert notes(tmp_path) == ["starts", "starts", "ends"]
    (sample,) = event.samples
    assert [segment.response_ids.tolist() for segment in await segments_of(bus, sample)] == [FIRST, FIRST]


async def test_keys_and_labels_reach_nobody_else(bus: Bus, router_url: str, tmp_path: Path) -> None:
    """A key is in the environment of its program alone: no command line and no file has it, and no row a label."""
    engine = scripted(hold=True)
    async with serving(engine), listener(tmp_path):
        async with rollout_actor(bus, router_url, [engine], agent_topology(tmp_path)):
            await bus.publish(announcement(1))
            await bus.publish(row(tmp_path))
            await engine.wait_for_requests(1)
            check_what_is_seen(pid_of_agent(tmp_path), tmp_path / "t")


def check_what_is_seen(pid: int, run_dir: Path) -> None:
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    given = dict(word.partition(b"=")[::2] for word in environment)
    key, file = given[b"OPENAI_API_KEY"], Path(os.fsdecode(given[b"PHYSARUM_ROW"]))
    lines = [content_of(place) for place in Path("/proc").glob("[0-9]*/cmdline")]
    texts = [place.read_bytes() for place in run_dir.rglob("*") if place.is_file()]
    assert key.startswith(b"physarum-")
    assert not [text for text in (*lines, *texts, file.read_bytes()) if key in text]
    assert file.stat().st_mode & 0o777 == 0o600
    assert b"secret" not in file.read_bytes()
    assert b"PYTHONPATH" not in given


def content_of(place: Path) -> bytes:
    try:
        return place.read_bytes()
    except OSError:  # the process has ended
        return b""
