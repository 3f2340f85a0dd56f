"""Turns go over the link, and both ends may die: no turn is sampled twice, and none waits without an end."""

import stat
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup

from runtime.sessions.keys import KeyPair, session_of
from runtime.sessions.link import SOCKET_FILE, Unavailable
from runtime.sessions.listener_end import ListenerEnd
from runtime.sessions.turns import ChatMessage, TurnAnswer, TurnRefused, TurnRequest
from tests.support.scripted_sessions import ScriptedSessions, connected

HI = TurnRequest((ChatMessage("user", "hi"),))


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test, which fails if it waits."""

    async def limited() -> None:
        with anyio.fail_after(200):
            await test()

    anyio.run(limited)


@asynccontextmanager
async def listening(run_dir: Path, hold_s: float = 20, turn_s: float = 20) -> AsyncGenerator[ListenerEnd]:
    end = ListenerEnd(run_dir, hold_s=hold_s, turn_s=turn_s)
    end.url = "http://here"
    async with anyio.create_task_group() as tasks:
        await tasks.start(end.serve)
        yield end
        tasks.cancel_scope.cancel()


def ask(tasks: TaskGroup, end: ListenerEnd, number: str, answers: dict[str, Any]) -> None:
    """Ask for a turn in the background; its outcome comes into `answers`."""

    async def asking() -> None:
        try:
            answers[number] = await end.turn(number, "s1", HI, lambda: None)
        except (TurnRefused, Unavailable) as error:
            answers[number] = error

    tasks.start_soon(asking)


def test_calls_are_answered(tmp_path: Path) -> None:
    async def test() -> None:
        sessions = ScriptedSessions("s1")
        accepted = list[str]()
        async with listening(tmp_path) as end, connected(tmp_path, sessions) as actor:
            assert await actor.url() == "http://here"
            assert stat.S_IMODE((tmp_path / SOCKET_FILE).stat().st_mode) == 0o600
            answer = await end.turn("t1", "s1", HI, lambda: accepted.append("t1"))
            assert isinstance(answer, TurnAnswer)
            assert answer.message.text == "hi"
            assert accepted == ["t1"]
            assert await end.count("t2", "s1", HI) == 1
            assert await end.control("t3", "s1", "show", {}) == {"num_turns": 1}
            assert (end.model, end.max_tokens, end.num_waiting) == ("m", 4096, 0)

    run(test)


def test_a_refusal_comes_with_its_numbers(tmp_path: Path) -> None:
    async def test() -> None:
        refused = TurnRefused("context_full", "too long", num_tokens=9, max_tokens=8)
        sessions = ScriptedSessions("s1", script=lambda request: refused)
        async with listening(tmp_path) as end, connected(tmp_path, sessions):
            with pytest.raises(TurnRefused) as raised:
                await end.turn("t1", "s1", HI, lambda: None)
        found = raised.value
        assert (found.kind, found.reason, found.num_tokens, found.max_tokens) == ("context_full", "too long", 9, 8)

    run(test)


def test_a_turn_waits_for_an_actor_that_died_and_is_asked_again_there(tmp_path: Path) -> None:
    async def test() -> None:
        first, second = ScriptedSessions("s1"), ScriptedSessions()
        second.pairs = first.pairs
        first.go = anyio.Event()
        answers = dict[str, Any]()
        async with listening(tmp_path) as end, anyio.create_task_group() as tasks:
            async with anyio.create_task_group() as asking:
                async with connected(tmp_path, first):
                    ask(asking, end, "t1", answers)
                    await first.until(lambda: len(first.turns) == 1)
                ask(asking, end, "t2", answers)  # while there is no actor
                await tasks.start(keep_connected, tmp_path, second)
            tasks.cancel_scope.cancel()
        assert answers["t1"].message.text == answers["t2"].message.text == "hi"
        assert len(first.turns) == 1

    run(test)


def test_a_turn_outlives_the_listener_and_is_joined_by_its_id(tmp_path: Path) -> None:
    async def test() -> None:
        sessions, answers = ScriptedSessions("s1"), dict[str, Any]()
        sessions.go = anyio.Event()
        async with anyio.create_task_group() as tasks:
            async with listening(tmp_path) as end:
                await tasks.start(keep_connected, tmp_path, sessions)
                async with anyio.create_task_group() as asking:
                    ask(asking, end, "t1", answers)
                    await sessions.until(lambda: len(sessions.turns) == 1)
                    asking.cancel_scope.cancel()
            async with listening(tmp_path) as end:
                assert await end.find(sessions.pairs["s1"].model.reveal()) == ("s1", "model")
                async with anyio.create_task_group() as asking:
                    ask(asking, end, "t1", answers)
                    assert await end.count("t2", "s1", HI) == 1  # comes after it
                    sessions.go.set()
                tasks.cancel_scope.cancel()
        assert answers["t1"].message.text == "hi"
        assert len(sessions.turns) == 1

    run(test)


async def keep_connected(run_dir: Path, sessions: ScriptedSessions, *, task_status: Any) -> None:
    async with connected(run_dir, sessions):
        task_status.started()
        await anyio.sleep_forever()


def test_a_call_ends_by_its_setting_and_names_the_actor(tmp_path: Path) -> None:
    async def test() -> None:
        sessions = ScriptedSessions("s1")
        async with listening(tmp_path, hold_s=0.2) as end:
            async with connected(tmp_path, sessions):
                pass
            with pytest.raises(Unavailable, match=r"rollout did not answer for session s1 within 0\.2 s \(hold_s\)"):
                await end.turn("t1", "s1", HI, lambda: None)
        sessions.go = anyio.Event()
        async with listening(tmp_path, turn_s=0.2) as end, connected(tmp_path, sessions):
            with pytest.raises(Unavailable, match=r"0\.2 s \(turn_s\)"):
                await end.turn("t1", "s1", HI, lambda: None)
            assert end.num_waiting == 0

    run(test)


def test_the_end_of_a_session_ends_what_waits_for_it(tmp_path: Path) -> None:
    async def test() -> None:
        sessions, answers, ended = ScriptedSessions("s1", "s2"), dict[str, Any](), list[str]()
        sessions.go = anyio.Event()
        key = sessions.pairs["s1"].model.reveal()
        async with listening(tmp_path) as end, connected(tmp_path, sessions), anyio.create_task_group() as tasks:
            end.on_end = ended.append
            ask(tasks, end, "t1", answers)
            await sessions.until(lambda: len(sessions.turns) == 1)
            await end.control("t2", "s1", "end", {})
            with pytest.raises(TurnRefused, match="ended") as refused:
                await end.find(key)
            assert refused.value.kind == "ended"
            assert (await end.find(sessions.pairs["s2"].control.reveal())) == ("s2", "control")
        assert answers["t1"].kind == "ended"
        assert ended == ["s1"]

    run(test)


def test_a_session_that_an_actor_does_not_name_after_its_death_has_ended(tmp_path: Path) -> None:
    async def test() -> None:
        sessions = ScriptedSessions("s1", "s2")
        key = sessions.pairs["s1"].model.reveal()
        async with listening(tmp_path) as end:
            async with connected(tmp_path, sessions):
                await end.turn("t1", "s1", HI, lambda: None)
            del sessions.pairs["s1"]
            async with connected(tmp_path, sessions):
                await end.turn("t2", "s2", HI, lambda: None)
                with pytest.raises(TurnRefused, match="ended"):
                    await end.find(key)

    run(test)


def test_wrong_keys_are_unknown(tmp_path: Path) -> None:
    async def test() -> None:
        sessions, others = ScriptedSessions("s1"), KeyPair.new("s1")
        key = sessions.pairs["s1"].model.reveal()
        async with listening(tmp_path, hold_s=0.1) as end:
            with pytest.raises(TurnRefused):  # held before an actor came, as the key may be one of its
                await end.find(key)
            async with connected(tmp_path, sessions):
                await end.turn("t1", "s1", HI, lambda: None)
                for wrong in (
                    others.model.reveal(),
                    key + "0",
                    key[:-1],
                    "",
                    "x",
                    "physarum-s9-1",
                    "physarum-\udcff-1",
                ):
                    with pytest.raises(TurnRefused) as refused:
                        await end.find(wrong)
                    assert refused.value.kind == "unknown_key"

    run(test)


async def until_closed(stream: anyio.abc.ByteReceiveStream) -> None:
    with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
        while True:
            await stream.receive()


def test_what_speaks_otherwise_is_cut_and_the_link_goes_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with listening(tmp_path) as end, connected(tmp_path, ScriptedSessions("s1")):
            for sent in (b"\xff" * 64, b"\0\0\0\1x"):
                async with await anyio.connect_unix(tmp_path / SOCKET_FILE) as stream:
                    await stream.send(sent)
                    await until_closed(stream)
            assert (await end.turn("t1", "s1", HI, lambda: None)).message.text == "hi"

    run(test)


def test_keys_name_their_session_and_hide_themselves() -> None:
    pair = KeyPair.new("r0.g1_2")
    assert session_of(pair.model.reveal()) == session_of(pair.control.reveal()) == "r0.g1_2"
    assert pair.model.reveal() != pair.control.reveal()
    assert "physarum" not in f"{pair}"
    for name in ("", "a-b", "a/b", "x" * 65):
        with pytest.raises(ValueError, match="no name of a session"):
            KeyPair.new(name)
