"""Versions that are LoRA adapters: loads pause nothing, requests keep their version, and faults are refused.

Trainer, files, engine, fleet and generator are real. A fault of the engine is planted between client and engine.
"""

import shutil
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import anyio
import anyio.lowlevel
import msgspec
import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.rollout.engines.dispatch import Direct
from actors.rollout.engines.fleet import Fleet
from actors.rollout.engines.memory import MemoryShare
from actors.rollout.engines.status import MemoryLevel
from actors.rollout.engines.weights.adapters import AdapterUpdates, EngineAdapters, ServedAdapter
from actors.rollout.engines.weights.files import PublishedFiles, WeightsDamaged
from actors.rollout.engines.weights.updater import Updater
from actors.rollout.engines.weights.updates import UpdateTracker
from actors.rollout.engines.weights.verification import WeightsMismatch
from actors.rollout.engines.weights.verifier import WeightVerifier
from actors.rollout.requests.sending import Generator
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.control_answers import AdapterAnswer
from actors.rollout.sglang.served_model import ServedModel
from actors.trainer.commands import TrainerRank
from actors.trainer.lora.peft_files import TENSORS
from actors.trainer.megatron import groups as ranks
from actors.trainer.weights.publish import Published
from messages import EngineState, SamplingParams, WeightsAnnounced, WeightSpan
from runtime.settings.placement import UpdateLimits
from runtime.settings.tables.engines import WeightFormat
from tests.actors.trainer.hf import write_model
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import trainer_topology
from tests.support.rollout import announcement
from tests.support.sampled import request_of, taken
from tests.support.tiny_client import EngineClient
from tests.support.tiny_engine import running_engine
from tests.support.tiny_models import write_tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

Tensors = dict[str, Tensor]
NOISE: Final = 0.3  # in the model's weights, so that its log-probs depend on them
NUM_VERSIONS: Final = 4
LONG: Final = 60  # tokens of a request that still runs when something happens to it
LIMITS: Final = UpdateLimits(stall_s=30.0)
ALL_LAYERS: Final = "base_model.model.model.layers."
RUN: Final = "run"


class Run(NamedTuple):
    """Versions of a trainer, which an engine serves."""

    model: Path
    published: list[Published]  # from version 1 on

    def announced(self, version: int, **changes: Any) -> WeightsAnnounced:
        of = self.published[version - 1]
        told = {"path": str(of.path), "checksum": of.checksum, "size_bytes": of.size_bytes, "files": dict(of.files)}
        return announcement(version, **(told | {"probe": of.probe, "base": of.base, "kind": "lora"} | changes))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(tmp_path_factory.mktemp("run"))


def trained(directory: Path, **pool: Any) -> Run:
    model = directory / "model"
    write_model(model, "qwen3", noise=NOISE)
    write_tokenizer(model)
    ranks.leave()
    topology = trainer_topology(
        model,
        directory,
        model={"random_init": False},
        engines={"policy": {"kind": "tiny", **pool}},
        optimizer={"lr": 3e-2},
        trainer={"device": "cpu", "lora": {"rank": 4}},
    )
    rank = TrainerRank(topology, directory / "run")
    published: list[Published] = []
    for version in range(1, NUM_VERSIONS + 1):
        rank.train(random_batch(version))  # B is zero before the first step
        published.append(rank.publish(version, confirmed=1))
    rank.close()
    return Run(model, published)


@pytest.fixture(scope="module")
def url(run: Run) -> Iterator[str]:
    with running_engine(run.model, "--load-format", "dummy", "--enable-lora", "--max-loaded-loras", "4") as engine:
        yield engine.url


