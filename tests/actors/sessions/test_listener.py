"""The listener: keys, joined requests, held connections, strangers."""

import io
import json
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from actors.sessions.listener import MAX_BODY_BYTES, ListenerSettings, listening
from runtime.bus.nats.certificate import own_certificate
from runtime.sessions.keys import KeyPair
from runtime.sessions.turns import TurnRefused
from tests.support.scripted_sessions import ScriptedSessions, connected

FAST = ListenerSettings(hold_every_s=0.05, first_byte_s=0.05)
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI = {"role": "user", "content": "hi"}


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": messages or (HI,)} | fields


class Door:
    """A listener with scripted sessions, and a client without a library of a vendor."""

    def __init__(self, run_dir: Path, url: str, sessions: ScriptedSessions, client: aiohttp.ClientSession) -> None:
        self.run_dir, self.url, self.sessions, self.client = run_dir, url, sessions, client
        self.headers: dict[str, str] = {}

    def key(self, session: str = "s1", use: str = "model") -> str:
        pair = self.sessions.pairs[session]
        return (pair.model if use == "model" else pair.control).reveal()

    async def send(self, method: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, bytes]:
        headers = self.headers or {"Authorization": f"Bearer {self.key() if key is None else key}"}
        data = io.BytesIO(body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode())
        async with self.client.request(method, self.url + path, data=data, headers=headers) as response:
            return response.status, await response.read()

    async def post(self, path: str, body: Any, key: str | None = None) -> tuple[int, bytes]:
        return await self.send("POST", path, body, key)


def with_door(
    run_dir: Path, test: Callable[[Door], Awaitable[None]], settings: ListenerSettings = FAST, **script: Any
) -> None:
    async def running() -> None:
        sessions = ScriptedSessions("s1", "s2", **script)
        with anyio.fail_after(200):
            async with opened(run_dir, sessions, settings) as door, connected(run_dir, sessions):
                await test(door)

    anyio.run(running)


@asynccontextmanager
async def opened(run_dir: Path, sessions: ScriptedSessions, settings: ListenerSettings) -> AsyncGenerator[Door]:
    async with listening(run_dir, settings) as url, aiohttp.ClientSession() as client:
        yield Door(run_dir, url, sessions, client)


async def together(*calls: Callable[[], Awaitable[Any]]) -> list[Any]:
    results: dict[int, Any] = {}

    async def one(index: int, call: Callable[[], Awaitable[Any]]) -> None:
        results[index] = await call()

    async with anyio.create_task_group() as tasks:
        for index, call in enumerate(calls):
            tasks.start_soon(one, index, call)
    return [results[index] for index in range(len(calls))]


def test_each_path_answers_in_its_dialect(tmp_path: Path) -> None:
    async def test(door: Door) -> None:
        status, body = await door.post(CHAT, chat())
        assert (status, json.loads(body)["choices"][0]["message"]["content"]) == (200, "hi")
        status, body = await door.post(RESPONSES, {"model": "m", "input": "hello"})
        assert (status, json.loads(body)["output"][0]["content"][0]["text"]) == (200, "hello")
        for path in (MESSAGES, f"{MESSAGES}?beta=true"):
            status, body = await door.post(path, chat(max_tokens=5))
            assert (status, json.loads(body)["content"]) == (200, [{"type": "text", "text": "hi"}])
        status, body = await door.post(f"{MESSAGES}/count_tokens", chat())
        assert (status, json.loads(body)) == (200, {"input_tokens": 1})
        status, body = await door.post("/inference/v1/generate", {"token_ids": [1, 2]})
        assert (status, json.loads(body)["choices"][0]["token_ids"]) == (200, [5, 6, 2])
        status, body = await door.send("GET", "/v1/models")
        assert json.loads(body)["data"][0]["max_model_len"] == 4096

    with_door(tmp_path, test)


def test_a_key_comes_in_any_of_three_places(tmp_path: Path) -> None:
    async def test(door: Door) -> None:
        key = door.key()
        for headers in ({"Authorization": f"Bearer {key}"}, {"authorization": f"bearer {key}"}, {"x-api-key": key}):
            door.headers = headers
            assert (await door.post(CHAT, chat()))[0] == 200
        door.headers = {"x-other": "1"}
        assert (await door.post(f"/s/{key}{CHAT}", chat()))[0] == 200
        assert (await door.post(CHAT, chat()))[0] == 401

    with_door(tmp_path, test)


