"""The contract: updates in place with a prefix cache. No answer of one version comes from a prefix of another."""

import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import anyio
import pytest
import torch

from actors.rollout.engines.dispatch import Direct
from actors.rollout.engines.fleet import Fleet
from actors.rollout.engines.weights.updater import Updater
from actors.rollout.engines.weights.updates import UpdateTracker
from actors.rollout.engines.weights.verifier import WeightVerifier
from actors.rollout.requests.request import GenerateRequest
from actors.rollout.requests.sending import Generator
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.reading import AnswerReader
from actors.rollout.sglang.served_model import ServedModel
from messages import Segment
from runtime.models.checksums import checksums_of
from tests.sglang.rig import READY_S, left_as_found, request, until
from tests.sglang.server import NUM_SLOTS, TP1, Server, start, wait_until_up
from tests.sglang.test_answers import with_weights
from tests.support.rollout import announcement
from tests.support.sampled import generate

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(3600)]

PREFIX: Final = [2 + index % 26 for index in range(40)]  # of all prompts
NUM_TOKENS: Final = 8
NUM_REQUESTS: Final = 4 * NUM_SLOTS  # of a round, for each engine: most of them wait
SLOW_S: Final = 0.05  # of a forward step during an update, at the first engine; at the second twice as long
CLOSE: Final = 1e-4  # natural log
WANTED, WANTED_AGAIN = 200, 20  # answers of one version; of them sent again, with a cached prefix
MAX_ROUNDS: Final = 30


@dataclass
class Answer:
    """An answer, with what its tries were sent under."""

    prompt: list[int]
    segment: Segment
    keys: list[str]  # of each try: which cached prefixes it may use
    num_cached: int  # tokens of its last try

    @property
    def version(self) -> int | None:
        """Version of its tokens; None: they are of several."""
        found = {span.version for span in self.segment.weight_spans}
        return found.pop() if len(found) == 1 else None

    @property
    def is_sent_again(self) -> bool:
        return len(set(self.keys)) > 1 and self.num_cached > 0


@dataclass
class Engines:
    """Engines with updates in place, whose requests the actor dispatches."""

    servers: Sequence[Server]
    fleet: Fleet
    generator: Generator
    client: SglangClient
    weights: dict[int, Path]
    keys: dict[str, list[str]] = field(default_factory=dict[str, list[str]])  # by request
    version: int = 0

    def __post_init__(self) -> None:
        ask = self.client.generate

        async def noted(
            url: str, body: dict[str, Any], readers: Sequence[AnswerReader], *, routing_key: str = ""
        ) -> None:
            self.keys.setdefault(body["rid"].rpartition("-")[0], []).append(body["extra_key"])
            await ask(url, body, readers, routing_key=routing_key)

        self.client.generate = noted

    def directory(self, version: int) -> Path:
        return self.weights[1 + version % 2]

    async def update(self) -> None:
        """Make the next version the target, and wait until all engines hold it."""
        self.version += 1
        path = self.directory(self.version)
        await self.fleet.set_target(announcement(self.version, path=str(path), checksum=checksums_of(path).total))
        with anyio.fail_after(READY_S * 4):
            await self.fleet.next_version(self.version - 1)
            await until(lambda: all(engine.version == self.version for engine in self.fleet.engines), READY_S * 4)

    async def slow_down(self, seconds: float) -> None:
        for number, server in enumerate(self.servers, start=1):
            await anyio.to_thread.run_sync(server.slow_down, number * seconds)

    async def until_waiting(self) -> None:
        """Wait until requests wait at each engine, behind others that run."""
        for server in self.servers:
            with anyio.fail_after(READY_S):
                while not (await anyio.to_thread.run_sync(server.loads))["num_waiting_reqs"]:  # noqa: ASYNC110 - no event
                    await anyio.sleep(0.01)

    async def answer(self, asked: GenerateRequest) -> Answer:
        generated = await generate(self.generator, asked)
        assert generated is not None
        (sampled,) = generated.answers
        (reader,) = asked.readers
        prompt = asked.inputs[0].prompt_ids.tolist()
        return Answer(prompt, sampled.segment, self.keys[asked.rid], reader.meta.cached_tokens)