class Watched(SglangClient):
    """A client that counts calls which change the engine, and notes how many adapters are loaded at once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.calls = Counter[str]()
        self.num_loaded: list[int] = []

    async def _guarded_post(self, url: str, body: dict[str, Any], timeout_s: float) -> bytes:
        self.calls[url.rpartition("/")[2]] += 1
        return await super()._guarded_post(url, body, timeout_s)

    async def load_adapter(self, engine: str, name: str, path: str, timeout_s: float) -> AdapterAnswer:
        answer = await super().load_adapter(engine, name, path, timeout_s)
        self.num_loaded.append(len(answer.loaded_adapters))
        return answer


class Rig(NamedTuple):
    """The parts of one rollout actor, and its engine."""

    run: Run
    client: Watched
    fleet: Fleet
    generator: Generator
    engine: EngineClient

    async def update(self, version: int) -> None:
        """Make a version the target, and wait until the engine holds it."""
        await self.fleet.set_target(self.run.announced(version))
        with anyio.fail_after(200):
            await self.fleet.next_version(version - 1)

    def request(self, name: str, num_tokens: int, min_version: int = 1) -> Any:
        params = SamplingParams(max_new_tokens=num_tokens)
        request = request_of(f"{name}-0-0", [[3, 4, 5]], params, seeds=[7], streamed=True)
        request.begun, request.min_version = (lambda: None), min_version
        return request


@asynccontextmanager
async def rig_of(
    url: str, run: Run, *, limit: int = 4, moves_on: bool = False, colocated: bool = False
) -> AsyncGenerator[Rig]:
    """Run the fleet and the generator of a rollout actor, with version 1 in the engine."""
    async with (
        aiohttp.ClientSession() as session,
        EngineClient(url) as engine,
        anyio.create_task_group() as group,
    ):
        client = Watched(session)
        updater = Updater(client, "abort" if moves_on else "drain", limits=LIMITS)
        verifier = WeightVerifier(
            client,
            updater,
            UpdateTracker(),
            verify=None,
            trainer_dtype="float32",
            adapters=AdapterUpdates(client, RUN, moves_on=moves_on, limits=LIMITS, interrupt=updater.interrupt),
        )
        fleet = Fleet(client, verifier, dispatch=Direct(), max_adapters=limit, update_groups=2)
        generator = Generator(client, fleet.serving, ServedModel.read(run.model))
        updater.interrupt_by(generator.running.interrupt)
        rig = Rig(run, client, fleet, generator, engine)
        share = MemoryShare(client, "engine-0", url) if colocated else None
        group.start_soon(partial(fleet.run_engine, "engine-0", url, files=PublishedFiles(LIMITS), memory_share=share))
        await rig.update(1)
        try:
            yield rig
        finally:
            await engine.post("/slow_down", {"forward_sleep_time": 0})
            group.cancel_scope.cancel()


async def until_loaded(client: SglangClient, url: str, versions: set[str]) -> None:
    """Wait until an engine has loaded these versions of the run, and these adapters of others, by its own account."""
    with anyio.fail_after(200):
        while {name.removeprefix(f"{RUN}-").partition("@")[0] for name in await client.adapters(url)} != versions:
            await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def running(rig: Rig, name: str, min_version: int = 1) -> AsyncGenerator[list[Any]]:
    """Have a long request of the newest version run inside the block, slowly. Afterwards the list has what it got."""
    found: list[Any] = []
    request = rig.request(name, LONG, min_version)
    await rig.engine.post("/slow_down", {"forward_sleep_time": 0.05})

    async def generate() -> None:
        while (await rig.generator.generate(request)).value == "resend":
            found.extend(taken(request))
            request.max_new_tokens = LONG - request.inputs[0].buffer.num_tokens
        found.extend(taken(request))

    async with anyio.create_task_group() as group:
        group.start_soon(generate)
        with anyio.fail_after(200):
            while not any(reader.num_tokens for reader in request.readers):
                await anyio.lowlevel.checkpoint()
        yield found
        await rig.engine.post("/slow_down", {"forward_sleep_time": 0})


async def test_a_request_keeps_its_version_while_newer_ones_are_loaded_and_used(url: str, run: Run) -> None:
    async with rig_of(url, run) as rig:
        before = rig.client.calls.copy()
        async with running(rig, "long") as of_first:
            await rig.update(2)
            second = rig.request("second", 4, min_version=2)
            await rig.generator.generate(second)
            await rig.update(3)
            await until_loaded(rig.client, url, {"1", "3"})  # without the one that nobody uses
        changes = rig.client.calls - before
        assert set(changes) == {"load_lora_adapter", "unload_lora_adapter"}  # no pause, no update of all weights
        (answer,) = of_first
        assert answer.segment.weight_spans == (WeightSpan(version=1, start=0, end=len(answer.output_ids)),)
        (own,) = taken(second)
        assert own.segment.weight_spans == (WeightSpan(version=2, start=0, end=4),)
        await until_loaded(rig.client, url, {"3"})
        assert before["update_weights_from_disk"] == 1  # the base, once
        (engine,) = rig.fleet.engines
        assert engine.status.pause_s == 0.0


def versions_of(segments: list[Any]) -> list[int]:
    """The versions that sampled a request's tokens, one after the other."""
    return [span.version for each in segments for span in each.segment.weight_spans]


async def test_a_request_moves_on_to_the_newest_version_from_its_tokens(url: str, run: Run) -> None:
    async with rig_of(url, run, moves_on=True) as rig:
        async with running(rig, "long") as found:
            await rig.update(2)
        assert versions_of(found) == [1, 2]


async def test_with_more_in_use_than_fit_requests_of_the_oldest_move_on(url: str, run: Run) -> None:
    async with rig_of(url, run, limit=2) as rig:
        async with running(rig, "first") as of_first:
            await rig.update(2)
            async with running(rig, "second", min_version=2) as of_second:
                await rig.update(3)
                (told,) = rig.fleet.updates(3, 0.0)
                assert told.num_moved_on == 1  # the first one
        assert versions_of(of_first) == [1, 2]
        assert versions_of(of_second) == [2]
        assert max(rig.client.num_loaded) == 2


