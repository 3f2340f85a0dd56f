"""Kill points on the way of a weight version: before, during or after prepare, bucket, commit, export, load or unload.

    at("before", "bucket", 2, process="trainer.0")     # a Moment, for `planned` of rank_moments.py

A process reaches them where it touches the outside, so that they hold whatever lies behind:

| process | before: it is about to | during: without the answer, it | after: it has the answer |
|---|---|---|---|
| first rank of a stage, rollout actor | send the call | has sent the call | goes on |
| tiny engine | act on the call | acts on the call | is about to send the answer |
| scheduler of SGLang | act on the call | - | is about to send the answer |
| another rank | pass a bucket on to its stage's first rank | - | - |
| node daemon | - | writes a file of its local copy: during bucket | - |

A LoRA adapter is exported by the trainer, and loaded and unloaded by calls of the rollout actor to the engine. During
its export, its files are written and have no name yet.

With files a version has no such calls: the trainer commits it by the announcement, when all its files are complete.
The version of a moment is the one that is transferred. Two processes do not know it: SGLang's scheduler counts its
updates, and another rank counts its train steps.
"""

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal

import msgspec

from tests.chaos import rank_moments
from tests.chaos.rank_moments import Moment, Strike, around, striker

When = Literal["before", "during", "after"]
Step = Literal["prepare", "bucket", "commit", "export", "load", "unload"]

SENT_S: Final = 0.02  # for a call to leave the process
CALLS: Final = {  # of the trainer to rollout actors, by the message's tag
    "weight_sync_prepared": "prepare",
    "weight_sync_bucket": "bucket",
    "weight_sync_decided": "commit",
}
PATHS: Final = {  # of an engine
    "/begin_weight_update": "prepare",
    "/update_weights_from_distributed": "bucket",
    "/update_weights_from_tensor": "bucket",
    "/end_weight_update": "commit",
}
OF_ADAPTERS: Final = {"/load_lora_adapter": "load", "/unload_lora_adapter": "unload"}  # of an engine
OF_AN_ADAPTER: Final = re.compile(r"-(\d+)@")  # its version, in its name
LABELLED: Final = "/update_weight_version"  # precedes the first of PATHS
OF_A_COPY: Final = re.compile(r"/copies/[^/]+/\.v(\d+)/")  # of a file that the node daemon writes
WRITES: Final = re.compile("[wax+]")


def at(
    when: When, step: Step, index: int | None = None, *, process: str, version: int = 2, signal: str = "SIGKILL"
) -> Moment:
    """Return a kill point.

    Args:
        when: before, during or after the step.
        step: prepare, bucket, commit, export, load or unload.
        index: of the bucket, from 0; only for buckets.
        process: its name in the run.
        version: weight version that is transferred.
        signal: what the process sends itself.
    """
    assert (index is not None) == (step == "bucket"), "a bucket has an index"
    return Moment(named(when, step, index), version, process, signal)


def named(when: str, step: str, index: int | None) -> str:
    """Name a kill point of one version."""
    return f"{when} {step}" if index is None else f"{when} {step} {index}"


class Updates:
    """Which step of which version a process is at, by sender or receiver."""

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}
        self._buckets: dict[str, int] = {}

    def label(self, key: str, version: int) -> None:
        """Note the version of the update that follows."""
        self._versions[key] = version

    def enter(self, key: str, step: str) -> tuple[int, int | None]:
        """Begin a step. Returns the version, and the index of a bucket."""
        if step != "bucket":
            self._buckets[key] = -1
            return self._versions.get(key, 0), None
        self._buckets[key] = self._buckets.get(key, -1) + 1
        return self._versions.get(key, 0), self._buckets[key]


async def struck(
    call: Callable[[], Awaitable[Any]],
    strike: Strike,
    step: str,
    version: int,
    index: int | None,
    *,
    begun: Callable[[], Awaitable[object]],
) -> Any:
    """Make a call with the kill points of its step. `begun` waits until the call is under way."""
    strike(named("before", step, index), version)
    calling = asyncio.ensure_future(call())
    try:
        await begun()
        strike(named("during", step, index), version)
        answer = await calling
    finally:
        calling.cancel()
    strike(named("after", step, index), version)
    return answer


def install_calls() -> None:
    """Kill points of a rank's calls to rollout actors, and of its announcement of files."""
    from runtime.bus.bus import Bus

    strike, call, publish = striker(), Bus.call, Bus.publish
    versions: dict[str, int] = {}  # by weight sync; another stage's first rank does not know them

    async def calling(bus: Bus, instance: str, request: Any, *args: Any, **options: Any) -> Any:
        if hasattr(request, "version") and hasattr(request, "session"):
            versions[request.session] = request.version
        step = CALLS.get(request.__struct_config__.tag)
        if step is None or not getattr(request, "is_commit", True):
            return await call(bus, instance, request, *args, **options)
        return await struck(
            lambda: call(bus, instance, request, *args, **options),
            strike,
            step,
            versions.get(request.session, sys.maxsize),
            getattr(request, "index", None),
            begun=lambda: asyncio.sleep(SENT_S),
        )

    async def publishing(bus: Bus, message: Any) -> int:
        if message.__struct_config__.tag != "weights_announced" or not message.path:
            return await publish(bus, message)
        strike("before commit", message.version)
        answer = await publish(bus, message)
        strike("after commit", message.version)
        return answer

    Bus.call, Bus.publish = calling, publishing  # type: ignore[method-assign, assignment]


