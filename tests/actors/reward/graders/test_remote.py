"""The grader `remote_rm`, against a server in a process of its own."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from actors.reward.causes import cause_of
from actors.reward.grader_check import try_grader
from actors.reward.graders.builtin import find_grader
from actors.reward.graders.calling import grade_of
from actors.reward.graders.remote import RemoteError, remote_environment, remote_rm
from actors.reward.grades import Graded, GraderSpec, Hello
from actors.reward.pool import PoolSettings, open_pool
from actors.reward.samples import GradedSample
from runtime.functions.sandbox import Sandbox
from runtime.settings.load import load_topology

pytestmark = pytest.mark.anyio

KEY = "sk-very-secret"
LAPTOP = Path(__file__).parents[4] / "topologies/laptop.toml"
SAMPLE = GradedSample(prompt="1+1?", response="It is 2 😀é", label=["2"], metadata={"level": 3})


class Server:
    """A running server, and the requests that it got."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("reward_server.py"))]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self._lines = self.process.stdout
        self.url = f"http://127.0.0.1:{int(self._lines.readline())}"

    def request(self) -> dict[str, Any]:
        return json.loads(self._lines.readline())


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    with running.process:
        yield running
        running.process.kill()


async def test_a_sample_is_posted_with_its_metadata_and_the_key(server: Server) -> None:
    assert await remote_rm(SAMPLE, f"{server.url}/number", KEY) == 0.5
    body = {"prompt": "1+1?", "response": SAMPLE.response, "label": ["2"], "metadata": {"level": 3}}
    assert server.request() == {"path": "/number", "body": body, "key": f"Bearer {KEY}"}
    assert grade_of(await remote_rm(SAMPLE, f"{server.url}/dict"), "score").reward == 1.0
    assert server.request()["key"] == ""


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("/busy", "rate_limited"),
        ("/slow", "timeout"),
        ("/refused", "refused"),
        ("/missing", "refused"),
        ("/broken", "worker_lost"),
        ("/nonsense", "bad_answer"),
        ("/nan", "bad_answer"),
        ("/empty", "bad_answer"),
        ("/huge", "bad_answer"),
        ("/dies", "worker_lost"),
        ("/cut", "worker_lost"),
        ("/noise", "bad_answer"),  # the exception of aiohttp has the key, and so has its message
        ("/no_gzip", "bad_answer"),
        ("/found", "refused"),  # a GET of another page is no reward
        ("/to/http://localhost:9/", "refused"),
        ("/to/https://127.0.0.1/", "refused"),
        ("/leaks", "refused"),
        ("/to/", "refused"),
        ("/to//to//to//to//number", "refused"),  # the fourth redirect
    ],
)
async def test_a_failure_has_its_cause_and_shows_no_key(server: Server, path: str, cause: str) -> None:
    with pytest.raises((RemoteError, aiohttp.ClientError)) as caught:
        await remote_rm(SAMPLE, f"{server.url}{path}", KEY)
    assert cause_of(caught.value) == cause
    assert KEY not in f"{caught.value!r}{caught.value}"


async def test_the_grade_says_when_the_server_wants_the_next_request(server: Server) -> None:
    (one,) = await graded(f"{server.url}/later", 1, 30.0)
    assert (one.cause, one.wait_s) == ("worker_lost", 7.0)


async def test_a_lone_surrogate_is_sent(server: Server) -> None:
    assert await remote_rm(GradedSample(response="\ud800"), f"{server.url}/number") == 0.5
    assert server.request()["body"]["response"] == "\ud800"


@pytest.mark.parametrize("path", ["/null", "/text"])
async def test_an_answer_that_is_no_number_is_bad(server: Server, path: str) -> None:
    assert grade_of(await remote_rm(SAMPLE, f"{server.url}{path}"), None).cause == "bad_answer"


async def test_a_redirect_on_the_same_host_is_followed(server: Server) -> None:
    assert await remote_rm(SAMPLE, f"{server.url}/to//number", KEY) == 0.5
    assert [server.request()["key"], server.request()["key"]] == [f"Bearer {KEY}"] * 2


async def test_no_server_is_refused_and_a_box_cannot_be_sent() -> None:
    with pytest.raises(RemoteError, match=r"needs reward\.rm_url"):
        await remote_rm(SAMPLE)
    with pytest.raises(ValueError, match="no grader 'boxed_remote_rm': the server"):
        find_grader("boxed_remote_rm")


async def graded(url: str, number: int, timeout_s: float) -> list[Graded]:
    """Grade samples in grader processes that get the URL of the server, as in a run."""
    spec = GraderSpec(name="remote_rm")
    settings = PoolSettings(
        hello=Hello(graders=(spec,)),
        sandbox=Sandbox(also=dict(remote_environment(url, KEY))),
        num_processes=1,
        timeout_s=timeout_s,
        max_tries=1,
    )
    with anyio.fail_after(200):
        async with open_pool(settings) as pool:
            return await pool.grade(spec, [SAMPLE] * number)


async def test_grader_processes_know_the_server_and_ask_it_together(server: Server) -> None:
    assert [one.reward for one in await graded(f"{server.url}/number", 20, 30.0)] == [0.5] * 20
    assert server.request()["key"] == f"Bearer {KEY}"


async def test_bin_try_asks_the_server_of_the_topology(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_KEY", KEY)
    overrides = ["data.0.rm_type=remote_rm", f"reward.rm_url='{server.url}/number'", "reward.rm_api_key_env=RM_KEY"]
    topology = load_topology(LAPTOP, overrides).topology
    (grade,) = (await try_grader("remote_rm", [SAMPLE], topology=topology)).grades
    assert (grade.reward, server.request()["key"]) == (0.5, f"Bearer {KEY}")


async def test_a_server_that_hangs_costs_a_timeout(server: Server) -> None:
    (one,) = await graded(f"{server.url}/hang", 1, 0.5)
    assert (one.reward, one.cause) == (None, "timeout")
    assert math.isfinite(one.took_s)