async def test_a_colocated_engine_gets_base_and_adapter_back_after_it_resumes(url: str, run: Run) -> None:
    async with rig_of(url, run, colocated=True) as rig:
        (engine,) = rig.fleet.engines
        await rig.fleet.allow(MemoryLevel.NOTHING)
        with anyio.fail_after(200):
            await rig.fleet.until(lambda: engine.state is EngineState.RELEASED)
        await rig.fleet.allow(MemoryLevel.LOADED)
        await rig.fleet.set_target(run.announced(2))
        with anyio.fail_after(200):
            await rig.fleet.until(lambda: engine.status.memory_level is MemoryLevel.LOADED)
        await rig.fleet.allow(MemoryLevel.EVERYTHING)
        with anyio.fail_after(200):
            await rig.fleet.next_version(1)
        request = rig.request("after", 4, min_version=2)
        await rig.generator.generate(request)
        (own,) = taken(request)
        assert own.segment.weight_spans == (WeightSpan(version=2, start=0, end=4),)
        await until_loaded(rig.client, url, {"2"})
        assert rig.client.calls["update_weights_from_disk"] == 2  # its base was released too


async def test_what_an_earlier_actor_left_is_unloaded_and_what_others_loaded_is_not(url: str, run: Run) -> None:
    path = str(run.published[0].path)
    async with EngineClient(url) as engine:
        for name in (f"{RUN}-9@engine-0.gone.1", "of-another-run"):
            assert (await engine.post("/load_lora_adapter", {"lora_name": name, "lora_path": path})).status == 200
        async with rig_of(url, run) as rig:
            assert rig.fleet.serving.version == 1
            await until_loaded(rig.client, url, {"1", "of-another-run"})
        await engine.post("/unload_lora_adapter", {"lora_name": "of-another-run"})


async def test_an_update_group_does_not_wait_for_another_one(url: str, run: Run) -> None:
    """As it does where an update pauses its engines: here a load may wait until requests have ended."""
    async with rig_of(url, run) as rig:
        rolling = rig.fleet._rolling
        rolling.wait("engine-1")
        assert rolling.take("engine-1")
        await rig.update(2)


async def test_an_adapter_whose_load_outlived_its_caller_is_unloaded(url: str, run: Run) -> None:
    """A rollout actor was killed in the middle of it, and the next one had asked the engine before the load ended."""
    async with rig_of(url, run) as rig:
        late = {"lora_name": f"{RUN}-9@engine-0.gone.1", "lora_path": str(run.published[0].path)}
        assert (await rig.engine.post("/load_lora_adapter", late)).status == 200
        await rig.update(2)
        await until_loaded(rig.client, url, {"2"})


# faults


def without_a_module(tensors: Tensors, _config: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.startswith(f"{ALL_LAYERS}1.mlp.down_proj")]:
        del tensors[name]


def layers_swapped(tensors: Tensors, _config: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.startswith(f"{ALL_LAYERS}0.self_attn.o_proj")]:
        other = name.replace(f"{ALL_LAYERS}0.", f"{ALL_LAYERS}1.")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def alpha_doubled(_tensors: Tensors, config: dict[str, Any]) -> None:
    config["lora_alpha"] *= 2


FAULTS: Final[dict[str, Callable[[Tensors, dict[str, Any]], None]]] = {
    "one module missing": without_a_module,
    "A and B of two layers swapped": layers_swapped,
    "alpha doubled": alpha_doubled,
}


def planted(run: Run, fault: str, directory: Path) -> Path:
    """Write version 2 with a fault. The fault "the version before" is version 1."""
    source = run.published[1 if fault in FAULTS else 0].path
    assert source is not None
    shutil.copytree(source, directory)
    if fault in FAULTS:
        tensors, place = load_file(directory / TENSORS), directory / "adapter_config.json"
        config = msgspec.json.decode(place.read_bytes())
        FAULTS[fault](tensors, config)
        save_file({name: each.contiguous() for name, each in tensors.items()}, directory / TENSORS)
        place.write_bytes(msgspec.json.encode(config))
    return directory


EVERY_FAULT: Final = ("the version before", *FAULTS)


class Misled(SglangClient):
    """A client whose engine loads another adapter than it is told, and does not notice."""

    def __init__(self, session: aiohttp.ClientSession, path: Path, *, reports_sums: bool) -> None:
        super().__init__(session)
        self._path, self._reports_sums = path, reports_sums

    async def load_adapter(self, engine: str, name: str, path: str, timeout_s: float) -> AdapterAnswer:
        answer = await super().load_adapter(engine, name, str(self._path), timeout_s)
        told = {each: path if each == name else where for each, where in answer.loaded_adapters.items()}
        return AdapterAnswer(loaded_adapters=told, checksums=answer.checksums if self._reports_sums else {})


