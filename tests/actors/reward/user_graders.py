"""Reward functions as users write them, good and bad. Named by path in the tests of the pool and the actor."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MEETING: list[asyncio.Event] = []  # calls of this process that wait for each other
BEGUN: list[str] = []  # commands of the calls of `told` in this process


def _write(path: Path, text: str) -> None:
    """Write a file that is never seen empty."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(text)
    new.rename(path)


def length(sample: Any) -> float:
    return float(len(sample.response))


def pid(sample: Any) -> float:
    return float(os.getpid())


def everything(sample: Any) -> dict[str, Any]:
    seen = [sample.index, sample.prompt, sample.response, sample.label, sample.metadata, sample.status]
    return {"score": 0.5, "seen": seen}


def full(sample: Any) -> dict[str, Any]:
    """Returns what the generation of a sample left."""
    log_probs = [round(each, 3) for each in sample.log_probs]
    turns = [[turn.start, turn.end, turn.text] for turn in sample.turns]
    seen = [list(sample.prompt_ids), list(sample.tokens), log_probs, turns, sample.sample_metadata, sample.evaluation]
    return {"score": 0.5, "seen": seen}


def as_told(sample: Any) -> Any:
    """Does what the response says."""
    match sample.response:
        case "raise":
            raise RuntimeError("as told")
        case "hang":
            while True:
                pass
        case "sleep":
            time.sleep(60)
        case "nan":
            return float("nan")
        case "text":
            return "good"
        case "none":
            return None
        case "dict":
            return {"accuracy": 1.0}
        case "print":
            print("to stdout" * 100)  # noqa: T201 - users do
            sys.stdout.flush()
            os.write(1, b"\xff\xff\xff\xff raw bytes to descriptor 1")
            subprocess.run(["echo", "a child's words"], check=True)
            return 1.0
        case "read":
            return float(len(sys.stdin.read()))
        case "exit":
            sys.exit(1)
        case "_exit":
            os._exit(7)
        case "allocate":
            return float(len(bytearray(1 << 40)))
        case "allocate slowly":
            hoard: list[bytearray] = []
            while True:
                hoard.append(bytearray(b"x" * (16 << 20)))
        case "fork and die":
            if os.fork() == 0:
                time.sleep(60)  # keeps the pipes open
            os._exit(9)
        case "child":
            child = subprocess.Popen(["sleep", "60"])
            _write(Path(sample.metadata["file"]), str(child.pid))
            time.sleep(60)
        case "die once":
            marker = Path(sample.metadata["file"])
            if not marker.exists():
                marker.touch()
                os._exit(1)
            return 1.0
        case "wait for file":
            _write(Path(sample.metadata["started"]), str(os.getpid()))
            while not Path(sample.metadata["file"]).exists():
                time.sleep(0.005)
            return 1.0
        case _:
            return 1.0


async def slowly(sample: Any) -> float:
    await asyncio.sleep(0.01)
    return float(len(sample.response))


async def never(sample: Any) -> float:
    await asyncio.Event().wait()
    return 0.0


def hangs(sample: Any) -> float:
    while True:
        pass


def rank(samples: list[Any]) -> list[float]:
    """Scores a group relative to itself: 1 for the longest response."""
    longest = max(len(sample.response) for sample in samples)
    return [float(len(sample.response) == longest) for sample in samples]


def rank_wrongly(samples: list[Any]) -> list[float]:
    return [1.0]


def burn(sample: Any) -> float:
    """CPU-heavy: as many rounds of arithmetic as the response says."""
    total = 0
    for number in range(int(sample.response)):
        total += number * number % 7
    return float(total >= 0)


def dies_once(sample: Any) -> float:
    """Killed at the first sight of a sample with a marker; then 1 for the right answer."""
    marker = Path(sample.metadata["marker"] or os.devnull)
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return float(sample.response == sample.label)


async def dies_once_async(sample: Any) -> float:
    await asyncio.sleep(0)
    return dies_once(sample)


def chatty(sample: Any) -> dict[str, Any]:
    return {"score": 0.5, **{f"said {number}": sample.response * 1000 for number in range(31)}}


async def told(sample: Any) -> Any:
    """Does what the response says, as an async function."""
    command, _, number = sample.response.partition(" ")
    BEGUN.append(command)
    match command:
        case "wait":
            await asyncio.sleep(float(number))
            return 1.0
        case "meet":  # ends once that many calls run together
            MEETING.append(event := asyncio.Event())
            if len(MEETING) == int(number):
                for each in MEETING:
                    each.set()
                MEETING.clear()
            await event.wait()
            return 1.0
        case "until_file":
            _write(Path(sample.metadata["started"]), str(os.getpid()))
            while not os.path.exists(sample.metadata["file"]):  # noqa: ASYNC110, ASYNC240 - a file has no event
                await asyncio.sleep(0.005)
            return 1.0
        case "until_deaths":
            while len(_deaths(sample)) < int(number):  # noqa: ASYNC110 - a file has no event
                await asyncio.sleep(0.005)
            return 1.0
        case "die_among":  # once that many calls have begun; one fewer after each death
            while len(BEGUN) < max(1, int(number) - len(_deaths(sample))):  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.005)
            with open(sample.metadata["file"], "a") as file:  # noqa: ASYNC230 - a line
                file.write("x")
            os._exit(7)
        case "never":
            await asyncio.Event().wait()
        case "block":
            time.sleep(60)  # noqa: ASYNC251 - users do
        case "block_child":
            await asyncio.gather(asyncio.to_thread(int), _blocks())
        case "swallow":
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    continue
        case "cancel":
            raise asyncio.CancelledError
        case "large":
            return {"score": 1.0, "text": "x" * int(number)}
        case "pid":
            return float(os.getpid())
        case _:
            return as_told(sample)


def _deaths(sample: Any) -> str:
    """A letter for each process that ended by the command die_among."""
    path = Path(sample.metadata["file"])
    return path.read_text() if path.exists() else ""


async def _blocks() -> None:
    time.sleep(60)  # noqa: ASYNC251 - users do


async def rank_together(samples: list[Any]) -> list[float]:
    await asyncio.sleep(0)
    return rank(samples)
