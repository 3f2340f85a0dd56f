"""Programs wait for a turn while the rollout actor is killed, or the process that holds them is stopped."""

import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
from aiohttp import web

from messages import ActorExited, GroupFailed
from runtime.data.dump_files import read_pair
from tests.chaos.audit import audit, read_all
from tests.chaos.harness import ROOT, Run
from tests.support.tiny_engine import running_engine

pytestmark = [pytest.mark.chaos, pytest.mark.anyio]

MODEL = ROOT / "topologies/demo/models/reverse-digits"
FLAGS = ("--load-format", "dummy", "--max-running-requests", "64")
AGENT = ROOT / "tests/actors/rollout/sessions/two_turns.py"
EXAMPLES = ROOT / "topologies/examples"
USER = 2  # the token that begins a message of the user
STILL_S = 20
NUM_STEPS, NUM_GROUPS, NUM_SAMPLES, NUM_KILLS = 2, 2, 2, 2
TOPOLOGY = f"""
include = "{EXAMPLES / "own-recipe.toml"}"

[[data]]
name = "pairs"
path = "{EXAMPLES / "data" / "pairs.jsonl"}"
input_key = "question"
label_key = "answer"
rm_type = "positional_match"

[rollout]
rollout_batch_size = {NUM_GROUPS}
n_samples_per_prompt = {NUM_SAMPLES}
max_response_len = 24
max_context_len = 48

[rollout.agent]
command = ["{sys.executable}", "{AGENT}", "NOTES"]
sandbox = "process"
attempts = ATTEMPTS

[engines.policy]
urls = ["URL"]
"""


class Tap:
    """A server before an engine: keeps the prompts that it is sent, and holds second turns until `go` is set."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self.prompts: list[tuple[int, ...]] = []
        self.num_held = 0
        self.held = anyio.Event()  # all samples of a step wait in their second turns
        self.go = anyio.Event()

    @asynccontextmanager
    async def served(self) -> AsyncGenerator[str]:
        """Serve for the duration of a block; yield the URL."""
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self._hand_on)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as self._session:
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                host, port = runner.addresses[0][:2]
                yield f"http://{host}:{port}"
            finally:
                await runner.cleanup()

    async def _hand_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/generate":
            await self._note((await request.json())["input_ids"])
        async with self._session.request(request.method, self._engine + request.path_qs, data=body) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            with suppress(ConnectionError):  # who asked was killed
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
            return response

    async def _note(self, given: Any) -> None:
        prompts = [tuple(ids) for ids in (given if isinstance(given[0], list) else [given])]
        self.prompts += prompts
        self.num_held += sum(ids.count(USER) > 1 for ids in prompts)
        if self.num_held >= NUM_GROUPS * NUM_SAMPLES:
            self.held.set()
        if any(ids.count(USER) > 1 for ids in prompts):
            await self.go.wait()


def topology(place: Path, url: str, attempts: int) -> Path:
    file = place / "agents.toml"
    names = {"NOTES": place / "notes", "URL": url, "ATTEMPTS": attempts}
    text = TOPOLOGY
    for name, value in names.items():
        text = text.replace(name, str(value))
    file.write_text(text)
    return file


async def test_programs_outlive_two_deaths_of_their_rollout_actor(tmp_path: Path) -> None:
    """Each program is started once, and no prompt is sent whose tokens are not those of its sample."""
    notes, dump = tmp_path / "notes", tmp_path / "dump"
    with running_engine(MODEL, *FLAGS) as engine:
        tap = Tap(engine.url)
        async with tap.served() as url:
            overrides = (f"run.dump_details={dump}", "train.save_interval=1")
            run = Run(
                tmp_path,
                num_steps=NUM_STEPS,
                eval_interval=None,
                settings=(),
                overrides=overrides,
                topology=topology(tmp_path, url, attempts=1),
            )
            async with run.started() as command:
                for number in range(NUM_KILLS):
                    await command.log.until_there(lambda n=number: tap.num_held >= (n + 1) * NUM_GROUPS * NUM_SAMPLES)
                    waiting = words(notes, "starts")
                    command.log.kill("rollout")
                    await command.log.until_restarted("rollout")
                    assert words(notes, "ends") == []
                tap.go.set()
                family = command.family()
                assert await command.end() == 0
                await run.gone(family)
    await audit(run, killed=["rollout"] * NUM_KILLS)
    async with run.reopened() as bus:
        assert not [event for _, event in await read_all(bus, run) if isinstance(event, GroupFailed)]
    assert len(waiting) == NUM_GROUPS * NUM_SAMPLES
    assert words(notes, "starts")[: len(waiting)] == waiting
    assert sorted(words(notes, "starts")) == sorted(words(notes, "ends")), "a program was started anew"
    assert len(words(notes, "starts")) == NUM_STEPS * len(waiting)
    check_prompts(tap, run, dump)


async def test_a_process_of_programs_that_stands_still_is_named_and_replaced(tmp_path: Path) -> None:
    """Its programs end with it, are started anew, and all groups train."""
    with running_engine(MODEL, *FLAGS) as engine:
        tap = Tap(engine.url)
        async with tap.served() as url:
            run = Run(
                tmp_path,
                num_steps=NUM_STEPS,
                eval_interval=None,
                settings=(),
                overrides=(f"run.unresponsive_after_s={STILL_S}",),
                topology=topology(tmp_path, url, attempts=3),
            )
            async with run.started() as command:
                await command.log.until_there(tap.held.is_set)
                os.kill(command.log.pids["programs"], signal.SIGSTOP)
                exited = await command.log.until(lambda event: isinstance(event, ActorExited))
                tap.go.set()
                family = command.family()
                assert await command.end() == 0
                await run.gone(family)
    assert isinstance(exited, ActorExited)
    assert exited.actor == "programs"
    assert exited.reason.startswith(f"event loop was blocked for {STILL_S} s")
    await audit(run, killed=["programs"])


def words(notes: Path, word: str) -> list[str]:
    """Return the process ids that programs noted with a word, in their order."""
    lines = [line.split() for line in notes.read_text().splitlines()] if notes.exists() else []
    return [line[1] for line in lines if line[0] == word]


def check_prompts(tap: Tap, run: Run, dump: Path) -> None:
    """Check that the engine got the prompts of the samples that were trained, turn by turn, and no other ones."""
    expected = set[tuple[int, ...]]()
    for step in range(run.num_steps):
        for group in read_pair(dump, step):
            for segments in group.segments:
                ids: list[int] = []
                assert len(segments) == 2
                for segment in segments:
                    ids += segment.prompt_ids.tolist()
                    expected.add(tuple(ids))
                    ids += segment.response_ids.tolist()
    sent = {ids for ids in tap.prompts if USER in ids}
    assert sent == expected
