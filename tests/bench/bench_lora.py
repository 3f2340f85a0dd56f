"""A LoRA run against the full form of the same recipe, with the shapes of SmolLM2-135M, one after the other. JSON.

- `trainer_bytes`: weights, gradients, main parameters and moments of the rank.
- `version_bytes`: what a version publishes; an adapter's base is written once.
- `first_token_s`: from the end of the optimizer's step to the first token under the new version, on an idle engine and
  on one with requests; `publish_s` is the trainer's share of it. Medians of the rounds. The full form aborts running
  requests (`on_weight_update = "abort"`).
- `load`: tokens a second of the other requests, and how many of them an update aborted.

Run: python -m tests.bench.bench_lora [--model DIR]
"""

import argparse
import asyncio
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from tests.support.tiny_engine import SMOLLM2, running_engine, write_config

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512, "head_dim": 16}
RANK = 8
PROMPT = [3, 4, 5]
FORMS = ("full", "lora")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of a model; default: drawn weights of those shapes")
    parser.add_argument("--rounds", type=int, default=3, help="versions for each measurement")
    parser.add_argument("--requests", type=int, default=8, help="of the load, in flight")
    parser.add_argument("--tokens", type=int, default=64, help="of each request of the load")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS, help="to measure; ratios need both")
    parser.add_argument("--small", action="store_true", help="a tiny model: shows that it runs")
    args = parser.parse_args(argv)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for form in args.forms:
            directory = Path(folder) / form
            model = args.model
            if model is None:
                model = directory / "model"
                write_config(model, **(SMALL if args.small else SMOLLM2), initializer_range=0.02)
            results[form] = asyncio.run(measured(form, model, directory, args, drawn=args.model is None))
    if set(args.forms) == set(FORMS):
        results["ratio"] = ratios(results["full"], results["lora"])
    print(json.dumps(results, indent=2))
    return 0


def ratios(full: dict[str, Any], lora: dict[str, Any]) -> dict[str, float]:
    """LoRA's numbers by those of the full form."""
    found = {
        "trainer_bytes": lora["trainer_bytes"]["total"] / full["trainer_bytes"]["total"],
        "version_bytes": lora["version_bytes"] / full["version_bytes"],
        **{
            f"first_token_s {when}": lora["first_token_s"][when] / full["first_token_s"][when]
            for when in ("idle", "load")
        },
    }
    return {name: round(value, 4) for name, value in found.items()}


async def measured(form: str, model: Path, directory: Path, args: argparse.Namespace, *, drawn: bool) -> dict[str, Any]:
    """Train, publish and serve one form."""
    import torch

    from actors.trainer.commands import TrainerRank
    from actors.trainer.megatron import groups
    from tests.actors.trainer.tiny import random_batch
    from tests.build.topology import trainer_topology

    torch.set_num_threads(1)
    groups.leave()
    topology = trainer_topology(
        model,
        directory,
        model={"random_init": drawn},
        engines={"policy": {"kind": "tiny"}},
        optimizer={"lr": 1e-4},
        trainer={"device": "cpu", "lora": {"rank": RANK} if form == "lora" else {}},
    )
    rank = TrainerRank(topology, directory / "run")
    rank.train(random_batch(0))
    sizes = trainer_bytes(rank._replica)  # the moments exist after the first step
    flags = ("--enable-lora", "--max-lora-rank", str(RANK)) if form == "lora" else ()
    with running_engine(model, "--load-format", "dummy" if drawn else "auto", *flags) as engine:
        async with AsyncExitStack() as stack:
            line = await stack.enter_async_context(line_of(engine.url, model, form))
            published = await line.publish(rank, 1)
            found: dict[str, float] = {}
            publish: dict[str, float] = {}
            version, load = 1, {}
            for when in ("idle", "load"):
                times: list[float] = []
                shares: list[float] = []
                if when == "load":
                    await stack.enter_async_context(line.loaded(args.requests, args.tokens))
                for _ in range(args.rounds):
                    version += 1
                    await asyncio.to_thread(rank.train, random_batch(version))
                    begin = time.perf_counter()
                    published = await line.publish(rank, version)
                    await line.first_token(version)
                    times.append(time.perf_counter() - begin)
                    shares.append(published.took_s)
                found[when], publish[when] = (round(statistics.median(each), 3) for each in (times, shares))
            load = line.report()
    rank.close()
    return {
        "trainer_bytes": sizes,
        "version_bytes": published.size_bytes,
        "first_token_s": found,
        "publish_s": publish,
        "load": load,
    }


