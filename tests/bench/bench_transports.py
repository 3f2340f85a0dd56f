"""Weights from a trainer's rank to an engine by each transport, against the least that moves the same bytes. JSON.

A model of Megatron-core on one rank, and the tiny engine, both on the CPU, with nothing else to do. Each
transport is measured from the export of the first bucket until the engine holds all and goes on; its label alone is
asked (what proofs take is told apart). Everything is done once before, then in turns; medians, smallest and largest.

- disk: against a copy of the file with its sha256, and the engine's own reload. Files are compared before and after.
- collective: against a gloo broadcast of the same buckets to a process that only receives.
- ipc: against the same calls, with the same segments, to a server that decodes and copies them; memcpy beside it.

Run: python -m tests.bench.bench_transports [--sizes]; --sizes fits a line over models of 0.1 to 2 GB.
"""

import argparse
import asyncio
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np

from runtime.node.supervisor.ports import free_port
from tests.bench.bench_weights import copy_and_hash
from tests.support.tiny_engine import post, running_engine, wait_until_200

if TYPE_CHECKING:
    from messages import FileSum

LAYERS = 10  # 0.5 GB
SIZES = (2, 5, 10, 20, 40)  # layers of 50 MB
SHAPE = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
SHAPE |= {"head_dim": 64, "vocab_size": 2048, "tie_word_embeddings": False}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"head_dim": 16, "vocab_size": 512, "tie_word_embeddings": False}
BUCKET_BYTES = 32 << 20
LIMIT_S = 120.0
Seconds = dict[str, list[float]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="times that each is measured")
    parser.add_argument("--sizes", action="store_true", help="other sizes too, and a line through them")
    parser.add_argument("--small", action="store_true", help="a tiny model: shows that it runs")
    args = parser.parse_args(argv)
    import structlog
    import torch

    torch.set_num_threads(1)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    shape = SMALL if args.small else SHAPE
    report: dict[str, Any] = {}
    for num_layers in SIZES if args.sizes else (LAYERS,):
        with tempfile.TemporaryDirectory() as folder:
            report[f"{num_layers} layers"] = measured(
                Path(folder), shape | {"num_hidden_layers": num_layers}, args.runs
            )
    if args.sizes:
        report["lines"] = lines(list(report.values()))
    print(json.dumps(report, indent=2))
    return 0


def measured(place: Path, shape: dict[str, Any], num_runs: int) -> dict[str, Any]:
    """One model by all transports."""
    import torch

    from actors.trainer.megatron import groups
    from actors.trainer.megatron.imports import quiet
    from runtime.settings.tables.trainer import MegatronConfig
    from tests.actors.trainer.tiny import TINY
    from tests.support.tiny_models import write_tokenizer

    (place / "config.json").write_text(json.dumps(TINY | shape))
    write_tokenizer(place)
    with quiet(), running_engine(place, "--load-format", "dummy") as engine:
        groups.join(groups.Ranks(), MegatronConfig(), torch.device("cpu"), seed=1)
        try:
            rig = Rig(place, engine.url)
            with Least(rig, num_runs + 1) as least:
                seconds = asyncio.run(rig.in_turns(least, num_runs))
        finally:
            groups.leave()
    return told(seconds, rig.size_bytes)


def told(seconds: Seconds, size_bytes: int) -> dict[str, Any]:
    """Medians with smallest and largest, and how they compare."""
    median = {name: statistics.median(took) for name, took in seconds.items()}
    return {
        "megabytes": round(size_bytes / 1e6),
        "seconds": {
            name: {"median": round(median[name], 3), "min": round(min(took), 3), "max": round(max(took), 3)}
            for name, took in seconds.items()
        },
        "ratios": {
            "disk / (copy and hash + reload)": round(median["disk"] / (median["copy and hash"] + median["reload"]), 2),
            "pause / disk": round(median["disk, pause"] / median["disk"], 2),
            "collective / broadcast": round(median["collective"] / median["broadcast"], 2),
            "ipc / post": round(median["ipc"] / median["post"], 2),
            "ipc / memcpy": round(median["ipc"] / median["memcpy"], 2),
        },
    }