@asynccontextmanager
async def engines_of(
    servers: Sequence[Server], weights: dict[int, Path], model: Path, *, keeps_prefixes: bool
) -> AsyncGenerator[Engines]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, anyio.create_task_group() as group:
        client = SglangClient(session)
        updater = Updater(client, "in_place")
        tracker = UpdateTracker(settle_timeout_s=READY_S)
        verifier = WeightVerifier(client, updater, tracker, verify=None, trainer_dtype="float32")
        fleet = Fleet(client, verifier, dispatch=Direct())
        generator = Generator(client, fleet.serving, ServedModel.read(model), keeps_prefixes=keeps_prefixes)
        updater.interrupt_by(generator.running.interrupt)
        for number, server in enumerate(servers):
            await client.flush_cache(server.url, READY_S)
            group.start_soon(fleet.run_engine, f"engine-{number}", server.url)
        group.start_soon(generator.running.run)
        engines = Engines(servers, fleet, generator, client, weights)
        await engines.update()
        try:
            yield engines
        finally:
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                for server in servers:
                    await left_as_found(client, server)


async def one_round(engines: Engines, number: int) -> list[Answer]:
    """New weights come while most requests wait at their engines; a prefix of the old ones is cached there."""
    found: list[Answer] = []

    async def ask(index: int) -> None:
        suffix = [2 + number % 26, 2 + index % 26, 2 + index // 26]
        found.append(await engines.answer(request([*PREFIX, *suffix], NUM_TOKENS, rid=f"lease{number}x{index}-0-0")))

    async with anyio.create_task_group() as group:
        for index in range(2 * len(engines.servers)):
            group.start_soon(ask, index)
    await engines.slow_down(SLOW_S)
    async with anyio.create_task_group() as group:
        for index in range(2 * len(engines.servers), NUM_REQUESTS * len(engines.servers)):
            group.start_soon(ask, index)
        await engines.until_waiting()
        await engines.update()
        await engines.slow_down(0)
    return found


def differences(engines: Engines, answers: Sequence[Answer], model: Path) -> list[float]:
    """Largest difference of each answer to the log-probs that transformers computes under the version of its tokens."""
    from transformers import AutoModelForCausalLM

    found: list[float] = []
    for directory in engines.weights.values():
        own = [each for each in answers if each.version is not None and engines.directory(each.version) == directory]
        if not own:
            continue
        ids = torch.tensor([each.prompt + each.segment.response_ids.tolist() for each in own])  # [N, P + T]
        loaded = AutoModelForCausalLM.from_pretrained(with_weights(model, directory), dtype=torch.float32).eval()
        with torch.inference_mode():
            log_probs = loaded(ids).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[:, -NUM_TOKENS:, 0]
        sampled = torch.tensor([each.segment.rollout_log_probs.tolist() for each in own])
        found += (sampled - log_probs).abs().amax(1).tolist()
    assert len(found) == len(answers)
    return found


@pytest.fixture(scope="module")
def pair(contract_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Two servers of the same model."""
    directory = tmp_path_factory.mktemp("pair")
    servers = [start(TP1, contract_model, directory) for _ in range(2)]
    try:
        for server in servers:
            wait_until_up(server)
        yield servers
    finally:
        for server in servers:
            server.stop()


@pytest.mark.nightly
@pytest.mark.parametrize("num_engines", [1, 2])
async def test_answers_of_one_version_have_no_prefix_of_another(
    pair: list[Server], weights: dict[int, Path], contract_model: Path, num_engines: int
) -> None:
    servers, found = pair[:num_engines], list[Answer]()
    async with engines_of(servers, weights, contract_model, keeps_prefixes=True) as engines:
        for number in range(MAX_ROUNDS):
            found += await one_round(engines, number)
            single = [answer for answer in found if answer.version is not None]
            again = [answer for answer in single if answer.is_sent_again]
            if len(single) >= WANTED and len(again) >= WANTED_AGAIN:
                break
        found_differences = differences(engines, single, contract_model)
    wrong = [value for value in found_differences if value > CLOSE]
    counts = f"{len(single)} answers of one version, {len(again)} of them sent again, {len(wrong)} differ"
    sys.stdout.write(f"{num_engines} engines: {counts}, by at most {max(found_differences):.1e}\n")
    assert len(single) >= WANTED
    assert len(again) >= WANTED_AGAIN
    assert wrong == []


@pytest.mark.nightly
async def test_without_sending_them_again_some_would_have_one(
    pair: list[Server], weights: dict[int, Path], contract_model: Path
) -> None:
    found: list[Answer] = []
    async with engines_of(pair[:1], weights, contract_model, keeps_prefixes=False) as engines:
        for number in range(3):
            found += await one_round(engines, number)
        single = [answer for answer in found if answer.version is not None]
        assert max(differences(engines, single, contract_model)) > CLOSE