def trainer_bytes(replica: Any) -> dict[str, int]:
    """Bytes of a replica's tensors, by kind."""
    own = [parameter for chunk in replica.chunks for parameter in chunk.parameters()]
    state = [each for part in optimizers(replica) for each in part.optimizer.state.values()]
    held = {id(parameter) for parameter in own}
    mains = [each for part in optimizers(replica) for group in part.optimizer.param_groups for each in group["params"]]
    found = {
        "weights": sum(each.nbytes for each in own),
        "gradients": sum(each.main_grad.nbytes for each in own if each.requires_grad),
        "main parameters": sum(each.nbytes for each in mains if id(each) not in held),
        "moments": sum(each[name].nbytes for each in state for name in ("exp_avg", "exp_avg_sq")),
    }
    return found | {"total": sum(found.values())}


def optimizers(replica: Any) -> list[Any]:
    return list(getattr(replica.optimizer, "chained_optimizers", [replica.optimizer]))


def line_of(url: str, model: Path, form: str) -> Any:
    """A rollout actor's fleet and generator on an engine, and what is measured there."""
    from contextlib import asynccontextmanager

    import aiohttp
    import anyio

    from actors.rollout.engines.dispatch import Direct
    from actors.rollout.engines.fleet import Fleet
    from actors.rollout.engines.weights.adapters import AdapterUpdates
    from actors.rollout.engines.weights.files import PublishedFiles
    from actors.rollout.engines.weights.updater import Updater
    from actors.rollout.engines.weights.updates import UpdateTracker
    from actors.rollout.engines.weights.verifier import WeightVerifier
    from actors.rollout.requests.sending import Generator
    from actors.rollout.requests.verdict import Outcome
    from actors.rollout.sglang.client import SglangClient
    from actors.rollout.sglang.served_model import ServedModel
    from messages import SamplingParams
    from runtime.settings.placement import UpdateLimits
    from tests.support.rollout import announcement
    from tests.support.sampled import request_of

    class Line:
        def __init__(self, fleet: Fleet, generator: Generator) -> None:
            self._fleet, self._generator = fleet, generator
            self._num_tokens = self._num_aborted = 0
            self._begin = time.perf_counter()

        async def publish(self, rank: Any, version: int) -> Any:
            """Publish a version and announce it. Returns once the engine holds it."""
            of = await asyncio.to_thread(partial(rank.publish, version, confirmed=max(0, version - 1)))
            told = {"path": str(of.path), "checksum": of.checksum, "size_bytes": of.size_bytes, "probe": of.probe}
            told |= {"files": dict(of.files), "base": of.base, "engine_sums": of.sums, "no_sums": of.no_sums}
            await self._fleet.set_target(announcement(version, **told))
            await self._fleet.next_version(version - 1)
            return of

        async def first_token(self, version: int) -> None:
            request = self._request(f"first-{version}-0-0", 1, version)
            assert await self._generator.generate(request) is Outcome.KEEP
            assert [each.oldest_new_version for each in (one.buffer for one in request.inputs)] == [version]

        def _request(self, rid: str, num_tokens: int, min_version: int = 1) -> Any:
            params = SamplingParams(max_new_tokens=num_tokens)
            request = request_of(rid, [PROMPT], params, seeds=[1], streamed=True)
            request.min_version, request.begun = min_version, lambda: None
            return request

        @asynccontextmanager
        async def loaded(self, number: int, num_tokens: int) -> Any:
            """Keep requests in flight inside the block."""

            async def keep(index: int) -> None:
                turn = 0
                while True:
                    turn += 1
                    request = self._request(f"load-{index}-{turn}-0", num_tokens)
                    while await self._generator.generate(request) is Outcome.RESEND:
                        self._num_aborted += 1
                        request.max_new_tokens = max(1, num_tokens - request.inputs[0].buffer.num_tokens)
                    self._num_tokens += request.inputs[0].buffer.num_tokens

            self._begin = time.perf_counter()
            async with anyio.create_task_group() as group:
                for index in range(number):
                    group.start_soon(keep, index)
                yield
                group.cancel_scope.cancel()

        def report(self) -> dict[str, float]:
            took_s = time.perf_counter() - self._begin
            return {"tokens_per_s": round(self._num_tokens / took_s, 1), "aborted": self._num_aborted}

    @asynccontextmanager
    async def opened() -> Any:
        limits = UpdateLimits()
        async with aiohttp.ClientSession() as session, anyio.create_task_group() as group:
            client = SglangClient(session)
            updater = Updater(client, "drain" if form == "lora" else "abort", limits=limits)
            updates = AdapterUpdates(client, "bench", moves_on=False, limits=limits, interrupt=updater.interrupt)
            verifier = WeightVerifier(
                client, updater, UpdateTracker(), verify=None, trainer_dtype="float32", adapters=updates
            )
            fleet = Fleet(client, verifier, dispatch=Direct(), max_adapters=4 if form == "lora" else 0)
            generator = Generator(client, fleet.serving, ServedModel.read(model))
            updater.interrupt_by(generator.running.interrupt)
            group.start_soon(partial(fleet.run_engine, "engine-0", url, files=PublishedFiles(limits)))
            yield Line(fleet, generator)
            group.cancel_scope.cancel()

    return opened()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