def test_each_key_does_what_it_is_for(tmp_path: Path) -> None:
    async def test(door: Door) -> None:
        model, control = door.key(), door.key("s1", "control")
        calls = [
            ("PUT", "/session/reward", {"reward": 1}),
            ("POST", "/session/end", {}),
            ("POST", "/session/fail", {"reason": "x"}),
            ("GET", "/session", None),
        ]
        for method, path, body in calls:
            assert (await door.send(method, path, body, model))[0] == 403
        for path in (CHAT, MESSAGES, RESPONSES):
            assert (await door.post(path, chat(), control))[0] == 403
        assert door.sessions.calls == []
        assert door.sessions.turns == []
        assert (await door.send("PUT", "/session/reward", {"reward": 0.5, "answer": "a"}, control))[0] == 200
        status, body = await door.send("GET", "/session", None, control)
        assert (status, json.loads(body)) == (200, {"num_turns": 0, "session": "s1", "dropped_tools": {}})
        for wrong in (
            {},
            {"reward": None},
            {"reward": "1"},
            {"reward": 1, "x": 1},
            b'{"reward": NaN}',
            b'{"reward": 1e999}',
        ):
            assert (await door.send("PUT", "/session/reward", wrong, control))[0] == 400
        assert (await door.post("/session/end", {}, control))[0] == 200
        assert [call[1:] for call in door.sessions.calls] == [
            ("reward", {"reward": 0.5, "rewards": None, "answer": "a", "turns": None}),
            ("show", {}),
            ("end", {"truncated": False}),
        ]
        assert (await door.post(CHAT, chat(), model))[0] == 410
        assert (await door.send("PUT", "/session/reward", {"reward": 1}, control))[0] == 410
        assert (await door.post(CHAT, chat(), door.key("s2")))[0] == 200

    with_door(tmp_path, test)


def test_unknown_keys_and_paths_have_the_errors_of_the_dialect(tmp_path: Path) -> None:
    async def test(door: Door) -> None:
        other = KeyPair.new("s1").model.reveal()
        status, body = await door.post(CHAT, chat(), other)
        assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
        status, body = await door.post(MESSAGES, chat(), other)
        assert (status, json.loads(body)["error"]["type"]) == (401, "authentication_error")
        assert (await door.post(CHAT, chat(), ""))[0] == 401
        status, body = await door.post(f"/s/{door.key()}/v1/embeddings", {})
        assert status == 404
        assert door.key() not in body.decode()
        assert (await door.send("GET", CHAT))[0] == 405
        for value in (1, 2**80):
            status, body = await door.post(CHAT, chat(logit_bias={"1": value}))
            assert (status, json.loads(body)["error"]["param"]) == (400, "logit_bias")
        tool = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 2**80}}}
        status, body = await door.post(CHAT, chat(tools=[tool]))
        assert (status, json.loads(body)["error"]["param"]) == (400, "tools")

    with_door(tmp_path, test)


def test_a_full_context_is_a_status_in_a_stream_too(tmp_path: Path) -> None:
    async def test(door: Door) -> None:
        status, body = await door.post(MESSAGES, chat(max_tokens=5, stream=True))
        assert (status, json.loads(body)["error"]["message"]) == (400, "prompt is too long: 9 tokens > 8 maximum")
        status, body = await door.post(CHAT, chat(stream=True))
        assert (status, json.loads(body)["error"]["code"]) == (400, "context_length_exceeded")

    refused = TurnRefused("context_full", "It does not fit.", num_tokens=9, max_tokens=8)
    with_door(tmp_path, test, script=lambda request: refused)