async def nobody(_url: str, _adapter: str) -> None:
    await anyio.sleep_forever()


async def verify(
    client: SglangClient,
    url: str,
    told: WeightsAnnounced,
    *,
    checks_files: bool = False,
    weight_format: WeightFormat = "as_trained",
) -> None:
    """Update the engine by a rollout actor without requests, and unload what it loaded."""
    adapters = EngineAdapters(limit=4)
    updates = AdapterUpdates(client, RUN, moves_on=False, limits=LIMITS, interrupt=nobody)
    updater = Updater(client, "drain", limits=LIMITS)
    tracker = UpdateTracker()
    verifier = WeightVerifier(
        client,
        updater,
        tracker,
        verify=None,
        trainer_dtype="float32",
        weight_format=weight_format,
        adapters=updates,
    )
    files = PublishedFiles(LIMITS if checks_files else None)
    try:
        async with aclosing(verifier.update_adapter("engine-0", url, told, adapters, files, first=True)) as steps:
            async for _ in steps:
                pass
        assert adapters.newest is not None
        assert tracker.is_verified(adapters.newest.label)
    finally:
        for name in await client.adapters(url):
            await client.unload_adapter(url, name, 10.0)


@pytest.mark.parametrize("fault", EVERY_FAULT)
async def test_faults_of_the_engine_are_found_by_its_sums_and_by_the_probe(
    fault: str, url: str, run: Run, tmp_path: Path
) -> None:
    path = planted(run, fault, tmp_path / "v")
    async with aiohttp.ClientSession() as session:
        for reports_sums in (True, False):  # as the tiny engine does, and as SGLang does
            by_sums = reports_sums and fault != "alpha doubled"  # which is not in the tensors
            expected = "was announced" if by_sums else "its log-probs of the probe differ from the trainer's"
            with pytest.raises(WeightsMismatch, match=expected):
                await verify(Misled(session, path, reports_sums=reports_sums), url, run.announced(2))
        await verify(SglangClient(session), url, run.announced(2))  # it was the fault that was refused


@pytest.mark.parametrize("fault", EVERY_FAULT)
async def test_faults_in_the_files_are_found_before_the_engine_reads_them(
    fault: str, url: str, run: Run, tmp_path: Path
) -> None:
    told = run.announced(2, path=str(planted(run, fault, tmp_path / "v")))
    async with aiohttp.ClientSession() as session:
        client = Watched(session)
        with pytest.raises(WeightsDamaged):
            await verify(client, url, told, checks_files=True)
        await verify(client, url, run.announced(2), checks_files=True)


async def test_the_right_adapter_on_another_base_is_refused(url: str, run: Run, tmp_path: Path) -> None:
    base = run.published[1].base
    assert base is not None
    shutil.copytree(base.path, other := tmp_path / "base")
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1.2
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    wrong = msgspec.structs.replace(base, path=str(other))
    async with aiohttp.ClientSession() as session:
        client = SglangClient(session)
        with pytest.raises(WeightsMismatch, match="differ from the trainer's sums"):
            await verify(client, url, run.announced(2, base=wrong))
        unknown = msgspec.structs.replace(wrong, engine_sums=None)
        with pytest.raises(WeightsMismatch, match="its log-probs of the probe differ from the trainer's"):
            await verify(client, url, run.announced(2, base=unknown))


@pytest.mark.nightly
async def test_an_adapter_is_verified_on_a_base_that_was_rounded_for_engines(tmp_path: Path) -> None:
    run = trained(tmp_path, weight_format="bfloat16")
    wrong = planted(run, "A and B of two layers swapped", tmp_path / "v")
    flags = ("--dtype", "bfloat16", "--load-format", "dummy", "--enable-lora")
    with running_engine(run.model, *flags) as engine:
        async with aiohttp.ClientSession() as session:
            for client in (Misled(session, wrong, reports_sums=False), SglangClient(session)):
                with pytest.raises(WeightsMismatch) if isinstance(client, Misled) else nullcontext():
                    await verify(client, engine.url, run.announced(2), weight_format="bfloat16")


# which adapters are loaded and used, without an engine


async def test_an_adapter_that_is_being_verified_is_not_unloaded() -> None:
    adapters = EngineAdapters(limit=3)
    first, second = ServedAdapter("a", "1@a", 1), ServedAdapter("b", "2@b", 2)
    for adapter in (first, second):
        adapters.begin(adapter)
        assert adapter not in adapters.older
        adapters.end(adapter, is_verified=adapter is first)
    assert adapters.newest == first
    assert adapters.older == [second]  # it was refused
    with adapters.used() as used:
        assert used == first
        assert adapters.is_used("a")
    assert not adapters.is_used("a")
