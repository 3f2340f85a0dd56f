"""Prints the Unix time at which a new process of a tiny engine is first seen to generate. Runs on its machine.

Requests that verify weights do not count: they are answered before the engine is registered, and generate no tokens.

Run: python -m tests.bench.first_token LOG OFFSET PROCESS TIMEOUT_S, with the log of the node's daemon and the bytes of
it that are older.
"""

import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from runtime.bus.addresses import ENGINE_KEY_VARIABLE

EVERY_S: Final = 0.01


def main() -> None:
    log, offset, process, timeout_s = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    until = time.monotonic() + timeout_s
    print("watching", flush=True)
    ready: dict[str, Any] | None = None
    while ready is None and time.monotonic() < until:
        time.sleep(EVERY_S)
        ready = next((event for event in new_events(log, offset) if is_ready(event, process)), None)
    if ready is None:
        raise TimeoutError(f"{process} was not ready within {timeout_s:g} s")
    variables = Path(f"/proc/{ready['pid']}/environ").read_text().split("\0")
    key = next(each.partition("=")[2] for each in variables if each.startswith(f"{ENGINE_KEY_VARIABLE}="))
    url = f"http://{ready['host']}:{ready['port']}/v1/loads"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    while time.monotonic() < until:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            (loads,) = json.loads(answer.read())["loads"]
        if loads["gen_throughput"] > 0:
            print(time.time(), flush=True)
            return
        time.sleep(EVERY_S)
    raise TimeoutError(f"{process} generated nothing within {timeout_s:g} s")


def new_events(log: Path, offset: int) -> Iterator[dict[str, Any]]:
    """The whole lines of a log after an offset."""
    text = log.read_bytes()[offset:]
    yield from map(json.loads, text[: text.rfind(b"\n") + 1].splitlines())


def is_ready(event: dict[str, Any], process: str) -> bool:
    return event.get("change") == "ready" and event.get("process") == process


if __name__ == "__main__":
    main()