def test_the_same_body_in_flight_joins_the_turn(tmp_path: Path) -> None:
    async def test(door: Door) -> None:
        door.sessions.go = anyio.Event()
        first = chat(temperature=0.5)
        again = {"metadata": {"try": 2}, "temperature": 0.5, "model": "m", "messages": [HI]}

        async def release() -> None:
            await door.sessions.until(lambda: len(door.sessions.turns) == 2)  # the one of s1, and that of s2
            door.sessions.go.set()

        answers = await together(
            lambda: door.post(CHAT, first),
            lambda: door.post(CHAT, again),
            lambda: door.post(CHAT, chat(temperature=0.5, stream=True)),
            lambda: door.post(CHAT, first, door.key("s2")),
            release,
        )
        assert len(door.sessions.turns) == 2
        assert answers[0][1].strip() == answers[1][1].strip()
        ids = [json.loads(body)["id"] for _, body in (answers[0], answers[1], answers[3])]
        assert ids[0] == ids[1] != ids[2]
        assert ids[0].encode() in answers[2][1]

    with_door(tmp_path, test)


def test_an_answer_is_repeated_until_the_conversation_goes_on(tmp_path: Path) -> None:
    async def test(door: Door) -> None:
        door.sessions.go = anyio.Event()
        with anyio.move_on_after(0.3):
            await door.post(CHAT, chat())  # its client leaves
        assert len(door.sessions.turns) == 1
        door.sessions.go.set()
        _, first = await door.post(CHAT, chat())
        _, second = await door.post(CHAT, chat())
        assert first == second
        assert len(door.sessions.turns) == 1
        answered = json.loads(first)["choices"][0]["message"]
        await door.post(CHAT, chat(HI, answered, {"role": "user", "content": "more"}))
        assert len(door.sessions.turns) == 2
        _, sibling = await door.post(CHAT, chat())
        assert len(door.sessions.turns) == 3
        assert json.loads(sibling)["id"] != json.loads(first)["id"]

    with_door(tmp_path, test)


def test_a_delivered_answer_is_not_repeated_for_ever(tmp_path: Path) -> None:
    async def test(door: Door) -> None:
        await door.post(CHAT, chat())
        await anyio.sleep(1.1)  # the time of an answer has whole seconds
        await door.post(CHAT, chat())
        assert len(door.sessions.turns) == 2

    with_door(tmp_path, test, ListenerSettings(repeat_s=0))


def test_several_answers_to_one_request_are_turns_of_their_own(tmp_path: Path) -> None:
    async def test(door: Door) -> None:
        _, body = await door.post(CHAT, chat(n=3))
        assert [choice["index"] for choice in json.loads(body)["choices"]] == [0, 1, 2]
        assert len(door.sessions.turns) == 3

    with_door(tmp_path, test)


@pytest.mark.parametrize("accepts", [True, False])
@pytest.mark.parametrize(
    ("path", "fields", "held"),
    [
        (CHAT, {}, b" "),
        (CHAT, {"stream": True}, b": held\n\n"),
        (MESSAGES, {"max_tokens": 5}, b" "),
        (MESSAGES, {"max_tokens": 5, "stream": True}, b"event: ping\n"),
        (RESPONSES, {"stream": True, "input": "hi"}, b"event: response.created\n"),
    ],
)
def test_a_connection_is_held_while_the_actor_is_away(
    tmp_path: Path, path: str, fields: dict[str, Any], held: bytes, accepts: bool
) -> None:
    async def running() -> None:
        first, second = ScriptedSessions("s1"), ScriptedSessions()
        second.pairs = first.pairs
        first.go, first.accepts = anyio.Event(), accepts
        async with opened(tmp_path, first, FAST) as door:
            headers = {"Authorization": f"Bearer {door.key()}"}
            body = json.dumps(chat(**fields)).encode()
            async with connected(tmp_path, first):
                response = await door.client.post(door.url + path, data=body, headers=headers)
                assert await response.content.readexactly(len(held)) == held
            async with connected(tmp_path, second):
                rest = await response.content.read()
            assert response.status == 200
            if "stream" in fields:
                assert b"hi" in rest
            else:
                assert json.loads(rest)["model"] == "m"

    async def limited() -> None:
        with anyio.fail_after(200):
            await running()

    anyio.run(limited)


