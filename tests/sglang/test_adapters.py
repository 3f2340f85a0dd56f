"""Three adapter versions of a trainer on SGLang's own server at once: verified, and compared with peft."""

from contextlib import aclosing
from pathlib import Path

import aiohttp
import anyio
import peft
import pytest
import torch
import transformers

from actors.rollout.engines.weights.adapters import AdapterUpdates, EngineAdapters
from actors.rollout.engines.weights.files import PublishedFiles
from actors.rollout.engines.weights.updater import Updater
from actors.rollout.engines.weights.updates import UpdateTracker
from actors.rollout.engines.weights.verifier import WeightVerifier
from actors.rollout.sglang.client import SglangClient
from actors.trainer.commands import TrainerRank
from actors.trainer.megatron import groups as ranks
from actors.trainer.weights.publish import Published
from messages import WeightsAnnounced
from runtime.settings.placement import UpdateLimits
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import trainer_topology
from tests.sglang.model import write_contract_model
from tests.sglang.rig import ADMIN_S
from tests.sglang.server import TP1, start, wait_until_up
from tests.support.rollout import announcement
from tests.support.tiny_client import EngineClient

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.anyio,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft reads it
]
VERSIONS = (1, 2, 3)
NUM_TOKENS = 24
CLOSE = 1e-4  # nats
LIMITS = UpdateLimits(stall_s=300.0)
FLAGS = (
    *("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "4", "--max-loras-per-batch", "4"),
    *("--load-format", "auto"),  # with dummy weights SGLang reads no adapter
    *("--max-loaded-loras", "4", "--lora-target-modules"),
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)


def published_by_a_trainer(model: Path, directory: Path) -> list[Published]:
    ranks.leave()
    topology = trainer_topology(
        model,
        directory,
        model={"random_init": False},
        engines={"policy": {"kind": "sglang", "serve_adapters": True}},
        optimizer={"lr": 3e-2},
        trainer={"device": "cpu", "lora": {"rank": 4, "rslora": True}},
    )
    rank = TrainerRank(topology, directory / "run")
    found: list[Published] = []
    for version in VERSIONS:
        rank.train(random_batch(version))
        found.append(rank.publish(version, confirmed=1))
    rank.close()
    return found


def announced(version: int, of: Published) -> WeightsAnnounced:
    told = {"path": str(of.path), "checksum": of.checksum, "size_bytes": of.size_bytes, "files": dict(of.files)}
    return announcement(version, **(told | {"probe": of.probe, "base": of.base, "kind": "lora"}))


async def nobody(_url: str, _adapter: str) -> None:
    await anyio.sleep_forever()


async def test_three_versions_at_once_sample_what_the_trainer_computes(tmp_path: Path) -> None:
    model = write_contract_model(tmp_path / "model")
    published = published_by_a_trainer(model, tmp_path)
    server = start(TP1, model, tmp_path, *FLAGS)
    try:
        await anyio.to_thread.run_sync(wait_until_up, server)
        async with aiohttp.ClientSession() as session, EngineClient(server.url) as plain:
            client = SglangClient(session, admin_timeout_s=ADMIN_S)
            updates = AdapterUpdates(client, "run", moves_on=False, limits=LIMITS, interrupt=nobody)
            updater = Updater(client, "drain", limits=LIMITS)
            verifier = WeightVerifier(
                client, updater, UpdateTracker(), verify=None, trainer_dtype="float32", adapters=updates
            )
            adapters = EngineAdapters(limit=4)
            for version, of in zip(VERSIONS, published, strict=True):
                told, files = announced(version, of), PublishedFiles(LIMITS)
                update = verifier.update_adapter("engine-0", server.url, told, adapters, files, first=version == 1)
                async with aclosing(update) as steps:
                    async for _ in steps:
                        pass
            names = [each.name for each in adapters.loaded]
            assert set(await client.adapters(server.url)) == set(names)
            answers = await plain.generate(
                input_ids=[[3, 4, 5]] * len(names),
                max_new_tokens=NUM_TOKENS,
                lora_path=names,
                params={"temperature": 1.0, "stop_token_ids": []},
            )
            for name in names:
                await client.unload_adapter(server.url, name, ADMIN_S)
            assert await client.adapters(server.url) == {}
    finally:
        server.stop()
    sampled: set[tuple[int, ...]] = set()
    for answer, of in zip(answers, published, strict=True):
        triples = answer["meta_info"]["output_token_logprobs"]
        assert of.base is not None
        base = transformers.AutoModelForCausalLM.from_pretrained(of.base.path)
        tokens = torch.tensor([[3, 4, 5, *answer["output_ids"]]])
        with torch.no_grad():
            rows = peft.PeftModel.from_pretrained(base, of.path)(tokens).logits.log_softmax(-1)[0, 2:-1]
        expected = rows.gather(-1, tokens[0, 3:, None])[:, 0]
        torch.testing.assert_close(torch.tensor([each for each, _, _ in triples]), expected, atol=CLOSE, rtol=0)
        sampled.add(tuple(answer["output_ids"]))
    assert len(sampled) == len(VERSIONS)