def lines(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds over size of each transport: a line by least squares, and how much of the variance it explains."""
    found: dict[str, Any] = {}
    size = np.array([report["megabytes"] / 1e3 for report in reports])
    for name in ("disk", "collective", "collective, proven", "ipc"):
        took = np.array([report["seconds"][name]["median"] for report in reports])
        slope, start = np.polyfit(size, took, 1)
        rest = took - (slope * size + start)
        r2 = 1 - (rest @ rest) / ((took - took.mean()) @ (took - took.mean()))
        found[name] = {"s_per_GB": round(slope, 3), "s_at_0": round(start, 3), "R2": round(r2, 4)}
    return found


class Rig:
    """The trainer's rank, and what is timed of it."""

    def __init__(self, place: Path, url: str) -> None:
        import torch

        from actors.trainer.megatron.build import build_chunks
        from actors.trainer.megatron.config import transformer_config
        from actors.trainer.models.config import read_hf_config
        from actors.trainer.models.files import random_source
        from actors.trainer.models.sharding import load_weights
        from runtime.settings.tables.trainer import MegatronConfig

        self.place, self.url, self.hf = place, url, read_hf_config(place)
        config = transformer_config(self.hf, MegatronConfig(), dtype=torch.float32)
        self.chunks = build_chunks(self.hf, config)
        for chunk in self.chunks:
            load_weights(chunk, self.hf, random_source(self.hf, 1))
        self._device = torch.device("cpu")
        self._version = 0
        self.export()
        self.file = next((place / "out").glob("*.safetensors")).rename(place / "source")
        self.size_bytes = sum(parameter.nbytes for chunk in self.chunks for parameter in chunk.parameters())
        self.export()

    def export(self) -> "Mapping[str, FileSum]":
        """The files of a version, and what is announced of them."""
        from actors.trainer.weights.export import weight_thread
        from actors.trainer.weights.files import export_to_files
        from actors.trainer.weights.gathering import own_parts

        out = self.place / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        (out / "config.json").write_bytes((self.place / "config.json").read_bytes())
        parts = own_parts(self.chunks, self.hf)
        with weight_thread() as thread:
            export = export_to_files(parts, self.hf, out, thread, device=self._device, bucket_bytes=BUCKET_BYTES)
            return export.finish().files

    def buckets(self) -> Iterator[Any]:
        """The bytes of each bucket, as they are sent; what is told of it goes to `steps`."""
        from actors.trainer.weights.engines import aligned, flattened
        from actors.trainer.weights.gathering import buckets, own_parts, whole_tensors
        from messages import BucketSent

        self.steps: list[Any] = []
        whole = whole_tensors(iter(own_parts(self.chunks, self.hf)), self.hf, self._device)
        for index, each in enumerate(buckets(whole, BUCKET_BYTES)):
            bucket = aligned(each)
            names, tensors = zip(*bucket, strict=True)
            dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
            shapes = tuple(tuple(tensor.shape) for tensor in tensors)
            self.steps.append(BucketSent(session="", stage=0, index=index, names=names, dtypes=dtypes, shapes=shapes))
            yield flattened(bucket)

    def send(self, sink: Any, _tensors: Any) -> Any:
        """All weights into a sink, as a rank sends them."""
        from actors.trainer.weights.export import WeightExport, gathered, weight_thread
        from actors.trainer.weights.gathering import own_parts

        source = gathered(own_parts(self.chunks, self.hf), self.hf, self._device, BUCKET_BYTES)
        with weight_thread() as thread:
            export = WeightExport(
                source, [sink], lambda results: results[0][0], thread, device=self._device, bucket_bytes=BUCKET_BYTES
            )
            return export.finish()

    async def in_turns(self, least: "Least", num_runs: int) -> Seconds:
        """Each once for nothing, then so many times."""
        from actors.rollout.sglang.client import SglangClient
        from tests.support.weight_line import Halves, verifier_of

        seconds: Seconds = {}
        async with aiohttp.ClientSession() as session:
            client = SglangClient(session)
            verifier = verifier_of(client, "retract", verify="never")
            halves = {
                name: Halves(client, self.url, self.place, transport=transport, verify=verify)
                for name, transport, verify in (
                    ("collective", "collective", "never"),
                    ("collective, proven", "collective", "always"),
                    ("ipc", "ipc", "never"),
                )
            }
            for run in range(num_runs + 1):
                found = {name: await asyncio.to_thread(call) for name, call in least.calls.items()}
                found |= await self._from_files(verifier)
                for name, half in halves.items():
                    begin = time.perf_counter()
                    assert await half.sync({}, send=self.send) == {}
                    found[name], found[f"{name}, pause"] = time.perf_counter() - begin, half.pause_s
                    assert half.sent.size_bytes == self.size_bytes
                gc.collect()
                for name, took in found.items() if run else ():
                    seconds.setdefault(name, []).append(took)
            for half in halves.values():
                await half.leave()
        return seconds

    async def _from_files(self, verifier: Any) -> dict[str, float]:
        """Files that are compared before the engine reads them and after, as a rollout actor does."""
        from actors.rollout.engines.weights.files import PublishedFiles
        from runtime.settings.placement import UpdateLimits
        from tests.support.rollout import announcement
        from tests.support.weight_line import carried_out

        self._version += 1
        checks, comparing_s = PublishedFiles(UpdateLimits(stall_s=LIMIT_S)), 0.0
        begin = time.perf_counter()
        files = await asyncio.to_thread(self.export)
        told = announcement(self._version, path=str(self.place / "out"), files=dict(files))

        async def check() -> None:
            nonlocal comparing_s
            began = time.perf_counter()
            await checks.check_read(told)
            comparing_s += time.perf_counter() - began

        await check()
        result = await carried_out(verifier.update("engine-0", self.url, told, first=False, check_read=check))
        took_s = time.perf_counter() - begin
        return {"disk": took_s, "disk, pause": result.pause_s, "disk, comparing files twice": comparing_s}


class Least:
    """What moves the same bytes and does nothing else: calls that return their seconds."""

    def __init__(self, rig: Rig, num_times: int) -> None:
        self._rig = rig
        self._buckets = list(rig.buckets())
        self._room = [flat.clone() for flat in self._buckets]
        self._name = uuid.uuid4().hex
        self._gloo_port, self._post_port = free_port(), free_port()
        self._sizes = [str(flat.nbytes) for flat in self._buckets] * num_times
        self.calls: dict[str, Callable[[], float]] = {
            "copy and hash": lambda: timed(lambda: copy_and_hash(rig.file)),
            "reload": lambda: timed(self._reload),
            "broadcast": lambda: timed(self._broadcast),
            "post": lambda: timed(self._post),
            "memcpy": lambda: timed(self._copy),
        }

    def __enter__(self) -> "Least":
        from actors.tiny_engine.engine.updating import SENDER, join

        self._stack = ExitStack()
        sides = [["gloo", str(self._gloo_port), self._name, *self._sizes], ["post", str(self._post_port)]]
        for words in sides:
            process = self._stack.enter_context(side(words))
        wait_until_200(f"http://127.0.0.1:{self._post_port}/ready", process)
        self._group: Any = join(
            "127.0.0.1", self._gloo_port, rank=SENDER, world_size=2, name=self._name, timeout_s=LIMIT_S
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _reload(self) -> None:
        body = {"model_path": str(self._rig.place / "out"), "load_format": "auto"}
        assert post(f"{self._rig.url}/update_weights_from_disk", body)[0] == 200

    def _broadcast(self) -> None:
        for flat in self._buckets:
            self._group.broadcast(flat, 0).wait()

    def _post(self) -> None:
        from actors.trainer.weights.shared_memory import payload_of, segment

        for step, flat in zip(self._rig.steps, self._buckets, strict=True):
            with segment(f"physarum-bench-{uuid.uuid4().hex}", flat, 1) as (name,):
                body = {"serialized_named_tensors": [payload_of(name, step, flat.nbytes)]}
                assert post(f"http://127.0.0.1:{self._post_port}/update_weights_from_tensor", body)[0] == 200

    def _copy(self) -> None:
        for flat, room in zip(self._buckets, self._room, strict=True):
            room.copy_(flat)


@contextmanager
def side(words: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """A process of transport_side, for as long as the block lasts."""
    command = [sys.executable, "-m", "tests.bench.transport_side", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def timed(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