def test_what_fails_after_the_first_byte_ends_with_an_error_or_a_cut(tmp_path: Path) -> None:
    settings = ListenerSettings(hold_every_s=0.05, first_byte_s=0.05, turn_s=0.3)

    async def test(door: Door) -> None:
        door.sessions.go = anyio.Event()
        status, body = await door.post(CHAT, chat(stream=True))
        assert status == 200
        assert b'data: {"error"' in body
        assert b"[DONE]" not in body
        status, body = await door.post(MESSAGES, chat(max_tokens=5, stream=True))
        assert b"event: error\n" in body
        with pytest.raises(aiohttp.ClientPayloadError):
            await door.post(CHAT, chat())

    with_door(tmp_path, test, settings)


def test_without_an_actor_the_status_says_that_a_client_may_try_again(tmp_path: Path) -> None:
    async def running() -> None:
        sessions = ScriptedSessions("s1")
        async with opened(tmp_path, sessions, ListenerSettings(hold_s=0.2)) as door:
            async with connected(tmp_path, sessions):
                assert (await door.post(CHAT, chat()))[0] == 200
            async with door.client.post(
                door.url + CHAT, json=chat(n=2), headers={"Authorization": f"Bearer {door.key()}"}
            ) as response:
                assert (response.status, response.headers["x-should-retry"]) == (503, "true")
                assert "rollout did not answer for session s1" in await response.text()

    anyio.run(running)


def test_bodies_are_bounded(tmp_path: Path) -> None:
    async def test(door: Door) -> None:
        limit = 1024 * 1024 + 32 * 4096

        async def endless() -> AsyncGenerator[bytes]:
            for _ in range(50):
                yield b" " * (1 << 20)

        large = json.dumps(chat({"role": "user", "content": "x" * (limit - 100)})).encode()
        assert (await door.post(CHAT, large))[0] == 200
        headers = {"Authorization": f"Bearer {door.key()}"}
        for body in (io.BytesIO(large + b" " * 200), io.BytesIO(b" " * MAX_BODY_BYTES), endless()):
            try:
                async with door.client.post(door.url + CHAT, data=body, headers=headers) as response:
                    assert response.status == 413
            except aiohttp.ClientOSError:  # it was cut while it sent
                pass
        async with door.client.post(
            door.url + CHAT, data=b"x", headers=headers | {"Content-Encoding": "gzip"}
        ) as response:
            assert response.status == 400
        assert (await door.post(CHAT, chat()))[0] == 200

    with_door(tmp_path, test)


def test_connections_of_one_session_leave_places_to_others(tmp_path: Path) -> None:
    settings = ListenerSettings(hold_every_s=0.05, first_byte_s=0.05, connections_per_session=4)

    async def test(door: Door) -> None:
        door.sessions.go = anyio.Event()
        cut = list[int]()

        async def one(number: int) -> None:
            try:
                await door.post(CHAT, chat({"role": "user", "content": str(number)}))
            except aiohttp.ClientError:
                cut.append(number)
                if len(cut) == 2:
                    door.sessions.go.set()

        async def other() -> None:
            await door.sessions.until(lambda: len(door.sessions.turns) >= 6)
            status, _ = await door.post(CHAT, chat(stream=True), door.key("s2"))
            assert status == 200

        await together(*(lambda number=number: one(number) for number in range(6)), other)
        assert len(cut) == 2

    with_door(tmp_path, test, settings)


def test_a_host_beyond_loopback_needs_a_certificate() -> None:
    with pytest.raises(ValueError, match="this machine alone"):
        ListenerSettings(host="0.0.0.0")
    with pytest.raises(ValueError, match="set both"):
        ListenerSettings(certificate="c.pem")


def test_with_a_certificate_agents_speak_tls(tmp_path: Path) -> None:
    place = tmp_path / "certificate"
    place.mkdir(mode=0o700)
    certificate = own_certificate(place)
    settings = ListenerSettings(certificate=str(certificate.certificate), private_key=str(certificate.key))
    trusting = ssl.create_default_context(cadata=certificate.pem())
    trusting.check_hostname = False

    async def test(door: Door) -> None:
        assert door.url.startswith("https://127.0.0.1:")
        headers = {"x-api-key": door.key()}
        async with door.client.get(f"{door.url}/v1/models", headers=headers, ssl=trusting) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await door.client.get(f"{door.url}/v1/models", headers=headers)

    with_door(tmp_path, test, settings)
