"""The listener for agents with many open sessions: added latency, CPU and memory. Prints JSON.

The listener is a process of its own, whose CPU time and memory alone count. This process is the rollout actor, whose
turns take --answer-s, and all agents: each has a session and sends its growing conversation again and again, as
raw HTTP. The added latency of a turn is the time that its agent waits, less the time that the actor takes for it.

Full size: --sessions 1000 --answer-s 20 --seconds 60, which is 50 turns a second.

Run: python -m tests.bench.bench_listener
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import anyio
import numpy as np
import psutil

from runtime.sessions.actor_end import ActorEnd
from runtime.sessions.keys import KeyPair, SessionKeys
from runtime.sessions.link import ControlCall
from runtime.sessions.turns import ChatMessage, TurnAnswer, TurnRequest

ROOT: Final = Path(__file__).parents[2]
NUM_TOKENS: Final = 200  # of an answer
TEXT: Final = "All work and no play. " * 30


class Actor:
    """Answers each turn after some time, and notes how long it took."""

    def __init__(self, num_sessions: int, answer_s: float) -> None:
        self.pairs = [KeyPair.new(f"s{number}") for number in range(num_sessions)]
        self._answer_s = answer_s
        self.took: dict[str, float] = {}  # of the newest turn, by session

    def keys(self) -> Sequence[SessionKeys]:
        return [pair.digests() for pair in self.pairs]

    async def turn(self, session: str, request: TurnRequest, accepted: Callable[[], None]) -> TurnAnswer:
        begin = time.perf_counter()
        accepted()
        await anyio.sleep(self._answer_s)
        message = ChatMessage("assistant", TEXT)
        answer = TurnAnswer(message, "stop", 1000, tuple(range(NUM_TOKENS)), (-0.5,) * NUM_TOKENS)
        self.took[session] = time.perf_counter() - begin
        return answer

    async def count(self, session: str, request: TurnRequest) -> int:
        return 0

    async def control(self, session: str, call: ControlCall, content: Mapping[str, Any]) -> Mapping[str, Any]:
        return {}


class Agents:
    """All agents of a run."""

    def __init__(self, url: str, actor: Actor, arguments: argparse.Namespace) -> None:
        self._url, self._actor, self._arguments = url, actor, arguments
        self.added_ms: list[float] = []
        self.num_turns = 0
        self.measures = False

    async def run(self, pair: KeyPair, delay_s: float, client: aiohttp.ClientSession) -> None:
        messages = [{"role": "system", "content": "x" * self._arguments.prompt_bytes}]
        headers = {"Authorization": f"Bearer {pair.model.reveal()}"}
        await anyio.sleep(delay_s)  # agents do not begin at one moment
        while True:
            messages.append({"role": "user", "content": TEXT})
            body = json.dumps({"model": "m", "messages": messages, "stream": self._arguments.stream}).encode()
            begin, begins_measured = time.perf_counter(), self.measures
            async with client.post(f"{self._url}/v1/chat/completions", data=body, headers=headers) as response:
                answered = await response.read()
                assert response.status == 200, answered
            if self.measures and begins_measured:
                self.added_ms.append(1e3 * (time.perf_counter() - begin - self._actor.took[pair.session]))
            self.num_turns += self.measures
            messages.append({"role": "assistant", "content": TEXT})
            del messages[1 : -2 * self._arguments.history]


async def measure(url: str, process: psutil.Process, run_dir: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    before = process.memory_info().rss
    actor = Actor(arguments.sessions, arguments.answer_s)
    agents = Agents(url, actor, arguments)
    end = ActorEnd(run_dir, "rollout", "m", 200_000, actor)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(end.run)
        await end.url()
        for number, pair in enumerate(actor.pairs):
            tasks.start_soon(agents.run, pair, arguments.answer_s * number / arguments.sessions, client)
        await anyio.sleep(2 * arguments.answer_s)  # each agent has had a turn
        agents.measures, cpu = True, sum(process.cpu_times()[:2])
        begin = time.perf_counter()
        await anyio.sleep(arguments.seconds)
        agents.measures, took_s = False, time.perf_counter() - begin
        cpu_s, rss = sum(process.cpu_times()[:2]) - cpu, process.memory_info().rss
        tasks.cancel_scope.cancel()
    p50, p99 = np.percentile(agents.added_ms, [50, 99])
    return {
        "sessions": arguments.sessions,
        "turns": agents.num_turns,
        "turns_per_s": round(agents.num_turns / took_s, 1),
        "added_ms_p50": round(float(p50), 2),
        "added_ms_p99": round(float(p99), 2),
        "listener_cpu_ms_per_turn": round(1e3 * cpu_s / agents.num_turns, 2),
        "listener_kb_per_session": round((rss - before) / arguments.sessions / 1e3, 1),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--answer-s", type=float, default=4.0, help="time of a turn in the rollout actor")
    parser.add_argument("--seconds", type=float, default=20.0, help="window of measuring")
    parser.add_argument("--prompt-bytes", type=int, default=8192, help="of the system prompt")
    parser.add_argument("--history", type=int, default=16, help="newest turns that an agent sends")
    parser.add_argument("--stream", action="store_true")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as place:
        environment = {**os.environ, "PHYSARUM_RUN_DIR": place, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-P", "-m", "actors.sessions", "{}"]
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as listener:
            try:
                assert listener.stderr is not None
                found = re.search(r"http://\S+", listener.stderr.readline())
                assert found
                print(json.dumps(anyio.run(measure, found[0], psutil.Process(listener.pid), Path(place), arguments)))
            finally:
                listener.terminate()
                listener.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
