"""Data sources with a state: time per issue by the size of the state, in the process and on the bus. Prints JSON.

Each issue gives the class the outcomes of the last one, draws rows and saves the state. Both go to the data stream.
`draw` is the process alone, `store` the data stream, `restore` a new process that goes on from a state.

Run: python -m tests.bench.bench_source
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio

from actors.buffer.prompts.drawn import DrawnPrompts
from actors.buffer.prompts.prompts import PromptReader
from actors.buffer.prompts.source_process import SourceProcess, SourceSettings
from actors.buffer.prompts.tokenizing import load_tokenizing
from messages import GroupsIssued, IssuedGroup
from runtime.bus.bus import Bus
from runtime.bus.limits import StreamLimits
from runtime.bus.nats.server import ServerSettings
from runtime.ledger.state import GroupOutcome, LedgerState
from runtime.process.logs import configure_logging
from runtime.settings.tables.prompts import DataConfig
from tests.bench.rig import ROOT
from tests.support.running_server import running_server

MODEL = ROOT / "topologies/demo/models/reverse-digits"
SOURCE = """
class Source:
    def __init__(self):
        self.text, self.count = "x" * {size}, 0
    def draw(self, number):
        return {{"input": "12", "label": "1"}}
    def told(self, outcome):
        self.count += 1
    def state(self):
        return {{"text": self.text, "count": self.count}}
    def restore(self, state):
        self.text, self.count = state["text"], state["count"]
"""


async def measure(args: argparse.Namespace, size: int, folder: Path) -> dict[str, Any]:
    file = folder / f"source_{size}.py"
    file.write_text(SOURCE.format(size=size))
    data = DataConfig(name="d", source_class=f"{file}:Source", label_key="label", rm_type="exact_match")
    source = SourceProcess(SourceSettings(key="data.0.source_class", value=f"{file}:Source", timeout_s=60.0))
    reader = PromptReader(load_tokenizing(str(MODEL)), None)
    state, draw_s, store_s = LedgerState(), list[float](), list[float]()
    started = time.perf_counter()
    prompts = DrawnPrompts(source, data, reader)
    start_s = time.perf_counter() - started
    async with running_server(folder / f"bus{size}", ServerSettings(store_dir=folder / f"store{size}")) as server:
        async with Bus.connect(server.url, "bench", name="bench") as bus:
            await bus.ensure_streams(StreamLimits())
            for number in range(args.issues):
                first = number * args.groups
                groups = tuple(IssuedGroup(group_id=n, attempt=0, prompt=n) for n in range(first, first + args.groups))
                issue = GroupsIssued(incarnation=1, round=number, min_version=1, groups=groups)
                state.outcomes = tuple(
                    GroupOutcome(number=n, kind="kept", rewards=(1.0,)) for n in range(first - args.groups, first)
                )
                began = time.perf_counter()
                prompts.draw(issue, state)
                drawn = time.perf_counter()
                cited = await prompts.citing(bus, issue, state)
                draw_s.append(drawn - began)
                store_s.append(time.perf_counter() - drawn)
                prompts.folded(cited, state)
                state.next_prompt = first + args.groups
    drawn = source.draw(state.next_prompt, 1, state=None)
    began = time.perf_counter()
    source.kill()
    source.draw(state.next_prompt, 1, state=drawn.state)
    restore_s = time.perf_counter() - began
    source.kill()
    return {
        "state_bytes": size,
        "groups": args.groups,
        "start_s": round(start_s, 4),
        "draw_ms": _middle(draw_s),
        "store_ms": _middle(store_s),
        "restore_s": round(restore_s, 4),
    }


def _middle(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"p50": round(statistics.median(ordered) * 1e3, 2), "max": round(ordered[-1] * 1e3, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--issues", type=int, default=100)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64 << 10, (1 << 20) - 100])
    args = parser.parse_args()
    configure_logging("bench", "source")

    async def run() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            return {"sources": [await measure(args, size, Path(folder)) for size in args.sizes]}

    print(json.dumps(anyio.run(run), indent=2))


if __name__ == "__main__":
    main()