def install_exports() -> None:
    """Kill points of the export of an adapter."""
    from actors.trainer.lora import published

    strike, version = striker(), 0

    def begin(_versions: Any, number: int, *_arguments: Any) -> None:
        nonlocal version
        version = number
        strike("before export", number)

    around(published.AdapterVersions, "publish", before=begin, after=lambda answer: strike("after export", version))
    around(published, "complete_directory", before=lambda *_arguments: strike("during export", version))


def install_rank() -> None:
    """Kill points of a train step and of a checkpoint, and of the buckets that a rank passes on."""
    from actors.trainer.weights.export import BucketWriter

    strike = striker()
    rank_moments.install(strike)
    passed = {"bucket": -1, "step": -1}

    def passing(_writer: BucketWriter, bucket: Any, **_options: Any) -> None:
        if bucket:  # the first rank of a stage, which calls rollout actors
            return
        step = rank_moments.train_step()
        passed["bucket"] = passed["bucket"] + 1 if passed["step"] == step else 0
        passed["step"] = step
        strike(named("before", "bucket", passed["bucket"]), step)

    around(BucketWriter, "put", before=passing)


def install_rollout() -> None:
    """Kill points of a rollout actor: its calls to engines."""
    from actors.rollout.sglang.client import SglangClient

    strike, updates, post = striker(), Updates(), SglangClient._post

    async def posting(client: SglangClient, url: str, body: Any, *args: Any, **options: Any) -> bytes:
        for path in (LABELLED, *PATHS, *OF_ADAPTERS):
            if url.endswith(path):
                break
        else:
            return await post(client, url, body, *args, **options)
        if path in OF_ADAPTERS:
            return await struck(
                lambda: post(client, url, body, *args, **options),
                strike,
                OF_ADAPTERS[path],
                version_of_adapter(body),
                None,
                begun=lambda: asyncio.sleep(SENT_S),
            )
        engine = url.removesuffix(path)
        if path == LABELLED:
            updates.label(engine, version_in(body))
            return await post(client, url, body, *args, **options)
        version, index = updates.enter(engine, PATHS[path])
        return await struck(
            lambda: post(client, url, body, *args, **options),
            strike,
            PATHS[path],
            version,
            index,
            begun=lambda: asyncio.sleep(SENT_S),
        )

    SglangClient._post = posting  # type: ignore[method-assign]


def install_engine() -> None:
    """Kill points of a tiny engine: the calls that reach its HTTP server."""
    from aiohttp import web

    strike, updates, build = striker(), Updates(), web.Application.__init__

    @web.middleware
    async def strikes(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        if request.path == LABELLED:
            updates.label("", version_in(msgspec.json.decode(await request.read())))
        if request.path in OF_ADAPTERS:
            version = version_of_adapter(msgspec.json.decode(await request.read()))
            step = OF_ADAPTERS[request.path]
            return await struck(lambda: handler(request), strike, step, version, None, begun=lambda: some_turns(3))
        if request.path not in PATHS:
            return await handler(request)
        await request.read()
        version, index = updates.enter("", PATHS[request.path])
        return await struck(
            lambda: handler(request), strike, PATHS[request.path], version, index, begun=lambda: some_turns(3)
        )

    def built(self: web.Application, *args: Any, middlewares: Any = (), **options: Any) -> None:
        build(self, *args, middlewares=(strikes, *middlewares), **options)

    web.Application.__init__ = built  # type: ignore[method-assign]


def install_sglang() -> None:
    """Kill points in the scheduler of SGLang's server, which holds the model."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    strike, updates, num_updates = striker(), Updates(), 0

    for path, step in PATHS.items():
        name = path.removeprefix("/")
        right = getattr(SchedulerWeightUpdaterManager, name)

        def wrapped(*args: Any, right: Callable[..., Any] = right, step: str = step, **options: Any) -> Any:
            nonlocal num_updates
            num_updates += step == "prepare"
            updates.label("", num_updates)
            version, index = updates.enter("", step)
            strike(named("before", step, index), version)
            answer = right(*args, **options)
            strike(named("after", step, index), version)
            return answer

        setattr(SchedulerWeightUpdaterManager, name, wrapped)


def install_daemon() -> None:
    """Kill point of a node daemon: while it writes a file of the node's own copy."""
    strike = striker()

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[1], str) and WRITES.search(args[1]):
            found = OF_A_COPY.search(str(args[0]))
            if found is not None:
                strike(named("during", "bucket", 0), int(found.group(1)))

    sys.addaudithook(audit)


def version_in(body: dict[str, Any]) -> int:
    """Read the version from the label of an update, VERSION@..."""
    return int(str(body["new_version"]).partition("@")[0])


def version_of_adapter(body: dict[str, Any]) -> int:
    """Read the version from the name of an adapter, RUN-VERSION@..."""
    found = OF_AN_ADAPTER.search(body["lora_name"])
    assert found is not None, body
    return int(found[1])


async def some_turns(number: int) -> None:
    """Let other tasks run."""
    for _ in range(number):
        await asyncio.sleep(0)
